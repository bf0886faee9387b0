"""Processes that fuzz, each for itself, and what they tell."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import signal
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, process_time
from typing import Any

from fuzzing.guidance import Guidance
from fuzzing.targets import Target
from fuzzing.watching import Finding, Watch

__all__ = ["Plan", "Tally", "fuzz", "scratch_folder"]

_SLICE = 500
"""Executions in a row with one parser, for each 20 of its weight."""
_THREADS = 10
"""One of so many slices runs on all cores, and so on as many threads as a load or a save has."""
_KEPT_BYTES = 1 << 15
"""Bytes of an input that is kept."""
_SAME = 3
"""Inputs told of for one fault."""
_SILENT = 300.0
"""Seconds after which a process that tells of no slice is ended."""
_LIVES = 50
"""Processes that may end over one part of the plan."""
_NOTE = 64 << 20
_ONE_ARENA = -8
_END_WITH_PARENT = 1


@dataclass(frozen=True)
class Plan:
    """What is asked for."""

    seed: int
    """Of all that is random."""
    workers: int
    """Processes."""
    executions: int | None = None
    """Of all parsers together."""
    seconds: float | None = None
    """After which no slice is begun."""


@dataclass
class Tally:
    """What was done with one parser."""

    executions: int = 0
    """Inputs parsed."""
    seconds: float = 0.0
    """Of cores, in all processes together; making the inputs included."""
    kept: int = 0
    """Inputs that reached something new."""
    findings: list[Finding] = field(default_factory=list)
    """What must not be."""

    def add(self, other: Tally) -> None:
        """Take what another slice did."""
        self.executions += other.executions
        self.seconds += other.seconds
        self.kept += other.kept
        self.findings += other.findings


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in memory, where there is such a thing."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzzing-", dir=memory) as name:
        yield Path(name)


def fuzz(make: Any, plan: Plan, progress: Any = lambda tallies: None) -> dict[str, Tally]:
    """Fuzz the targets that `make(folder)` gives, in processes forked from this one."""
    ends: dict[Connection, _Worker] = {}
    tallies: dict[str, Tally] = {}
    with scratch_folder() as scratch:
        for number in range(plan.workers):
            worker = _Worker(_Part(number, plan), make, scratch)
            ends[worker.told] = worker
        try:
            while ends:
                begun = monotonic()
                for end in wait(list(ends), timeout=10):
                    worker = ends[end]  # type: ignore[index]
                    if worker.listen(tallies):
                        continue
                    del ends[worker.told]
                    finding = worker.ended()
                    if finding is not None:  # the rest of its part is for another
                        tallies.setdefault(finding.parser, Tally()).findings.append(finding)
                        if worker.part.life < _LIVES:
                            worker = _Worker(worker.part.rest(), make, scratch)
                            ends[worker.told] = worker
                stopped = monotonic() - begun > 2 * 10
                for worker in ends.values():
                    worker.end_if_silent(stopped=stopped)
                progress(tallies)
        except KeyboardInterrupt:
            pass  # what was done so far is told
        finally:
            for worker in ends.values():
                worker.kill()
    return tallies


@dataclass
class _Part:
    """Of the plan, what one process does, and another goes on with if an input ends it."""

    number: int
    plan: Plan
    life: int = 0
    """How many processes have ended over it."""
    begun: float = field(default_factory=monotonic)
    done: Counter[str] = field(default_factory=Counter)
    """Executions, by parser."""

    def rest(self) -> _Part:
        """For the next process."""
        return replace(self, life=self.life + 1)


class _Worker:
    """One process, seen from outside."""

    def __init__(self, part: _Part, make: Any, scratch: Path) -> None:
        self.part = part
        self.heard = monotonic()
        self._note = mmap.mmap(-1, _NOTE)
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(reading)
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # that is for the one who listens
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
                folder = scratch / f"{part.number}-{part.life}"
                _work(part, make, folder, Connection(writing, readable=False), self._note)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        self.told = Connection(reading, writable=False)

    def listen(self, tallies: dict[str, Tally]) -> bool:
        """Take what it says of a slice; False once it says nothing more."""
        try:
            name, tally = self.told.recv()
        except (EOFError, OSError):
            return False
        self.heard = monotonic()
        self.part.done[name] += tally.executions
        tallies.setdefault(name, Tally()).add(tally)
        return True

    def ended(self) -> Finding | None:
        """The input that ended the process, if it did not end by itself."""
        _, status = os.waitpid(self.pid, 0)
        self.told.close()
        if status == 0:
            return None
        length = int.from_bytes(self._note[:8], "little")
        name, _, data = self._note[8 : 8 + min(length, _NOTE - 8)].partition(b"\0")
        return Finding(name.decode(), "crash", f"the process ended with {status}", data)

    def end_if_silent(self, *, stopped: bool) -> None:
        """An input may keep the interpreter from looking at its signals.

        If this process was `stopped`, so was that one.
        """
        if stopped:
            self.heard = monotonic()
        elif monotonic() - self.heard > _SILENT:
            os.kill(self.pid, 9)

    def kill(self) -> None:
        """Do not wait for it."""
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


def _work(part: _Part, make: Any, scratch: Path, told: Connection, note: mmap.mmap) -> None:
    ctypes.CDLL(None).mallopt(_ONE_ARENA, 1)  # or every thread reserves memory of its own
    scratch.mkdir(parents=True)
    targets: Sequence[Target] = make(scratch)
    guidance = Guidance()
    corpora = {target.name: list(target.seeds) for target in targets}
    watch = Watch(limits=False)
    for target in targets:  # what good inputs reach is not new
        for data in target.seeds:
            watch.run(target.name, target.run, data)
            if watch.refusal is not None:
                guidance.refused(target.name, watch.refusal)
    watch = Watch()
    gc.freeze()
    worker = _Slices(watch, guidance, note, corpora, Counter())
    cores = sorted(os.sched_getaffinity(0))
    for target, count, at in _slices(part, targets):
        # On one core the library starts no threads, of which small inputs cost more than all else.
        threads = at % _THREADS == 0
        os.sched_setaffinity(0, cores if threads else {cores[part.number % len(cores)]})
        rng = random.Random(f"{part.plan.seed}/{part.number}/{part.life}/{target.name}/{at}")
        told.send((target.name, worker.run(target, count, rng)))


def _slices(part: _Part, targets: Sequence[Target]) -> Iterator[tuple[Target, int, int]]:
    """Turns of the parsers: by weight until all executions are done, or the time is up."""
    plan = part.plan
    until = part.begun + plan.seconds if plan.seconds is not None else None
    weights = sum(target.weight for target in targets)
    left = {
        target.name: max(
            0, _share(plan, part.number, target.weight / weights) - part.done[target.name]
        )
        for target in targets
    }
    at = 0
    while any(left.values()):
        at += 1
        for target in targets:
            count = min(left[target.name], max(1, _SLICE * target.weight // 20))
            if until is not None and monotonic() > until:
                return
            if count:
                left[target.name] -= count
                yield target, count, at


def _share(plan: Plan, number: int, part: float) -> int:
    if plan.executions is None:
        return 1 << 60
    of_all = max(1, round(plan.executions * part))
    return of_all // plan.workers + (number < of_all % plan.workers)


@dataclass
class _Slices:
    """Executions in a row."""

    watch: Watch
    guidance: Guidance
    note: mmap.mmap
    corpora: dict[str, list[bytes]]
    known: Counter[tuple[str, str]]

    def run(self, target: Target, count: int, rng: random.Random) -> Tally:
        tally = Tally()
        corpus = self.corpora[target.name]
        front = target.name.encode() + b"\0"
        begun = process_time()
        for _ in range(count):
            data = target.changed(rng, corpus)
            self._write_down(front, data)
            reached = self.guidance.reached
            finding = self.watch.run(target.name, target.run, data)
            tally.executions += 1
            if finding is not None:
                self.known[finding.parser, finding.kind] += 1
                if self.known[finding.parser, finding.kind] <= _SAME:
                    tally.findings.append(finding)
                continue
            if self.watch.refusal is not None:
                self.guidance.refused(target.name, self.watch.refusal)
            if self.guidance.reached > reached and len(data) <= _KEPT_BYTES:
                tally.kept += 1
                corpus.append(data)
        tally.seconds = process_time() - begun
        return tally

    def _write_down(self, front: bytes, data: bytes) -> None:
        """Where the process that started this one finds it if the interpreter itself dies."""
        size = len(front) + len(data)
        if size <= _NOTE - 8:
            self.note[:8] = size.to_bytes(8, "little")
            self.note[8 : 8 + len(front)] = front
            self.note[8 + len(front) : 8 + size] = data
