"""Resharding on real gloo processes: bytes read over bytes wanted, and time, ours beside torch's.

Each scenario is saved by some ranks and loaded by others, cold. Wanted is every element that any
rank asks for, counted once; read is what all ranks together asked the system for (`rchar`).
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from benchmarks.caches import TOLERABLE, evict
from benchmarks.picture import Group, draw
from benchmarks.report import Report, above_zero, add_options, number, ratio
from benchmarks.rounds import in_turn, need_memory, scratch
from benchmarks.sharded_states import Scenario, check, scenarios, sharded
from benchmarks.worker import counters
from shardkeep import functions
from shardkeep.groups import flush
from shardkeep.testing.processes import PRELOAD, RankServer
from shardkeep.torch import StorageReader, StorageWriter

SIDES = ("shardkeep", "torch DCP")
UNDER_TORCH = "shardkeep under torch"
"""Our storage under torch's own driver and planners; see `benchmarks/torch_driver.py`."""
APART = f"{UNDER_TORCH}, each for itself"
MODULES = (*PRELOAD, "torch.distributed.checkpoint", "benchmarks.resharding")
"""What the server imports before it forks ranks."""
TINY = Scenario("warm-up", 1, "rows", 1, "rows", ((64, 8),) * 2)


@dataclass
class Part:
    """What one rank did in one save or load."""

    seconds: float = 0.0
    cpu: float = 0.0
    asked: int = 0
    """Bytes that reads returned, from a disk or from the page cache."""
    disk: int = 0
    """Bytes that came from the disk."""
    stats: dict[str, float] = field(default_factory=dict)


@contextmanager
def timed() -> Iterator[Part]:
    """From a barrier until this rank is done."""
    part = Part()
    gc.collect()
    dist.barrier()
    moved, cpu = counters(), time.process_time()
    begun = time.perf_counter()
    yield part
    part.seconds, part.cpu = time.perf_counter() - begun, time.process_time() - cpu
    after = counters()
    part.asked = after["rchar"] - moved["rchar"]
    part.disk = after["read_bytes"] - moved["read_bytes"]
    dist.barrier()


def save(side: str, state: dict[str, Any], path: str) -> dict[str, float]:
    if side == "shardkeep":
        return dict(functions.save(state, path).stats)
    kind = StorageWriter if side in (UNDER_TORCH, APART) else FileSystemWriter
    torch_save(state, storage_writer=kind(path))
    return {}


def load(side: str, state: dict[str, Any], path: str) -> dict[str, float]:
    if side == "shardkeep":
        return dict(functions.load(state, path).stats)
    if side in (UNDER_TORCH, APART):
        reader = StorageReader(path, read_once="auto" if side == UNDER_TORCH else False)
        torch_load(state, storage_reader=reader)
        return reader.stats
    torch_load(state, storage_reader=FileSystemReader(path))
    return {}


def save_on_rank(
    rank: int, scenario: Scenario, order: list[str], directory: str
) -> dict[str, Part]:
    """Every side saves, one after the other."""
    state = sharded(scenario, scenario.cut, rank, scenario.ranks, fill=True)
    tiny = sharded(TINY, "rows", rank, scenario.ranks, fill=True)
    out = {}
    for side in order:
        save(side, tiny, f"{directory}/{side}-tiny")
        with timed() as part:
            part.stats = save(side, state, f"{directory}/{side}")
        out[side] = part
    return _leave(out)


def load_on_rank(
    rank: int, scenario: Scenario, order: list[str], directory: str
) -> dict[str, Part]:
    """Every side loads what it saved; each rank checks every element."""
    state = sharded(scenario, scenario.load_cut, rank, scenario.load_ranks, fill=False)
    tiny = sharded(TINY, "rows", rank, scenario.load_ranks, fill=False)
    out = {}
    for side in order:
        load(side, tiny, f"{directory}/{side}-tiny")
        if rank == 0 and evict(Path(directory, side)) > TOLERABLE:
            raise AssertionError(f"{directory} stays in the page cache")
        with timed() as part:
            part.stats = load(side, state, f"{directory}/{side}")
        check(state, scenario, scenario.load_cut, rank, scenario.load_ranks)
        out[side] = part
    return _leave(out)


def _leave(out: dict[str, Part]) -> dict[str, Part]:
    flush()
    dist.destroy_process_group()
    return out


Work = Callable[[int, Scenario, list[str], str], dict[str, Part]]


