"""Planning at scale: a save by many simulated ranks and one rank's load, without any tensor data.

Everything a coordinator does between the ranks' local plans and the committed index is run and
timed, phase by phase, one phase after the other in one process; then the same phases with torch's
own functions on fewer ranks. With --processes: planning end to end on real processes, torch's and
ours. docs/PERFORMANCE.md says what is compared with what.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.phases import Phases
from benchmarks.pipeline import Pipeline
from benchmarks.simulated import Model, Shards, write_index
from shardkeep.columns import Boxes
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.planner import Place, ReadItems, SavePlan
from shardkeep.reads import plan_reads
from shardkeep.tables import StateColumns
from shardkeep.wire import PlanDecoder, encode_final_plan, encode_local_plan


class Job(Protocol):
    """Ranks that hold parts of a model."""

    @property
    def ranks(self) -> int: ...

    def local_plan(self, rank: int) -> SavePlan: ...

    def wanted(self, rank: int) -> list[tuple[str, Any]]:
        """Names and boxes that a rank loads."""
        ...


def run(directory: Path, ranks: int, tensors: int, load_ranks: int) -> Phases:
    """One save and one load, planned by Shardkeep; every tensor cut over all ranks."""
    model = Model(tensors)
    return run_job(directory, Shards(model, ranks), Shards(model, load_ranks))


def run_pipeline(directory: Path, ranks: int, load_ranks: int) -> Phases:
    """The same for the 405B model; every rank has the tensors of its pipeline stage."""
    return run_job(directory, Pipeline(ranks), Pipeline(load_ranks))


def run_job(directory: Path, job: Job, loading: Job) -> Phases:
    """One save by all ranks of a job, and the load of one rank of another."""
    ranks = job.ranks
    phases = Phases()

    messages = []
    for rank in range(ranks):
        plan = job.local_plan(rank)
        phases.chunks += len(plan.items)
        with phases.phase("encode local plans"):
            messages.append(encode_local_plan(plan))
    phases.note("encode local plans", nbytes=sum(map(len, messages)))
    with phases.phase("decode local plans"):
        decoder = PlanDecoder()
        plans = [decoder.decode(message) for message in messages]
    planner = DefaultSavePlanner()
    with phases.phase("global plan"):
        plans, metadata = planner.create_global_plan(plans)
    writer = NativeWriter(directory)
    writer.set_up_storage_writer(Place(0, ranks))
    with phases.phase("locations"):
        plans = writer.prepare_global_plan(plans, metadata)
    phases.note("locations", nbytes=sum(len(plan.storage_data) for plan in plans))
    with phases.phase("encode final plans"):
        final = [
            encode_final_plan(plan, renamed)
            for plan, renamed in zip(plans, planner.renamed, strict=True)
        ]
    phases.note("encode final plans", nbytes=sum(map(len, final)))
    del plans, final, messages, decoder
    with phases.phase("write index"):
        index, record = write_index(directory, writer, metadata)
    phases.note("write index", nbytes=index.size)
    state = metadata.state_dict_metadata
    assert isinstance(state, StateColumns)
    assert state.chunks is not None
    stored = len(state.chunks)
    writer.settle()
    del metadata, state, writer, planner
    reader = NativeReader(directory)
    with phases.phase("read index"):
        found = reader.read_metadata(record).state_dict_metadata
        assert isinstance(found, StateColumns)
        found.prefetch(range(len(found.tensors)))
    assert sum(len(found.chunks_of(row)) for row in range(len(found.tensors))) == stored
    wanted = loading.wanted(loading.ranks // 2)
    with phases.phase("plan one rank's load"):
        names, boxes = [name for name, _ in wanted], Boxes.of([box for _, box in wanted])
        items = plan_reads(found, names, boxes)
    _check_reads(items, sum(math.prod(box.sizes) for _, box in wanted))
    reader.close()
    return phases


def _check_reads(items: ReadItems, elements: int) -> None:
    """The regions make up as many elements as are wanted."""
    regions = Boxes(items.chunks.boxes.start, items.low, items.size)
    assert int(regions.volumes().sum()) == elements


def _run_in(side: str, base: str | None, *sizes: int) -> Phases:
    with tempfile.TemporaryDirectory(dir=base) as directory:
        if side == "torch":
            from benchmarks import torch_plan

            return torch_plan.run(Path(directory), *sizes)
        if side == "405b":
            return run_pipeline(Path(directory), *sizes)
        return run(Path(directory), *sizes)


def run_alone(side: str, base: str | None, *sizes: int) -> Phases:
    """In a process of its own, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_run_in, side, base, *sizes).result()


