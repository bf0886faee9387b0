"""`python -m tests.mutations [MODULE ...]`: wrong changes of our source that no quick test notices.

Modules are named as below `src/shardkeep`, such as `boxes` or `formats/native/commit`; without any,
all that decide what is stored and when it counts. docs/RELIABILITY.md says what the last run left.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

# All that is slow to import and does not import us, before children are forked.
for name in ("numpy", "ml_dtypes", "msgspec", "xxhash", "click", "rich", "safetensors", "torch",
             "torch.distributed.checkpoint", "torch.distributed.tensor"):  # fmt: skip
    importlib.import_module(name)

from mutants import mutants  # noqa: E402
from trials import PACKAGE, ROOT, judge_all, look, scratch, timed  # noqa: E402

MODULES = [
    "boxes", "planner", "default_planner", "global_plan", "planning",
    *(
        f"formats/native/{path.stem}"
        for path in sorted((PACKAGE / "formats/native").glob("*.py"))
        if path.stem != "detached"  # it runs in a process that starts anew
    ),
]  # fmt: skip

TESTS = [
    "test_boxes", "test_columns", "test_global_plan", "test_planning", "test_targets",
    "test_saving", "test_loading", "test_checkpoint", "test_incremental", "test_written_early",
    "test_regressions", "test_per_rank", "test_format_doc", "test_storage_conformance",
    "test_plan_scale", "test_async_sharing", "test_crashes", "formats/test_commit",
    "formats/test_damage", "formats/test_files", "formats/test_hostile", "formats/test_links",
    "formats/test_nesting", "formats/test_native_edges", "formats/test_safetensors_oracle",
    "manager/test_copying", "manager/test_removal",
]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    parser.add_argument("--limit", type=int, help="at most so many, at random")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10, help="of tests, for each mutant")
    parser.add_argument("--lines", type=Path, help="which test passes which line: made, then kept")
    parser.add_argument("--only", type=Path, help="those in a file, as they are printed")
    parser.add_argument("--without", type=Path, help="those in a file: an earlier run's verdicts")
    parser.add_argument("--killers", type=Path, help="gets every verdict, and which test killed")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="in place of all that are known")
    given = parser.parse_args()

    wanted = [m for name in given.modules for m in mutants(PACKAGE / f"{name}.py")]
    total = len(wanted)
    if given.only:
        named = given.only.read_text()
        wanted = [mutant for mutant in wanted if str(mutant) in named]
    if given.without:
        named = given.without.read_text()
        wanted = [mutant for mutant in wanted if f"{mutant}" not in named]
    if given.limit and given.limit < len(wanted):
        wanted = random.Random(given.seed).sample(wanted, given.limit)
    with scratch() as folder:
        if given.lines and given.lines.exists():
            known = json.loads(given.lines.read_text())
        else:
            tests = [str(ROOT / "tests" / f"{name}.py") for name in given.tests]
            tests = [test for test in tests if Path(test).exists()]
            known = look(tests, [PACKAGE / f"{name}.py" for name in MODULES], folder)
            known["seconds"] = timed(known, folder)
            if given.lines:
                given.lines.write_text(json.dumps(known))
        sys.exit(report(known, wanted, total, folder, given))


def report(known, wanted, total, folder, given):
    """Print what was not killed, and how many were of each kind in each module."""
    begun, counts, left = time.monotonic(), defaultdict(Counter), []
    print(f"{len(wanted)} of {total} mutants", flush=True)

    with contextlib.suppress(KeyboardInterrupt):  # what is known by then is told
        for mutant, verdict in judge_all(known, wanted, folder, given.jobs, given.seconds):
            if given.killers:
                with given.killers.open("a") as told:
                    print(f"{mutant}: {verdict}", file=told)
            verdict = verdict.partition(" by ")[0]
            counts[str(mutant.source.relative_to(PACKAGE))][verdict] += 1
            if verdict != "killed":
                left.append(mutant)
                print(f"{verdict:10} {mutant}", flush=True)
    for name, of in sorted(counts.items()):
        print(f"{name:34}", "  ".join(f"{of[verdict]} {verdict}" for verdict in sorted(of)))
    every = sum(counts.values(), Counter())
    print(f"{every.total()} mutants: " + ", ".join(f"{n} {v}" for v, n in sorted(every.items())),
          f"in {time.monotonic() - begun:.0f} s")  # fmt: skip
    return bool(left)


if __name__ == "__main__":
    main()
