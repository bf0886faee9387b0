"""Turns: every side in every round, another one first each time; the middle of what was seen."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.caches import sync_one
from benchmarks.sides import SIDES, missing
from benchmarks.states import Leaf, Memory
from benchmarks.worker import Measure, SideFailed, Worker

SHM = Path("/dev/shm")


class Results:
    """Measurements of each side and operation, in the order of the rounds."""

    def __init__(self) -> None:
        self.measures: dict[str, dict[str, list[Measure]]] = defaultdict(lambda: defaultdict(list))
        self.rates: dict[str, list[float]] = defaultdict(list)
        """Raw, in bytes per second."""
        self.failed: dict[str, str] = {}
        """To the last line of what it raised."""
        self.options: dict[str, dict[str, Any]] = {}
        """Of saves, where a side has several ways and was tuned."""

    @property
    def sides(self) -> list[str]:
        """Those that were measured, in the order of the tables."""
        return [side for side in SIDES if side in self.measures]

    def add(self, side: str, operation: str, measure: Measure) -> None:
        self.measures[side][operation].append(measure)

    def middle(self, side: str, operation: str, what: str = "seconds") -> float | None:
        """The median, or None where it was not measured."""
        found = self.measures.get(side, {}).get(operation)
        return median(getattr(measure, what) for measure in found) if found else None

    def rate(self, name: str) -> float | None:
        return median(self.rates[name]) if self.rates.get(name) else None

    def plain(self) -> dict[str, Any]:
        """For JSON: everything that was seen."""
        return {
            "raw_bytes_per_s": dict(self.rates),
            "failed": self.failed,
            "options": self.options,
            "sides": {
                side: {name: [asdict(m) for m in found] for name, found in operations.items()}
                for side, operations in self.measures.items()
            },
        }


def in_turn(sides: Sequence[str], number: int) -> list[str]:
    """Another side begins in each round: who is first does some things for all."""
    turn = number % max(1, len(sides))
    return [*sides[turn:], *sides[:turn]]


def named(wanted: str | None, known: Sequence[str], usual: Sequence[str]) -> list[str]:
    """The sides that somebody asks for, separated by `;`, or the usual ones."""
    names = [name.strip() for name in wanted.split(";")] if wanted else list(usual)
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"no such side: {', '.join(unknown)}; there are {'; '.join(known)}")
    return names


def present(wanted: str | None, without: tuple[str, ...] = ()) -> list[str]:
    """The sides that can run here, those `without` only if they are named; says which cannot."""
    names = named(wanted, list(SIDES), [name for name in SIDES if name not in without])
    out = []
    for side in SIDES:
        if side not in names:
            continue
        lacking = missing(side)
        if lacking is None:
            out.append(side)
        else:
            print(f"{side}: left out, {lacking} is not installed", file=sys.stderr)
    return out


class Turns:
    """All sides over one state; closes their processes and removes what they wrote."""

    def __init__(self, leaves: list[Leaf], sides: list[str], results: Results) -> None:
        self.results = results
        self.source = Memory(leaves)
        self.source.fill()
        self.target = Memory(leaves)
        self.workers: dict[str, Worker] = {}
        for side in sides:
            self._guarded(self._start, side)

    def _start(self, side: str) -> None:
        self.workers[side] = Worker(side, self.source, self.target)

    def order(self, number: int) -> list[str]:
        """Who goes when, in a round."""
        names = list(self.workers)
        return in_turn(names, number)

    def take(self, number: int, turn: Callable[[str], None]) -> None:
        """One round; a side that fails is left out of all further ones."""
        for side in self.order(number):
            print(f"round {number}: {side}", file=sys.stderr)
            self._guarded(turn, side)

    def tune(self, side: str, directory: Path) -> None:
        """Choose the fastest of the side's ways by one save each, after one to warm up."""
        ways = SIDES[side].ways
        if len(ways) == 1:
            return
        seconds = []
        for way in (ways[0], *ways):
            with checkpoint(directory) as path:
                seconds.append(self.workers[side].run("save", path, **way).seconds)
        self.results.options[side] = ways[seconds.index(min(seconds[1:]), 1) - 1]

    def check(self, side: str) -> None:
        """What the side loaded last, into a scrambled target, must be the source bit for bit."""
        self.workers[side].settle()
        wrong = self.source.first_difference(self.target)
        if wrong is not None:
            raise SideFailed(f"{side}: loaded other bits than were saved: {wrong}")

    def _guarded(self, work: Callable[[str], None], side: str) -> None:
        try:
            work(side)
        except SideFailed as error:
            lines = str(error).strip().splitlines()
            print(f"{side}: failed and is left out\n{error}", file=sys.stderr)
            self.results.failed[side] = lines[-1]
            if side in self.workers:
                self.workers.pop(side).close()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def need_memory(nbytes: int) -> None:
    """Refuse where the run would drive the machine out of memory."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    if available < nbytes:
        raise SystemExit(
            f"{available / 1e9:.1f} GB of memory are available, {nbytes / 1e9:.1f} GB are needed: "
            "choose a smaller --size"
        )


@contextlib.contextmanager
def scratch(base: str | Path | None, needed: int) -> Iterator[Path]:
    """A directory that goes away with all it holds; refuses where there is too little room."""
    where = Path(base) if base is not None else Path(tempfile.gettempdir())
    where.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(where).free
    if free < needed:
        raise SystemExit(f"{where} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} GB are needed")
    with tempfile.TemporaryDirectory(prefix="shardkeep-benchmark-", dir=where) as directory:
        yield Path(directory)


@contextlib.contextmanager
def checkpoint(directory: Path) -> Iterator[Path]:
    """A path for one checkpoint; afterwards it is gone, and the file system has settled."""
    path = directory / "checkpoint"
    sync_one(directory)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        sync_one(directory)
