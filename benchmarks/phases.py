"""Seconds, bytes and peak memory of the phases of a run."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Phase:
    name: str
    seconds: float = 0.0
    cpu: float = 0.0
    """Of all threads: what the phase takes on a machine that others load."""
    nbytes: int = 0
    peak_rss: int = 0


@dataclass
class Phases:
    chunks: int = 0
    """Items of all local plans together."""
    phases: dict[str, Phase] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time something; one phase may be entered many times."""
        row = self.phases.setdefault(name, Phase(name))
        began, cpu = time.perf_counter(), time.process_time()
        yield
        row.seconds += time.perf_counter() - began
        row.cpu += time.process_time() - cpu
        row.peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def note(self, name: str, nbytes: int) -> None:
        self.phases[name].nbytes = nbytes

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.phases.values())

    @property
    def cpu(self) -> float:
        return sum(row.cpu for row in self.phases.values())

    @property
    def peak_rss(self) -> int:
        return max(row.peak_rss for row in self.phases.values())

    @property
    def rate(self) -> float:
        """Chunks planned per second."""
        return self.chunks / self.seconds
