# SPDX-License-Identifier: Apache-2.0
"""Elements of tensors on accelerators, brought over and sent back block by block.

Copies run on a stream of their own for each thread, between the device and pinned buffers that are
used again: no tensor is ever whole on the host. Whoever starts a save or a load has waited
for the device before (`settle`), so nothing still computes what is copied; an asynchronous save has
its copies come after that instead (`follow_current`), and asks the device nothing from then on.

What needs a device is marked "no cover": `tests/device` runs it, by hand, where there is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shardkeep.adapters.torch_memory import host_bits, tensor_of
from shardkeep.arrays import Bytes, SmallPart, StagedSource, region
from shardkeep.boxes import flat_range_boxes
from shardkeep.dtypes import DType
from shardkeep.engine.pages import page_aligned
from shardkeep.memory import address_of

__all__ = [
    "PINNED",
    "DeviceSink",
    "DeviceSource",
    "PinnedStaging",
    "follow_current",
]

MOST_KEPT = 384 << 20
"""Bytes of registered memory that wait for whoever moves as much at a time: registering is slow."""

_of_thread = threading.local()


class PinnedStaging:
    """Copies between devices and registered host memory, begun by one thread after the other.

    Small arrays go together: one copy between host and device, many on the device.
    """

    def __init__(self) -> None:
        self._kept: list[Bytes] = []
        """Buffers of one size, that of the last save or load."""
        self._lock = threading.Lock()
        self._marks: Bytes = np.empty(0, np.uint8)
        self._ones: dict[torch.device, torch.Tensor] = {}

    def allocate(self, nbytes: int) -> Bytes:
        """Whole pages that devices copy from and to directly; plain ones where that is refused."""
        with self._lock:
            if self._kept and len(self._kept[-1]) == nbytes:
                return self._kept.pop()
            self._kept.clear()
        return self._pinned(nbytes)

    def _pinned(self, nbytes: int) -> Bytes:  # pragma: no cover
        """New memory that is registered for as long as it is there."""
        memory = page_aligned(nbytes)
        # Let go of before the memory is: the array that owns it is the last to go.
        owner = memory if memory.base is None else memory.base
        # Not when the program ends, while a save may still go on: the device lets go by itself.
        weakref.finalize(owner, self.pin(memory)).atexit = False
        return memory

    def pin(self, memory: Bytes) -> Callable[[], None]:  # pragma: no cover
        """Register it; where that is refused, copies still work, through memory of torch's."""
        address = address_of(memory)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, len(memory), 0)) != 0:
            return lambda: None
        return lambda: runtime.cudaHostUnregister(address)

    def release(self, buffer: Bytes) -> None:
        """Keep it for the next save or load, but not too many, and of one size only."""
        with self._lock:
            if self._kept and len(self._kept[-1]) != len(buffer):
                self._kept.clear()
            if (len(self._kept) + 1) * len(buffer) <= MOST_KEPT:
                self._kept.append(buffer)

    def begin_gather(self, sources: Sequence[StagedSource], out: Bytes) -> None:
        """Side by side into memory of the device, and from there in one copy."""
        tensors = [source.tensor for source in sources if isinstance(source, DeviceSource)]
        assert len(tensors) == len(sources)
        device = tensors[0].device
        scratch = None
        if device.type == "cuda" and all(tensor.device == device for tensor in tensors):
            scratch = _scratch(len(out), device)
        if scratch is None:
            _one_by_one(sources, out)
            return
        with _own_stream(device):
            parts = torch.split_with_sizes(scratch, [tensor.nbytes for tensor in tensors])
            whole = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]
            torch._foreach_copy_(list(parts), [_flat_bytes(tensor) for tensor in whole])
            torch.from_numpy(out).copy_(scratch, non_blocking=True)

    def begin_scatter(self, data: Bytes, parts: Sequence[SmallPart]) -> Sequence[SmallPart]:
        """In one copy into memory of the device, and from there to their places."""
        device = next((p.sink.tensor.device for p in parts if isinstance(p.sink, DeviceSink)), None)
        if device is None or device.type != "cuda":
            return parts
        left: list[SmallPart] = []
        places: list[torch.Tensor] = []
        taken: list[SmallPart] = []
        for part in parts:
            place = _place(part, device)
            if place is None:
                left.append(part)
            else:
                places.append(place)
                taken.append(part)
        low, high = min(part.begin for part in parts), max(part.end for part in parts)
        scratch = _scratch(high - low, device) if taken else None
        if scratch is None:
            return parts
        with _own_stream(device):
            scratch.copy_(torch.from_numpy(data[low:high]), non_blocking=True)
            found = [scratch[part.begin - low : part.end - low] for part in taken]
            torch._foreach_copy_(places, found)
        return left

    def fence(self) -> Callable[[], None]:  # pragma: no cover
        """Behind all that this thread has begun."""
        events = [stream.record_event() for stream in _streams().values()]

        def wait() -> None:
            for event in events:
                event.synchronize()

        return wait

    def here(self) -> Callable[[], None]:  # pragma: no cover
        """Behind what this thread's streams wait for."""
        events = {device: stream.record_event() for device, stream in _streams().items()}

        def follow() -> None:
            for device, event in events.items():
                with _own_stream(device):
                    torch.cuda.current_stream(device).wait_event(event)

        return follow

    def arrival(self) -> Callable[[], bool]:  # pragma: no cover
        """The device sets a byte of host memory behind each stream's copies."""
        marks = []
        for device, stream in _streams().items():
            mark = self._next_mark()
            with torch.cuda.stream(stream):
                torch.from_numpy(mark).copy_(self._one(device), non_blocking=True)
            marks.append(mark)
        return lambda: all(mark[0] for mark in marks)

    def _next_mark(self) -> Bytes:  # pragma: no cover
        with self._lock:
            if not len(self._marks):
                self._marks = self._pinned(mmap.PAGESIZE)
            mark, self._marks = self._marks[:1], self._marks[1:]
            return mark

    def _one(self, device: torch.device) -> torch.Tensor:  # pragma: no cover
        if device not in self._ones:
            one = torch.ones(1, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)  # once: all threads use it from now on
            self._ones[device] = one
        return self._ones[device]

    def be_quiet(self) -> None:  # pragma: no cover
        """Calls of this thread do not end a graph capture that another is in the middle of."""
        runtime = _runtime_library()
        if runtime is not None:
            runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))

    def duplicate(
        self, sources: Sequence[StagedSource], beside: Sequence[StagedSource] = ()
    ) -> Sequence[StagedSource] | None:
        """Only where as much again stays free: the program may be about to need it."""
        ours = [source for source in sources if isinstance(source, DeviceSource)]
        assert len(ours) == len(sources)
        need, again = _bytes_of(sources), _bytes_of(beside)
        for device, nbytes in need.items():
            wanted = 2 * nbytes + again[device]
            if device.type == "cuda" and wanted > torch.cuda.mem_get_info(device)[0]:
                return None
        out = []
        try:
            for device, some in groupby(ours, lambda source: source.tensor.device):
                with _own_stream(device):  # to enter it takes longer than to ask for a copy
                    for source in some:
                        copy = source.tensor.clone(memory_format=torch.contiguous_format)
                        out.append(DeviceSource(copy, source.dtype))
        except torch.OutOfMemoryError:
            return None
        finally:
            _finish_copies()
        return out


