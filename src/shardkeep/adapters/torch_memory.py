# SPDX-License-Identifier: Apache-2.0
"""Host memory of torch tensors as numpy sees it, and back, bit for bit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.dtypes import DType

__all__ = ["host_bits", "host_bytes", "tensor_of"]

Array = npt.NDArray[np.generic]


class _HostMemory:
    """The memory of a tensor, as numpy asks for it.

    Not by `Tensor.numpy()`, after which a tensor can never be resized again.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        kind: str,
    ) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
        }


def host_bits(tensor: torch.Tensor, dtype: DType) -> Array:
    """The same host memory as a numpy array of bits."""
    bits = dtype.bits()
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), bits)
    strides = tuple([step * bits.itemsize for step in tensor.stride()])
    return np.asarray(_HostMemory(tensor, tuple(tensor.shape), strides, bits.str))


def host_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The host memory of a contiguous tensor, which is not empty."""
    return np.asarray(_HostMemory(tensor, (tensor.nbytes,), None, "|u1"))


def tensor_of(array: Array, dtype: DType) -> torch.Tensor:
    """A tensor over the memory of a contiguous array of bits."""
    kind = getattr(torch, dtype.torch)
    if dtype.itemsize == 16:
        return torch.from_numpy(array.view(np.complex128))
    signed = np.uint8 if dtype.itemsize == 1 else np.dtype(f"i{dtype.itemsize}")
    return torch.from_numpy(array.view(signed)).view(kind)
