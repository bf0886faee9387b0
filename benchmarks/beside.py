"""What a save in the background does to a program that goes on computing.

- `Products`: large matrix products on the device, one group of them ahead of the host as a training
  loop is; how many of them a second, alone and while a save is written.
- `Captures`: CUDA graphs of a small product, captured over and over while a save is staged and
  written. Every second one is captured without waiting for the device first, as `torch.cuda.graph`
  does, so that copies of the save are under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.device_rates import synchronize

SIZE = 4096
SIZE_CPU = 256
"""Without a device: only to see that it works."""
GROUP = 16
"""Products between two looks at the clock."""
ENOUGH = 2000
"""Captures of one save."""


@dataclass
class Pace:
    """How fast products came."""

    seconds: float
    groups: list[float] = field(default_factory=list)
    """Seconds of each."""

    @property
    def per_s(self) -> float:
        return len(self.groups) * GROUP / self.seconds if self.seconds else 0.0

    def plain(self) -> dict[str, float]:
        ordered = sorted(self.groups) or [0.0]
        return {
            "per_s": self.per_s,
            "seconds": self.seconds,
            "middle_ms": median(ordered) * 1e3,
            "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3,
            "most_ms": ordered[-1] * 1e3,
        }


class Products:
    """Matrix products of bfloat16."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_device = device.type == "cuda"
        size, dtype = (SIZE, torch.bfloat16) if on_device else (SIZE_CPU, torch.float32)
        self.one, self.other, self.out = (
            torch.ones((size, size), dtype=dtype, device=device) for _ in range(3)
        )

    def run(self, is_over: Callable[[], bool]) -> Pace:
        """Until it is over; at least one group."""
        synchronize(self.device)
        groups: list[float] = []
        ahead = self._begin()
        begun = last = time.perf_counter()
        while True:
            following = self._begin()
            if ahead is not None:
                ahead.synchronize()
            now = time.perf_counter()
            groups.append(now - last)
            last, ahead = now, following
            if is_over():
                return Pace(last - begun, groups)

    def _begin(self) -> Any:
        """One group, and what tells when it is done."""
        for _ in range(GROUP):
            torch.mm(self.one, self.other, out=self.out)
        if self.device.type != "cuda":
            return None
        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        return event

    def alone(self, seconds: float) -> Pace:
        end = time.perf_counter() + seconds
        return self.run(lambda: time.perf_counter() >= end)


@dataclass
class Captured:
    """What became of captures."""

    staging: int = 0
    """Begun and ended before the save was staged."""
    writing: int = 0
    """Later, and before it was done."""
    failed: list[str] = field(default_factory=list)


def capture_until(
    capture: Callable[[int], None], is_staged: Callable[[], bool], is_done: Callable[[], bool]
) -> Captured:
    """Capture again and again until a save is done, or often enough."""
    out = Captured()
    number = 0
    while not is_done() and number < ENOUGH:
        try:
            capture(number)
        except RuntimeError as error:
            out.failed.append(str(error).strip().splitlines()[0])
        if not is_staged():
            out.staging += 1
        elif not is_done():
            out.writing += 1
        number += 1
    return out


class Captures:
    """Graphs of one small product."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = torch.cuda
        self.matrix = torch.full((64, 64), 0.5, device=device)
        self.right = self.matrix @ self.matrix
        self.stream = cuda.Stream(device)
        self.stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(self.stream):  # once before the capture, as torch asks
            self.matrix @ self.matrix
        synchronize(device)

    def capture(self, number: int) -> None:
        """Raises what CUDA says of calls that other threads make meanwhile."""
        cuda: Any = torch.cuda
        graph = cuda.CUDAGraph()
        if number % 2 == 0:
            with cuda.graph(graph, stream=self.stream):
                result = self.matrix @ self.matrix
        else:
            with cuda.stream(self.stream):
                graph.capture_begin(capture_error_mode="global")
                try:
                    result = self.matrix @ self.matrix
                finally:
                    graph.capture_end()
        with cuda.stream(self.stream):
            graph.replay()
            right = torch.equal(result, self.right)
        if not right:
            raise RuntimeError("a graph captured during a save computes something else")
