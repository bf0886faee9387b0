"""A disk that fails, and then the plug: what was told of as an error leaves the old one or the new.

A sync that failed made nothing durable, and a rename may have happened though it was not said so.
Whoever cleans up after that must not remove what a crash would need.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from pathlib import Path

from faults import AFTER, Fault, Faulty, listed
from machine import Violation, scratch_folder

from shardkeep.errors import CheckpointError
from shardkeep.testing.disk import crash_points
from shardkeep.testing.operations import Mark, materialize
from shardkeep.testing.recording import OperationLog
from shardkeep.testing.system_calls import Call, Recorder, intercepted

MOVES = ("link", "rename", "replace", "exchange_names")


class Chained(Faulty):
    """The fault first; what is done all the same is recorded."""

    def __init__(self, base, fault, log):
        super().__init__(base, fault)
        self.log, self.recorder, self.since = log, Recorder(log), None

    def __call__(self, call):
        def real(*args, **options):
            return self.recorder(Call(call.name, call.real, args, options))

        return super().__call__(Call(call.name, real, call.args, call.options))

    def answer(self, call, name, fault):
        self.since = len(self.log.operations)
        return super().answer(call, name, fault)


def faults_of(calls):
    """Syncs that fail, and moves that fail or say so."""
    for at, (name, _) in enumerate(calls):
        if name == "fsync":
            yield Fault(at, name, "before", errno.EIO)
            yield Fault(at, name, "ever", errno.EIO)
        if name in MOVES:
            if name != "link":  # what is copied then is not recorded
                yield Fault(at, name, "before", errno.EIO)
            yield Fault(at, name, "after", AFTER[name])


def strike(scenario, template, base, fault, effort, scratch):
    """One fault, and a crash at any moment after it; how many states were looked at."""
    shutil.copytree(template, base)
    try:
        log = OperationLog(base)
        handler, error = Chained(base, fault, log), None
        try:
            with scenario.settings(), intercepted(handler):
                scenario.run(base, log.mark)
        except CheckpointError as caught:
            error = repr(caught)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if handler.since is None:
        return 0
    count, known = 0, set()
    points = crash_points(
        log.initial, log.operations, start=handler.since,
        every=max(1, (len(log.operations) - handler.since) // effort.positions),
        samples=effort.samples, pairs=effort.pairs, exhaustive=effort.exhaustive,
    )  # fmt: skip
    for point in points:
        marks = [op.label for op in log.operations[: point.position] if isinstance(op, Mark)]
        key = (point.state.digest(), len(marks))
        if key in known:
            continue
        known.add(key)
        if len(known) % effort.every:
            continue
        count += 1
        found = scratch / "found"
        materialize(point.state, found)
        try:
            with scenario.settings():
                there = scenario.look(found)
                scenario.judge(there, marks)
                scenario.recover(found, there, count)
        except Exception as problem:
            done = "\n  ".join(map(repr, log.operations[: point.position]))
            text = f"{scenario.name}, {fault}: {problem!r}; the program saw {error}"
            raise Violation(f"{text}\n{point.variant} after:\n  {done}") from problem
        finally:
            shutil.rmtree(found)
    return count


def sweep(scenario, folder, effort, *, count=None, last=None, seed=0, on_problem=None):
    """Every such fault, or some of them: a choice, or those of the last calls."""
    folder = Path(folder)
    template, base, total = folder / "template", folder / "base", Counter()
    template.mkdir(parents=True)
    scenario.prepare(template)
    found = list(faults_of(listed(scenario, template, base)))
    if last is not None:
        calls = sorted({fault.at for fault in found})
        found = [fault for fault in found if fault.at in calls[-last:]]
    if count is not None and len(found) > count:
        found = random.Random(seed).sample(found, count)
    with scratch_folder() as scratch:
        for fault in found:
            try:
                total["states"] += strike(scenario, template, base, fault, effort, scratch)
                total["faults"] += 1
            except Violation as problem:
                if on_problem is None:
                    raise
                on_problem(problem)
    return total
