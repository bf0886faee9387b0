"""`python -m fuzzing`: every parser, or one, for so many executions or seconds."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from fuzzing.targets import Target
from fuzzing.watching import Watch
from fuzzing.workers import Plan, Tally, fuzz, scratch_folder

__all__ = ["all_targets", "main"]

FOUND = Path("fuzzing-found")
"""Where inputs go that must not be treated as they are."""


def all_targets(scratch: Path, names: Sequence[str] = ()) -> list[Target]:
    """Every parser there is, or those of these names."""
    from fuzzing.foreign import foreign_targets
    from fuzzing.native import native_targets

    found = native_targets(scratch / "native") + foreign_targets(scratch / "foreign")
    unknown = set(names) - {target.name for target in found}
    if unknown:
        raise SystemExit(
            f"no parser {', '.join(sorted(unknown))}; there are "
            f"{', '.join(target.name for target in found)}"
        )
    return [target for target in found if not names or target.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if anything was found."""
    options = _options(arguments)
    if options.reproduce is not None:
        return _reproduce(options.reproduce, options.parser)
    executions = options.executions
    if executions is None and options.seconds is None:
        executions = 100_000
    plan = Plan(options.seed, options.workers, executions, options.seconds)
    for number in (signal.SIGINT, signal.SIGTERM):  # what was done so far is told
        signal.signal(number, signal.default_int_handler)
    begun = time.monotonic()
    last = [begun]
    told: set[tuple[str, str]] = set()

    def progress(tallies: dict[str, Tally]) -> None:
        _tell(tallies, options.found, told)  # at once: it may be long before all is done
        now = time.monotonic()
        if now - last[0] >= 20:
            last[0] = now
            done = sum(tally.executions for tally in tallies.values())
            print(f"{now - begun:6.0f} s  {done:>12,} executions", file=sys.stderr, flush=True)

    tallies = fuzz(lambda scratch: all_targets(scratch, options.parser), plan, progress)
    _tell(tallies, options.found, told)
    _report(tallies, plan, time.monotonic() - begun)
    return 1 if told else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzzing", description=__doc__)
    parser.add_argument("--parser", action="append", default=[], help="only this one; repeatable")
    parser.add_argument("--executions", type=int, help="of all parsers together")
    parser.add_argument("--seconds", type=float, help="in place of executions")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=0, help="the same gives the same inputs")
    parser.add_argument("--found", type=Path, default=FOUND, help="folder for what is found")
    parser.add_argument("--reproduce", type=Path, help="one input, as it was found")
    return parser.parse_args(arguments)


def _report(tallies: dict[str, Tally], plan: Plan, seconds: float) -> None:
    print(f"{'parser':16}{'executions':>14}{'per core and s':>16}{'kept':>8}{'findings':>10}")
    for name, tally in tallies.items():
        rate = tally.executions / tally.seconds if tally.seconds else 0.0
        print(
            f"{name:16}{tally.executions:>14,}{rate:>16,.0f}{tally.kept:>8}"
            f"{len(tally.findings):>10}"
        )
    done = sum(tally.executions for tally in tallies.values())
    print(
        f"{'all':16}{done:>14,}{done / seconds / plan.workers:>16,.0f}"
        f"{sum(tally.kept for tally in tallies.values()):>8}"
        f"{sum(len(tally.findings) for tally in tallies.values()):>10}"
    )
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"{seconds:.0f} s, {done / seconds:,.0f} executions/s, {plan.workers} processes, "
        f"seed {plan.seed}, Python {version}"
    )


def _tell(tallies: dict[str, Tally], folder: Path, told: set[tuple[str, str]]) -> None:
    """One of each fault is kept and told of."""
    for finding in [one for tally in tallies.values() for one in tally.findings]:
        if (finding.parser, finding.kind) in told:
            continue
        told.add((finding.parser, finding.kind))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{finding.parser}-{zlib.crc32(finding.data):08x}"
        path.write_bytes(finding.data)
        print(f"\n{finding.parser}: {finding.kind}\n{finding.text.rstrip()}")
        print(f"  python -m fuzzing --parser {finding.parser} --reproduce {path}", flush=True)


def _reproduce(path: Path, names: Sequence[str]) -> int:
    names = names or [path.name.rpartition("-")[0]]
    with scratch_folder() as scratch:
        (target,) = all_targets(scratch, names[:1])
        finding = Watch(limits=True).run(target.name, target.run, path.read_bytes())
    print("all is well" if finding is None else f"{finding.kind}\n{finding.text}")
    return 0 if finding is None else 1


if __name__ == "__main__":
    sys.exit(main())
