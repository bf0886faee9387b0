"""What a snapshot costs at best: one copy of every byte, into memory that is ready for it.

- Host memory: every tensor into one stretch of touched memory, in pieces of `PIECE` bytes, by as
  many threads as a snapshot has (`np.copyto`).
- Device memory: one copy of up to `SOME` bytes into one pinned buffer, on a stream of its own; the
  rate of that, for all bytes of the state.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.device_rates import synchronize

PIECE = 8 << 20
SOME = 4 << 30


class Yardstick(Protocol):
    """Copies a state once."""

    def seconds(self) -> float:
        """Of one copy of all of it, measured now."""


class HostCopy:
    """Tensors in host memory, side by side into other host memory."""

    def __init__(self, tensors: list[Any], threads: int) -> None:
        self.threads = threads
        self.memory = np.ones(sum(tensor.nbytes for tensor in tensors), np.uint8)  # touched
        self.pieces: list[tuple[Any, Any]] = []
        at = 0
        for tensor in tensors:
            source = tensor.reshape(-1).view(torch.uint8).numpy()
            for low in range(0, len(source), PIECE):
                part = source[low : low + PIECE]
                self.pieces.append((self.memory[at : at + len(part)], part))
                at += len(part)

    def seconds(self) -> float:
        pieces = iter(self.pieces)

        def work(_: int) -> None:
            for target, source in pieces:  # one step of a list is whole under the lock
                np.copyto(target, source)

        with ThreadPoolExecutor(self.threads) as pool:
            begun = time.perf_counter()
            list(pool.map(work, range(self.threads)))
            return time.perf_counter() - begun


class DeviceCopy:
    """Bytes of a device into one pinned buffer."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        some = min(nbytes, SOME)
        on_device = device.type == "cuda"
        self.source = torch.zeros(some, dtype=torch.uint8, device=device)
        self.target = torch.zeros(some, dtype=torch.uint8, pin_memory=on_device)
        cuda: Any = torch.cuda
        self.stream = cuda.Stream(device) if on_device else None

    def seconds(self) -> float:
        synchronize(self.device)
        begun = time.perf_counter()
        with torch.cuda.stream(self.stream):
            self.target.copy_(self.source, non_blocking=True)
        synchronize(self.device)
        return (time.perf_counter() - begun) * self.nbytes / len(self.source)
