"""Bytes per second of one process: durable saves, cold and warm loads, on a disk and in memory.

All sides save the same state and load it into the same tensors, in turn; docs/PERFORMANCE.md says
what is timed. The first round warms up and compares every loaded bit; it is not counted.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from benchmarks import raw
from benchmarks.caches import TOLERABLE, evict, size, warm
from benchmarks.picture import Group, draw
from benchmarks.report import Report, above_zero, add_options, at_least_one, number, ratio
from benchmarks.rounds import (
    SHM,
    Results,
    Turns,
    checkpoint,
    in_turn,
    need_memory,
    present,
    scratch,
)
from benchmarks.sides import OF_OTHERS, SIDES
from benchmarks.states import training_state
from benchmarks.worker import Measure, SideFailed

BUDGETS = {"64 MiB": 64 << 20, "256 MiB": 256 << 20, "1 GiB": 1 << 30}
OPERATIONS = {
    "save": "write",
    "cold load": "read",
    "warm load": "memcpy",
    "tmpfs save": "tmpfs write",
    "tmpfs load": "tmpfs read",
}
"""To the raw rate it is held against."""
OURS = "shardkeep"


class Throughput:
    """One run."""

    def __init__(self, turns: Turns, disk: Path, memory: Path, budgets: dict[str, int]) -> None:
        self.turns, self.results = turns, turns.results
        self.disk, self.memory = disk, memory
        self.budgets = budgets
        self.raw = raw.choose(disk, turns.source.nbytes)

    def round(self, count: int, warm_up: bool) -> None:
        """Every side once; the raw rates among them."""
        nbytes = self.turns.source.nbytes
        rates = {**self.raw.disk(self.disk, nbytes), **self.raw.memory(self.memory, nbytes)}
        for name, rate in rates.items():
            if not warm_up:
                self.results.rates[name].append(rate)
        self.turns.take(count, lambda side: self._turn(side, count, warm_up))

    def _turn(self, side: str, count: int, warm_up: bool) -> None:
        if warm_up:
            self.turns.tune(side, self.disk)
        options = self.results.options.get(side, {})
        with checkpoint(self.disk) as path:
            self._do(side, "save", path, warm_up, **options)
            self._load(side, "cold load", path, warm_up)
            self._load(side, "warm load", path, warm_up)
            if side == OURS:
                self._what_digests_cost(path, count, warm_up)
        with checkpoint(self.memory) as path:
            self._do(side, "tmpfs save", path, warm_up, **options)
            self._load(side, "tmpfs load", path, warm_up)
        # Last, so that all sides have done the same before what they are compared in.
        for name, budget in self.budgets.items() if side == OURS else ():
            with checkpoint(self.disk) as path:
                self._do(side, f"save, {name}", path, warm_up, memory_budget=budget)
                self._load(side, f"cold load, {name}", path, warm_up, memory_budget=budget)

    def _what_digests_cost(self, path: Path, count: int, warm_up: bool) -> None:
        """Pairs of loads, of which another is the first in each round: whoever reads first finds
        fewer of the target's pages at hand."""
        for kind in ("cold load", "warm load"):
            for how in in_turn(("verify=True", "verify=False"), count):
                verify = how == "verify=True"
                self._load(OURS, f"{kind}, {how}", path, warm_up, verify=verify)

    def _do(self, side: str, operation: str, path: Path, warm_up: bool, **options: Any) -> Measure:
        what: Literal["save", "load"] = "save" if "save" in operation else "load"
        measure = self.turns.workers[side].run(what, path, **options)
        if not warm_up:
            self.results.add(side, operation, measure)
        return measure

    def _load(self, side: str, operation: str, path: Path, warm_up: bool, **options: Any) -> None:
        cold = operation.startswith("cold")
        left = 0.0
        if cold:
            left = evict(path)
        elif operation.startswith("warm"):
            left = 1 - warm(path)
        if left > TOLERABLE:
            cached = "still" if cold else "not"
            raise SystemExit(f"{operation} of {side}: {left:.0%} of its files {cached} cached")
        if warm_up:
            self.turns.target.scramble()
        measure = self._do(side, operation, path, warm_up, **options)
        if cold and measure.read < 0.9 * size(path):
            raise SideFailed(f"{side}: a cold load read {measure.read} bytes from the disk")
        if warm_up:
            self.turns.check(side)


