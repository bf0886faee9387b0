"""`python -m tests.crashes`: what tries to break the promises, at length and counted.

`replay` is the crash machine, `faults` the disk that fails, `aftermath` one after the other,
`neighbours` two at one place, `kill`
real processes killed, `soak` anything in any order. Without a name all of them run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import aftermath  # noqa: E402
import faults  # noqa: E402
import kills  # noqa: E402
import machine  # noqa: E402
import meetings  # noqa: E402
import soak  # noqa: E402
from neighbours import meet  # noqa: E402
from scenarios import readings, scenarios  # noqa: E402


def line(name, **counts):
    print(f"{name:34}", "  ".join(f"{value} {key}" for key, value in counts.items()), flush=True)


def replay(given):
    """The crash machine."""
    effort, known, total, bad = machine.LONG, scenarios(), Counter(), 0
    for name in given.only or known:
        with tempfile.TemporaryDirectory(prefix="shardkeep-crashes-") as folder:
            try:
                tally = machine.run(known[name], effort, folder)
            except machine.Violation as error:
                bad += 1
                print(f"{name}: VIOLATION\n{error}\n", flush=True)
                continue
        counts = {"operations": tally.operations, "crashes": tally.points, "states": tally.states}
        total.update(counts)
        line(name, **counts, s=round(tally.seconds))
    line("replay", **total, violations=bad)
    return bad


def fail(given):
    """The disk that fails."""
    total, problems, known = Counter(), [], scenarios() | readings()
    for name in given.only or known:
        with machine.scratch_folder() as folder:
            report = faults.sweep(
                known[name], folder, count=given.count, seed=given.seed,
                on_problem=lambda problem: (problems.append(problem), print(problem, flush=True)),
            )  # fmt: skip
        counts = {"calls": report.calls, "faults": report.faults, "told": report.errors}
        total.update(counts)
        line(name, **counts, s_at_most=round(report.slowest, 2))
    line("faults", **total, violations=len(problems))
    return len(problems)


def fail_and_crash(given):
    """The disk that fails, and then the plug."""
    total, problems, known = Counter(), [], scenarios()
    for name in given.only or known:
        with machine.scratch_folder() as folder:
            counts = aftermath.sweep(
                known[name], folder, machine.BRIEF, count=given.count, seed=given.seed,
                on_problem=lambda problem: (problems.append(problem), print(problem, flush=True)),
            )  # fmt: skip
        total.update(counts)
        line(name, **counts)
    line("aftermath", **total, violations=len(problems))
    return len(problems)


def neighbours(given):
    """Two at one place."""
    total = 0
    for name, (first, second, there) in meetings.MEETINGS.items():
        if given.only and name not in given.only:
            continue
        with machine.scratch_folder() as folder:
            count = meet(first, second, folder, there=there)
        total += count
        line(name, meetings=count)
    line("neighbours", meetings=total, violations=0)
    return 0


def kill(given):
    """Real processes, killed."""
    with machine.scratch_folder() as folder:
        done = kills.kill(folder, given.count or 1000, given.seed)
    line("kill", kills=done.kills, in_the_middle=done.cut, saves=done.saves, violations=0,
         s=round(done.seconds))  # fmt: skip
    return 0


def endure(given):
    """Anything in any order."""
    total, begun, seed = Counter(), time.monotonic(), given.seed
    while time.monotonic() - begun < given.seconds:
        with machine.scratch_folder() as folder:
            total.update(soak.soak(folder, seed, crashes=40))
        seed += 1
    line("soak", worlds=seed - given.seed, **{k.replace(" ", "_"): v for k, v in total.items()})
    return 0


COMMANDS = {"replay": replay, "faults": fail, "aftermath": fail_and_crash,
            "neighbours": neighbours, "kill": kill, "soak": endure}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="?", choices=[*COMMANDS, "all"], default="all")
    parser.add_argument("--only", action="append", help="a scenario; may be given several times")
    parser.add_argument("--count", type=int, help="of kills, or of faults in each scenario")
    parser.add_argument("--seconds", type=float, default=300, help="of the soak")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.getLogger("shardkeep").setLevel(logging.CRITICAL)  # it tells of what is done to it
    chosen = COMMANDS if given.command == "all" else [given.command]
    sys.exit(sum(COMMANDS[name](given) for name in chosen) > 0)


if __name__ == "__main__":
    main()
