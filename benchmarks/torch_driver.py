"""Under torch's own `save` and `load`: our storage beside torch's, on real gloo processes.

Both sides have torch's planners and collectives. Each state is saved by some ranks and loaded by
others, cold; each side goes first as often as the others.
"""

from __future__ import annotations

import warnings

from benchmarks.report import Report
from benchmarks.resharding import (
    APART,
    HEADINGS,
    MODULES,
    UNDER_TORCH,
    arguments,
    plain,
    row,
    run,
)
from benchmarks.rounds import need_memory, scratch
from benchmarks.sharded_states import (
    COLUMNS,
    Cut,
    Scenario,
    large_shapes,
    many_small,
    training_shapes,
)
from shardkeep.testing.processes import RankServer

SIDES = (UNDER_TORCH, APART, "torch DCP")
WIDE = 256 * COLUMNS
"""Columns of a tensor whose quarters of rows are longer than many blocks."""


def scenarios(nbytes: int) -> list[Scenario]:
    """Of about `nbytes` each."""

    def large(name: str, ranks: int, load_ranks: int, load_cut: Cut = "rows") -> Scenario:
        return Scenario(name, ranks, "rows", load_ranks, load_cut, large_shapes(nbytes, ranks))

    wide = max(1, nbytes // (16 * WIDE * 4))
    training = training_shapes(nbytes)
    return [
        Scenario("1 to 1, training", 1, "rows", 1, "rows", training),
        Scenario("4 to 4, training", 4, "rows", 4, "rows", training),
        Scenario("4 to 6, training", 4, "rows", 6, "rows", training),
        large("1 to 1", 1, 1),
        large("4 to 4, rows", 4, 4),
        large("4 to 3, rows", 4, 3),
        large("4 to 6, rows", 4, 6),
        large("4 to 4, rows to columns", 4, 4, "columns"),
        Scenario("4 to 4, rows to wide columns", 4, "rows", 4, "columns", ((16, WIDE),) * wide),
        many_small(nbytes),
    ]


def main(argv: list[str] | None = None) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    chosen = arguments("torch-driver", __doc__).parse_args(argv)
    nbytes = int(chosen.size * (1 << 30))
    cases = [one for one in scenarios(nbytes) if not chosen.only or chosen.only in one.name]
    need_memory(6 * max(one.nbytes for one in cases))
    with scratch(chosen.dir, 3 * nbytes) as base, RankServer(MODULES) as server:
        report = Report("torch-driver", base, nbytes=nbytes, repeat=chosen.repeat)
        seen = {one.name: run(server, one, chosen.repeat, base, SIDES) for one in cases}
        rows = [row(one, side, seen[one.name], UNDER_TORCH) for one in cases for side in SIDES]
        report.table(
            "Under torch's driver: saved by some ranks, loaded cold by others, medians",
            HEADINGS,
            rows,
        )
        report.finish(plain(seen), chosen.json)