def _bytes_of(sources: Sequence[StagedSource]) -> Counter[torch.device]:
    found: Counter[torch.device] = Counter()
    for source in sources:
        assert isinstance(source, DeviceSource)
        found[source.tensor.device] += source.tensor.nbytes
    return found


PINNED = PinnedStaging()


def follow_current(device: torch.device) -> None:  # pragma: no cover
    """What this thread copies from now on comes after what it has asked of the device so far."""
    with _own_stream(device):
        own = torch.cuda.current_stream(device)
    own.wait_stream(torch.cuda.current_stream(device))


_RELAXED = 2
"""cudaStreamCaptureModeRelaxed."""


@cache
def _runtime_library() -> ctypes.CDLL | None:  # pragma: no cover
    """CUDA's runtime as it is loaded already."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip().rpartition(" ")[2]
            if "libcudart.so" in path:
                library = ctypes.CDLL(path)
                library.cudaThreadExchangeStreamCaptureMode  # noqa: B018
                return library
    return None


def _streams() -> dict[torch.device, torch.cuda.Stream]:
    """Of this thread, one for each device it has copied from or to."""
    found: dict[torch.device, torch.cuda.Stream] = _of_thread.__dict__.setdefault("streams", {})
    return found


@contextlib.contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Copies inside run beside everything else on the device."""
    if device.type != "cuda":
        yield
        return
    streams = _streams()
    if device not in streams:
        streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[device]):
        yield