def table(title: str, phases: Phases, ranks: int) -> Table:
    out = Table(title=title)
    for heading in ("phase", "seconds", "CPU s", "MB", "KB per rank", "peak RSS MB"):
        out.add_column(heading, justify="left" if heading == "phase" else "right")
    for row in phases.phases.values():
        per_rank = f"{row.nbytes / ranks / 1e3:.0f}" if row.nbytes and "plan" in row.name else ""
        size = f"{row.nbytes / 1e6:.1f}" if row.nbytes else ""
        peak = f"{row.peak_rss / 1e6:.0f}"
        out.add_row(row.name, f"{row.seconds:.2f}", f"{row.cpu:.2f}", size, per_rank, peak)
    out.add_section()
    peak = f"{phases.peak_rss / 1e6:.0f}"
    out.add_row("total", f"{phases.seconds:.2f}", f"{phases.cpu:.2f}", "", "", peak)
    return out


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--ranks", type=int, help="simulated ranks; 1024, of the 405b model 16384")
    parser.add_argument("--tensors", type=int, default=3400, help="tensors, each cut over all")
    parser.add_argument("--load-ranks", type=int, help="ranks of the load; 768, or half as many")
    parser.add_argument("--torch-ranks", type=int, default=64, help="the same with torch; 0: not")
    parser.add_argument("--model", choices=["405b"], help="TP 8 x PP 16 x DP; without torch")
    parser.add_argument("--processes", type=int, help="real processes instead, torch's and ours")
    parser.add_argument("--sharded", type=int, default=20000, help="DTensors of the processes")
    parser.add_argument("--repeat", type=int, help="runs; the fastest counts, of processes (5) all")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--dir", help="where the index is written; the temporary folder if absent")
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    console = Console()
    numbers: dict[str, Any]
    if chosen.processes:
        from benchmarks import plan_processes

        rounds = chosen.repeat or 5
        numbers = plan_processes.run(chosen.processes, chosen.sharded, rounds, chosen.dir)
        plan_processes.show(console, numbers)
    else:
        numbers = _simulate(console, chosen)
    if chosen.json:
        chosen.json.write_text(json.dumps(numbers, indent=1))


def _simulate(console: Console, chosen: argparse.Namespace) -> dict[str, Any]:
    sides: dict[str, tuple[int, ...]] = {}
    """To the ranks, and what else its run takes."""
    if chosen.model:
        ranks = chosen.ranks or 16384
        sides[chosen.model] = (ranks, chosen.load_ranks or ranks // 2)
        tensors = Pipeline(ranks).tensor_count
    else:
        tensors = chosen.tensors
        load_ranks = chosen.load_ranks or 768
        sides["shardkeep"] = (chosen.ranks or 1024, tensors, load_ranks)
        if chosen.torch_ranks:
            sides["torch"] = (chosen.torch_ranks, tensors, load_ranks)
    results: dict[str, Phases] = {}
    for side, sizes in sides.items():
        runs = [run_alone(side, chosen.dir, *sizes) for _ in range(chosen.repeat or 1)]
        results[side] = best = min(runs, key=lambda phases: phases.seconds)
        title = f"{side}: {sizes[0]} ranks, {tensors} tensors, {best.chunks} chunks"
        console.print(table(title, best, sizes[0]))
        every = ", ".join(f"{phases.seconds:.2f}" for phases in runs)
        console.print(f"{best.rate:,.0f} chunks/s; totals of all runs: {every} s\n")
    if "torch" in results:
        ratio = results["shardkeep"].rate / results["torch"].rate
        console.print(f"ratio of chunks/s: {ratio:.0f}")
    return {
        side: {
            "ranks": sides[side][0],
            "tensors": tensors,
            "chunks": phases.chunks,
            "seconds": phases.seconds,
            "cpu": phases.cpu,
            "peak_rss": phases.peak_rss,
            "phases": [asdict(row) for row in phases.phases.values()],
        }
        for side, phases in results.items()
    }


if __name__ == "__main__":
    main()
