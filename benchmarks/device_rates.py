"""Raw rates between a device and pinned host memory, defined in this one place.

`nbytes` move between device memory and a pool of `BUFFERS` pinned buffers of `unit` bytes, on a
stream of their own, a buffer used again once the event behind its last copy has passed. The unit
is the fastest of a few.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import torch

BUFFERS = 4
UNITS = tuple(mib << 20 for mib in (2, 8, 32))
Direction = Literal["to host", "to device"]


class PinnedPool:
    """Buffers in host memory, pinned where there is a device to pin them for."""

    def __init__(self, unit: int, device: torch.device) -> None:
        self.device = device
        self.on_device = device.type == "cuda"
        self.buffers = [
            torch.empty(unit, dtype=torch.uint8, pin_memory=self.on_device) for _ in range(BUFFERS)
        ]
        self.unit = unit

    def rate(self, memory: Any, direction: Direction) -> float:
        """Bytes per second for all of `memory`, bytes on the device."""
        cuda: Any = torch.cuda
        stream = cuda.Stream(self.device) if self.on_device else None
        passed: list[Any] = [None] * BUFFERS
        synchronize(self.device)
        begun = time.perf_counter()
        for number, at in enumerate(range(0, memory.numel(), self.unit)):
            part = memory[at : at + self.unit]
            buffer = self.buffers[number % BUFFERS][: part.numel()]
            last = passed[number % BUFFERS]
            if last is not None:
                last.synchronize()
            source, target = (part, buffer) if direction == "to host" else (buffer, part)
            if stream is None:
                target.copy_(source)
                continue
            with cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                passed[number % BUFFERS] = stream.record_event()
        synchronize(self.device)
        return float(memory.numel() / (time.perf_counter() - begun))


def synchronize(device: torch.device) -> None:
    """Wait for everything that was enqueued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def pinned_rates(device: torch.device, nbytes: int) -> dict[str, dict[str, float]]:
    """Direction to unit to bytes per second; the second of two passes."""
    memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    directions: tuple[Direction, ...] = ("to host", "to device")
    out: dict[str, dict[str, float]] = {direction: {} for direction in directions}
    for unit in UNITS:
        pool = PinnedPool(unit, device)
        for direction in directions:
            for _ in range(2):
                rate = pool.rate(memory, direction)
            out[direction][f"{unit >> 20} MiB"] = rate
    return out