def _finish_copies() -> None:
    for stream in _streams().values():
        stream.synchronize()


@dataclass(frozen=True, slots=True)
class DeviceSource:
    """Elements on an accelerator, or behind a lazy conjugate: brought over block by block."""

    tensor: torch.Tensor
    """Never copied as a whole."""
    dtype: DType
    """Element type."""

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        """Bring the elements to the host and copy their bits."""
        try:
            self.begin_read(start, stop, out)
        finally:
            _finish_copies()  # also after an error: nobody may use the memory before

    def begin_read(self, start: int, stop: int, out: Bytes) -> None:
        """From CUDA devices they come while something else is done; else they are there."""
        tensor = self.tensor
        with _own_stream(tensor.device):
            if tensor.is_cuda and tensor.is_contiguous() and not _is_lazy(tensor):
                bits = _flat_bytes(tensor.view(-1)[start:stop])
                torch.from_numpy(out).copy_(bits, non_blocking=True)
                return
            at = 0
            for offsets, sizes in flat_range_boxes(tuple(tensor.shape), start, stop):
                part = tensor[region(offsets, sizes)].resolve_conj().resolve_neg()
                if part.is_cuda:
                    # Memory that torch hands out again only behind this copy.
                    bits = _flat_bytes(part.contiguous())
                    torch.from_numpy(out[at : at + bits.numel()]).copy_(bits, non_blocking=True)
                    at += bits.numel()
                    continue
                host = part.contiguous().cpu()
                bits_ = np.ascontiguousarray(host_bits(host, self.dtype)).reshape(-1)
                block = bits_.view(np.uint8)
                np.copyto(out[at : at + block.size], block)
                at += block.size

    @property
    def address(self) -> int:
        """Of the first element."""
        return self.tensor.data_ptr()

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> DeviceSource:
        """A view of a box."""
        return DeviceSource(self.tensor[region(offsets, sizes)], self.dtype)


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def _scratch(nbytes: int, device: torch.device) -> torch.Tensor | None:  # pragma: no cover
    """Memory of the device, if there is any left.

    Torch hands it out again only to this thread's stream, behind what is begun with it now.
    """
    try:
        with _own_stream(device):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def _place(part: SmallPart, device: torch.device) -> torch.Tensor | None:
    """The bytes of a target that a part goes to, where they are one run and mean the same."""
    if not isinstance(part.sink, DeviceSink):
        return None
    tensor = part.sink.tensor
    fits = (
        tensor.device == device
        and tensor.is_contiguous()
        and not _is_lazy(tensor)
        and tensor.dtype is getattr(torch, part.dtype.torch, None)
    )
    return _flat_bytes(tensor)[part.at : part.at + part.end - part.begin] if fits else None


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _one_by_one(sources: Sequence[StagedSource], out: Bytes) -> None:
    at = 0
    for source in sources:
        assert isinstance(source, DeviceSource)
        tensor = source.tensor
        nbytes = tensor.numel() * source.dtype.itemsize
        source.begin_read(0, tensor.numel(), out[at : at + nbytes])
        at += nbytes


@dataclass(frozen=True, slots=True)
class DeviceSink:
    """Memory on an accelerator; casts happen there."""

    tensor: torch.Tensor
    """The target."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Send a block over; the host buffer is free again on return."""
        try:
            self.begin_put(offsets, block, dtype)
        finally:
            _finish_copies()

    def begin_put(
        self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType
    ) -> None:
        """A contiguous block travels while something else is done; others are there on return."""
        flat = np.ascontiguousarray(block)
        place = self.tensor[region(offsets, block.shape)]
        with _own_stream(place.device):
            # A contiguous copy of a block without dimensions has one.
            source = tensor_of(flat, dtype).reshape(block.shape)
            place.copy_(source, non_blocking=True)
            if flat is not block or source.dtype != place.dtype:
                _finish_copies()  # by way of memory of its own, which goes on return
