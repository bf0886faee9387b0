# SPDX-License-Identifier: Apache-2.0
"""Host memory of torch tensors as numpy sees it, and back, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.dtypes import DType

__all__ = ["host_bits", "tensor_of"]

Array = npt.NDArray[np.generic]


class _HostMemory:
    """The memory of a tensor, as numpy asks for it.

    Not by `Tensor.numpy()`, after which a tensor can never be resized again.
    """

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: torch.Tensor, bits: np.dtype[Any]) -> None:
        item = bits.itemsize
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple([step * item for step in tensor.stride()]),
            "typestr": bits.str,
        }


def host_bits(tensor: torch.Tensor, dtype: DType) -> Array:
    """The same host memory as a numpy array of bits."""
    bits = dtype.bits()
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), bits)
    return np.asarray(_HostMemory(tensor, bits))


def tensor_of(array: Array, dtype: DType) -> torch.Tensor:
    """A tensor over the memory of a contiguous array of bits."""
    kind = getattr(torch, dtype.torch)
    if dtype.itemsize == 16:
        return torch.from_numpy(array.view(np.complex128))
    signed = np.uint8 if dtype.itemsize == 1 else np.dtype(f"i{dtype.itemsize}")
    return torch.from_numpy(array.view(signed)).view(kind)
