"""`python -m tests.ranks`: ranks lost at any moment of anything that ranks do together, counted.

Every trial is drawn by a seed of its own, which `--only` runs again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

import losing  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="how many trials")
    parser.add_argument("--jobs", type=int, default=4, help="how many of them at once")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--seconds", type=float, help="after which no further one is begun")
    parser.add_argument("--only", type=int, help="the seed of one trial, which is told of")
    parser.add_argument("--stop", action="store_true", help="after the first that goes wrong")
    given = parser.parse_args()
    logging.getLogger("shardkeep").setLevel(logging.CRITICAL)  # it tells of what is done to it
    seeds = [given.only] if given.only is not None else range(given.seed, given.seed + given.runs)
    begun, counts, slowest = time.monotonic(), Counter(), 0.0
    results = losing.run_seeds(seeds, given.jobs, given.seconds, stop=given.stop)
    for seed, case, ended in results:
        counts["runs"] += 1
        if isinstance(ended, BaseException):
            counts["violations"] += 1
            print(f"--- seed {seed}: {ended}\n", flush=True)
        else:
            counts.update([case.verb, f"{case.what} {ended.outcome}"])
            counts["repeated"] += ended.repeated
            slowest = max(slowest, ended.slowest)
        if given.only is not None:
            print(case, getattr(ended, "outcome", "wrong"))
        elif counts["runs"] % 50 == 0:
            tell(counts, slowest, begun)
    for what in losing.WHATS:
        told = {how: counts[f"{what} {how}"] for how in ("lost", "late", "well")}
        print(f"{what:16}", "  ".join(f"{number} {how}" for how, number in told.items()))
    print("  ".join(f"{counts[verb]} {verb}" for verb in losing.VERBS))
    tell(counts, slowest, begun)
    sys.exit(counts["violations"] > 0)


def tell(counts, slowest, begun):
    numbers = "  ".join(f"{counts[what]} {what}" for what in ("runs", "violations", "repeated"))
    passed = time.monotonic() - begun
    print(f"{numbers}  {slowest:.1f} s slowest  {passed:.0f} s", flush=True)


if __name__ == "__main__":
    main()