def show(report: Report, results: Results, nbytes: int) -> None:
    def rate(side: str, operation: str) -> float | None:
        seconds = results.middle(side, operation)
        return nbytes / seconds / 1e9 if seconds else None

    def limit(operation: str) -> float | None:
        found = results.rate(OPERATIONS[operation.split(",")[0]])
        return found / 1e9 if found else None

    sides = results.sides
    rows = [["raw", *(number(limit(op)) for op in OPERATIONS)]]
    for side in sides:
        cells = []
        for op in OPERATIONS:
            value = rate(side, op)
            cells.append(f"{number(value)} ({ratio(value, limit(op))})" if value else "")
        rows.append([side, *cells])
    report.table("GB/s, medians (and against raw)", ["", *OPERATIONS], rows)

    rows = [
        [side, *(ratio(rate(OURS, op), rate(side, op)) for op in OPERATIONS)]
        for side in sides
        if side != OURS
    ]
    report.table("shardkeep's GB/s against each side's", ["", *OPERATIONS], rows)

    operations = ("save", "cold load", "warm load")
    headings = [f"{op}: {what}" for op in operations for what in ("CPU s", "peak MB")]
    rows = []
    for side in sides:
        cells = []
        for op in operations:
            peak = results.middle(side, op, "peak")
            cells.append(number(results.middle(side, op, "cpu")))
            cells.append("" if peak is None else f"{peak / 1e6:.0f}")
        rows.append([side, *cells])
    report.table("CPU seconds; resident memory above the state", ["", *headings], rows)

    rows = []
    for op in results.measures.get(OURS, {}):
        value, peak = rate(OURS, op), results.middle(OURS, op, "peak") or 0
        against = [ratio(value, limit(op)), OPERATIONS[op.split(",")[0]]]
        cpu = number(results.middle(OURS, op, "cpu"))
        rows.append([op, number(value), *against, cpu, f"{peak / 1e6:.0f}"])
    headings = ["shardkeep", "GB/s", "against raw", "(which)", "CPU s", "peak MB"]
    report.table("shardkeep in all ways", headings, rows)


def picture(path: Path, results: Results, nbytes: int) -> None:
    groups = []
    for operation, name in OPERATIONS.items():
        bars = []
        for side in results.sides:
            seconds = results.middle(side, operation)
            if seconds:
                bars.append((side, nbytes / seconds / 1e9))
        limit = results.rate(name)
        title = f"{operation} (raw: {name})"
        groups.append(Group(title, bars, limit / 1e9 if limit else None))
    draw(path, f"A state of {nbytes / 1e9:.1f} GB, one process", "GB/s, more is better", groups)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks io", description=__doc__)
    parser.add_argument("--size", type=above_zero, default=2.0, help="of the state, in GiB")
    parser.add_argument(
        "--layers", type=at_least_one, default=24, help="fewer: fewer, larger tensors"
    )
    parser.add_argument("--sides", help=f"only these, separated by ';': {'; '.join(SIDES)}")
    parser.add_argument("--no-budgets", action="store_true", help="only the default memory_budget")
    add_options(parser, repeat=5)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    sides = present(chosen.sides, without=("shardkeep, planned anew", *OF_OTHERS))
    leaves = training_state(int(chosen.size * (1 << 30)), chosen.layers)
    total = sum(leaf.nbytes for leaf in leaves)
    need_memory(6 * total)
    results = Results()
    with ExitStack() as stack:
        disk = stack.enter_context(scratch(chosen.dir, int(1.3 * total)))
        memory = stack.enter_context(scratch(SHM, int(1.3 * total)))
        report = Report("io", disk, nbytes=total, tensors=len(leaves), repeat=chosen.repeat)
        turns = stack.enter_context(Turns(leaves, sides, results))
        run = Throughput(turns, disk, memory, {} if chosen.no_budgets else BUDGETS)
        sizes = [leaf.nbytes for leaf in leaves]
        report.say(
            f"{total / 1e9:.2f} GB in {len(leaves)} tensors of {min(sizes)} to {max(sizes):,} "
            f"bytes; raw write: {run.raw.write}; raw read: {run.raw.read}"
        )
        for count in range(chosen.repeat + 1):
            run.round(count, warm_up=count == 0)
        for side, options in results.options.items():
            report.say(f"{side}: {options}")
        show(report, results, total)
        for side, why in results.failed.items():
            report.say(f"{side} failed: {why}")
        if chosen.picture:
            picture(chosen.picture, results, total)
        ways = {"write": str(run.raw.write), "read": str(run.raw.read)}
        report.finish({**results.plain(), "raw_ways": ways}, chosen.json)