def run(
    server: RankServer,
    scenario: Scenario,
    rounds: int,
    base: Path,
    sides: tuple[str, ...] = SIDES,
) -> dict[str, dict[str, list[list[Part]]]]:
    """Side to operation to rounds to ranks."""
    out: dict[str, dict[str, list[list[Part]]]] = {side: {"save": [], "load": []} for side in sides}
    for turn in range(rounds):
        print(f"{scenario.name}, round {turn + 1}", file=sys.stderr)
        order = in_turn(sides, turn)
        directory = tempfile.mkdtemp(dir=base)
        try:
            steps: list[tuple[str, int, Work]] = [
                ("save", scenario.ranks, save_on_rank),
                ("load", scenario.load_ranks, load_on_rank),
            ]
            for operation, ranks, work in steps:
                parts = server.run(ranks, work, scenario, order, directory, timeout_s=600)
                for side in sides:
                    out[side][operation].append([one[side] for one in parts])
        finally:
            shutil.rmtree(directory)
    return out


def slowest(rounds: list[list[Part]]) -> float:
    """Seconds of the slowest rank, the median of the rounds."""
    return median(max(part.seconds for part in ranks) for ranks in rounds)


def together(rounds: list[list[Part]], what: str) -> float:
    """The sum over ranks, the median of the rounds."""
    return median(sum(float(getattr(part, what)) for part in ranks) for ranks in rounds)


def told(rounds: list[list[Part]]) -> float | None:
    """Bytes that ranks say they read from files, where the library tells."""
    if "bytes_read" not in rounds[0][0].stats:
        return None
    return median(sum(part.stats["bytes_read"] for part in ranks) for ranks in rounds)


def row(
    scenario: Scenario,
    side: str,
    seen: dict[str, dict[str, list[list[Part]]]],
    ours: str = "shardkeep",
) -> list[str]:
    wanted = scenario.nbytes
    save_s, load_s = slowest(seen[side]["save"]), slowest(seen[side]["load"])
    ours_save, ours_load = (slowest(seen[ours][what]) for what in ("save", "load"))
    loads = seen[side]["load"]
    own = told(loads)
    return [
        scenario.name,
        side,
        number(wanted / 1e6, 0),
        number(together(loads, "asked") / wanted),
        number(together(loads, "disk") / wanted),
        number(None if own is None else own / wanted),
        number(load_s),
        ratio(load_s, ours_load),
        number(together(loads, "cpu")),
        number(save_s),
        ratio(save_s, ours_save),
    ]


HEADINGS = [
    "ranks, cut",
    "side",
    "MB wanted",
    "asked for / wanted",
    "from disk / wanted",
    "own count / wanted",
    "load s",
    "to ours",
    "load CPU s",
    "save s",
    "to ours",
]


def arguments(command: str, description: str | None) -> argparse.ArgumentParser:
    """The options of benchmarks over scenarios."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}", description=description
    )
    parser.add_argument("--size", type=above_zero, default=0.5, help="of each state, in GiB")
    parser.add_argument("--only", help="scenarios whose name has this in it")
    add_options(parser, repeat=3)
    return parser


def plain(seen: dict[str, dict[str, dict[str, list[list[Part]]]]]) -> dict[str, Any]:
    """For JSON: everything that was measured, by scenario."""
    return {
        name: {
            side: {
                operation: [[asdict(part) for part in ranks] for ranks in rounds]
                for operation, rounds in operations.items()
            }
            for side, operations in sides.items()
        }
        for name, sides in seen.items()
    }


def main(argv: list[str] | None = None) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    chosen = arguments("reshard", __doc__).parse_args(argv)
    nbytes = int(chosen.size * (1 << 30))
    cases = [one for one in scenarios(nbytes) if not chosen.only or chosen.only in one.name]
    # Replicated: every rank holds it all, and another copy while it checks.
    need_memory(6 * max(one.nbytes for one in cases))
    with scratch(chosen.dir, 3 * nbytes) as base, RankServer(MODULES) as server:
        report = Report("reshard", base, nbytes=nbytes, repeat=chosen.repeat)
        seen = {one.name: run(server, one, chosen.repeat, base) for one in cases}
        rows = [row(one, side, seen[one.name]) for one in cases for side in SIDES]
        report.table("Saved by some ranks, loaded cold by others, medians", HEADINGS, rows)
        if chosen.picture:
            groups = [
                Group(
                    one.name,
                    [
                        (side, together(seen[one.name][side]["load"], "asked") / one.nbytes)
                        for side in SIDES
                    ],
                )
                for one in cases
            ]
            draw(chosen.picture, "Bytes read for each byte wanted", "less is better", groups)
        report.finish(plain(seen), chosen.json)
