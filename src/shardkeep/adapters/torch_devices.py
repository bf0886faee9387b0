# SPDX-License-Identifier: Apache-2.0
"""Elements of tensors on accelerators, brought over and sent back block by block.

Copies run on a stream of their own for each thread, between the device and pinned buffers that are
used again: no tensor is ever whole on the host. Whoever starts a save or a load has waited
for the device before (`settle`), so nothing still computes what is copied.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.adapters.torch_memory import host_bits, tensor_of
from shardkeep.arrays import Bytes, region
from shardkeep.boxes import flat_range_boxes
from shardkeep.dtypes import DType
from shardkeep.engine.pages import page_aligned

__all__ = ["DeviceSink", "DeviceSource", "pinned_memory"]

_of_thread = threading.local()


def pinned_memory(nbytes: int) -> Bytes:
    """Whole pages that devices copy from and to directly; plain memory where that is refused."""
    memory = page_aligned(nbytes)
    address = memory.__array_interface__["data"][0]
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(address, nbytes, 0)) == 0:
        # Let go of before the memory is: the array that owns it is the last to go.
        owner = memory if memory.base is None else memory.base
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
    return memory


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Copies inside run beside everything else on the device, and are done on leaving."""
    if device.type != "cuda":
        yield
        return
    streams: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    stream = streams.get(device)
    if stream is None:
        stream = streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()  # also after an error: nobody may use the buffer before


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Elements on an accelerator, or behind a lazy conjugate: brought over block by block."""

    tensor: torch.Tensor
    """Never copied as a whole."""
    dtype: DType
    """Element type."""

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        """Bring the elements to the host and copy their bits."""
        tensor = self.tensor
        with _own_stream(tensor.device):
            if tensor.is_cuda and tensor.is_contiguous() and not _is_lazy(tensor):
                bits = tensor.view(-1)[start:stop].view(torch.uint8)
                torch.from_numpy(out).copy_(bits, non_blocking=True)
                return
            at = 0
            for offsets, sizes in flat_range_boxes(tuple(tensor.shape), start, stop):
                part = tensor[region(offsets, sizes)].resolve_conj().resolve_neg()
                host = part.contiguous().cpu()
                bits_ = np.ascontiguousarray(host_bits(host, self.dtype)).reshape(-1)
                block = bits_.view(np.uint8)
                np.copyto(out[at : at + block.size], block)
                at += block.size

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> DeviceSource:
        """A view of a box."""
        return DeviceSource(self.tensor[region(offsets, sizes)], self.dtype)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


@dataclass(frozen=True, slots=True)
class DeviceSink:
    """Memory on an accelerator; casts happen there."""

    tensor: torch.Tensor
    """The target."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Send a block over; the host buffer is free again on return."""
        source = tensor_of(np.ascontiguousarray(block), dtype)
        # A contiguous copy of a block without dimensions has one.
        place = self.tensor[region(offsets, block.shape)]
        with _own_stream(place.device):
            place.copy_(source.reshape(block.shape), non_blocking=True)
