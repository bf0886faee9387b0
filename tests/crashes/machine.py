"""The crash machine: a scenario is done once and recorded, then cut off after every operation in
every way that a file system may lose what was not synced, and what is left is looked at.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shardkeep.testing.disk import crash_points
from shardkeep.testing.operations import Mark, State, materialize
from shardkeep.testing.recording import OperationLog
from shardkeep.testing.system_calls import recorded


class Violation(AssertionError):
    """What was found after a crash is not what was promised."""


@dataclass(frozen=True)
class Effort:
    """How much is tried."""

    samples: int = 2
    pairs: bool = False
    exhaustive: int = 0
    positions: int | None = None
    """Crashes after so many prefixes, evenly; after all if None."""
    every: int = 1
    """One in so many different states is looked at."""
    most: int = 3000
    """After so many states, one in ten."""


SHORT = Effort(samples=1, positions=10, every=6)
BRIEF = Effort(samples=1, positions=12)
LONG = Effort(samples=4, pairs=True, exhaustive=7)


class Scenario:
    """Something that is done, and what must be there if it is cut short."""

    name = ""

    def prepare(self, base):
        """What was there long before."""

    def run(self, base, mark):
        """What is recorded; `mark` notes what was begun, and what the program was told."""
        raise NotImplementedError

    def look(self, base):
        """What readers find, in a form to compare; raises if any of it is broken."""
        raise NotImplementedError

    def judge(self, found, marks):
        """Raise unless that may be there, after these marks."""
        raise NotImplementedError

    def judge_end(self, found, marks):
        """The same, where it was not cut short and nobody was told of an error."""
        self.judge(found, marks)

    def assert_clean(self, base, found, error):
        """Raise unless one that was told of an error has cleaned up."""

    def recover(self, base, found, number):
        """What comes after works, and cleans up."""

    def settings(self):
        """What else is different while it is done and looked at."""
        return contextlib.nullcontext()


@dataclass
class Tally:
    operations: int = 0
    points: int = 0
    states: int = 0
    seconds: float = 0.0
    kinds: Counter = field(default_factory=Counter)
    """What was found, how often."""


def record(scenario, base):
    """Do it for real; the log."""
    base.mkdir(parents=True)
    scenario.prepare(base)
    log = OperationLog(base)
    with scenario.settings(), recorded(log):
        scenario.run(base, log.mark)
    assert log.state() == State.of(base), "something was done that was not recorded"
    return log


def replay(scenario, log, scratch, effort, operations=None):
    """Crash after every operation; what was found."""
    operations = log.operations if operations is None else operations
    begun, tally, known = time.perf_counter(), Tally(len(operations)), {}
    positions = effort.positions or len(operations)
    points = crash_points(
        log.initial,
        operations,
        every=max(1, len(operations) // positions),
        samples=effort.samples,
        pairs=effort.pairs,
        exhaustive=effort.exhaustive,
    )
    for point in points:
        tally.points += 1
        key = point.state.digest()
        marks = [op.label for op in operations[: point.position] if isinstance(op, Mark)]
        try:
            if key not in known:
                every = effort.every * (10 if tally.states >= effort.most else 1)
                if len(known) % every == 0:
                    tally.states += 1
                    known[key] = _examine(scenario, point.state, scratch, marks, tally.states)
                    tally.kinds[repr(known[key])] += 1
                else:
                    known[key] = None
            elif known[key] is not None:
                scenario.judge(known[key], marks)
        except Exception as error:
            done = "\n  ".join(map(repr, operations[: point.position]))
            text = f"{scenario.name}: {error!r}\n{point.variant} after:\n  {done}"
            raise Violation(text) from error
    tally.seconds = time.perf_counter() - begun
    return tally


def _examine(scenario, state, scratch, marks, number):
    base = Path(scratch) / "found"
    materialize(state, base)
    try:
        with scenario.settings():
            found = scenario.look(base)
            scenario.judge(found, marks)
            scenario.recover(base, found, number)
        return found
    finally:
        shutil.rmtree(base)


@contextlib.contextmanager
def scratch_folder():
    """Where crashed directories are looked at: in memory where there is such a place."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="shardkeep-crashes-") as folder:
        yield Path(folder)


def run(scenario, effort, folder):
    """Record and replay; the tally."""
    log = record(scenario, Path(folder) / "run")
    with scratch_folder() as scratch:
        return replay(scenario, log, scratch, effort)
