"""Very many very small tensors: what a tensor costs, whatever its size.

All sides in turn, as in `throughput`; on a disk, loads with the files in the page cache.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmarks.caches import warm
from benchmarks.picture import Group, draw
from benchmarks.report import Report, add_options, at_least_one, number, ratio
from benchmarks.rounds import Results, Turns, checkpoint, present, scratch
from benchmarks.sides import OF_OTHERS, SIDES
from benchmarks.states import many_small

OURS = "shardkeep"
OPERATIONS = ("save", "load")
FEWER = {"orbax": 20}
"""Sides that take milliseconds for a tensor are given a part of them: one in so many."""


def turn(turns: Turns, directory: Path, warm_up: bool, side: str) -> None:
    worker = turns.workers[side]
    # No sweep: a file for each of so many tensors, which is one of the ways, would take minutes.
    with checkpoint(directory) as path:
        save = worker.run("save", path, **SIDES[side].ways[0])
        warm(path)
        if warm_up:
            turns.target.scramble()
        load = worker.run("load", path)
        if warm_up:
            turns.check(side)
    if not warm_up:
        turns.results.add(side, "save", save)
        turns.results.add(side, "load", load)


def count_of(side: str, count: int) -> int:
    return count // FEWER.get(side, 1)


def each(results: Results, side: str, operation: str, count: int) -> float | None:
    """Microseconds for one tensor."""
    seconds = results.middle(side, operation)
    return None if seconds is None else seconds / count_of(side, count) * 1e6


def show(report: Report, results: Results, count: int) -> None:
    rows = []
    for side in results.sides:
        tensors = count_of(side, count)
        cells = [str(tensors)]
        for operation in OPERATIONS:
            cost = each(results, side, operation, count)
            cpu = results.middle(side, operation, "cpu")
            peak = results.middle(side, operation, "peak")
            cells += [
                number(cost, 1),
                ratio(cost, each(results, OURS, operation, count)),
                number(None if cpu is None else cpu / tensors * 1e6, 1),
                number(None if peak is None else peak / 1e6, 0),
            ]
        rows.append([side, *cells])
    headings = [
        f"{operation}: {what}"
        for operation in OPERATIONS
        for what in ("µs a tensor", "to ours", "CPU µs", "peak MB")
    ]
    report.table("Tensors of 1 KiB, medians", ["", "tensors", *headings], rows)


def picture(path: Path, results: Results, count: int) -> None:
    groups = []
    for operation in OPERATIONS:
        costs = {side: each(results, side, operation, count) for side in results.sides}
        bars = [(side, cost) for side, cost in costs.items() if cost is not None]
        groups.append(Group(operation, bars))
    draw(path, f"{count} tensors of 1 KiB", "µs per tensor, less is better", groups)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks small", description=__doc__)
    parser.add_argument("--count", type=at_least_one, default=100_000, help="tensors")
    parser.add_argument("--sides", help=f"only these, separated by ';': {'; '.join(SIDES)}")
    add_options(parser, repeat=3)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    sides = present(chosen.sides, without=OF_OTHERS)
    results = Results()
    with ExitStack() as stack:
        directory = stack.enter_context(scratch(chosen.dir, chosen.count * 16384))
        report = Report("small", directory, count=chosen.count, repeat=chosen.repeat)
        groups = [
            stack.enter_context(Turns(many_small(tensors), group, results))
            for tensors in sorted({count_of(side, chosen.count) for side in sides})
            if (group := [side for side in sides if count_of(side, chosen.count) == tensors])
        ]
        for round_ in range(chosen.repeat + 1):
            for turns in groups:
                turns.take(round_, partial(turn, turns, directory, round_ == 0))
        show(report, results, chosen.count)
        for side, why in results.failed.items():
            report.say(f"{side} failed: {why}")
        if chosen.picture:
            picture(chosen.picture, results, chosen.count)
        report.finish(results.plain(), chosen.json)
