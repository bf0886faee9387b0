"""Tensors on a device: saved to a disk and to shared memory, and loaded back into their places.

Ours beside torch's as it comes, in turn, in one process. The first round warms up and compares
every bit; it is not counted. A CUDA graph that was captured before the loads is replayed after
them. Needs torch with CUDA; `--cpu` runs the same code without a device, to see that it works.
"""

from __future__ import annotations

import argparse
import shutil
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import raw
from benchmarks.caches import TOLERABLE, evict
from benchmarks.device_rates import pinned_rates, synchronize
from benchmarks.picture import Group, draw
from benchmarks.report import Report, above_zero, add_options, at_least_one, number, ratio
from benchmarks.rounds import SHM, Results, checkpoint, in_turn, named, need_memory, scratch
from benchmarks.states import Leaf, nested, training_state
from benchmarks.worker import Measure, measured

OURS, TORCH = "shardkeep", "torch DCP"
OPERATIONS = {
    "save to disk": "write",
    "cold load from disk": "read",
    "save to memory": "tmpfs write",
    "load from memory": "tmpfs read",
}
"""To the raw rate of the storage."""
GRAPHED = 8
"""Tensors that the graph computes with, the largest ones."""
REPLAYED = 1 << 16
"""Elements of each."""


def device_tensors(leaves: list[Leaf], device: torch.device, seed: int | None) -> list[Any]:
    """Random values of weights' sizes; or a pattern that is in no state, without a seed."""
    generator = torch.Generator(device)
    out = []
    for at, leaf in enumerate(leaves):
        dtype = getattr(torch, leaf.dtype)
        if seed is None:
            out.append(torch.full(leaf.shape, -7.0, dtype=dtype, device=device))
            continue
        generator.manual_seed(seed + at)
        values = torch.rand(leaf.shape, dtype=torch.float32, generator=generator, device=device)
        out.append((values + 0.01).to(dtype))
    return out


def same_bits(one: Any, other: Any) -> bool:
    integers = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.view(integers), other.view(integers))


class Graph:
    """A captured computation over tensors at fixed addresses."""

    def __init__(self, targets: list[Any], sources: list[Any]) -> None:
        pairs = sorted(zip(targets, sources, strict=True), key=lambda pair: int(pair[0].numel()))
        self.targets = [target for target, _ in pairs[-GRAPHED:]]
        self.sources = [source for _, source in pairs[-GRAPHED:]]
        self.pointers = [target.data_ptr() for target in self.targets]
        cuda: Any = torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):  # once before the capture, as torch asks
            self.compute(self.targets)
        cuda.current_stream().wait_stream(side)
        self.graph = cuda.CUDAGraph()
        with cuda.graph(self.graph):
            self.results = self.compute(self.targets)

    @staticmethod
    def compute(tensors: list[Any]) -> list[Any]:
        return [tensor.reshape(-1)[:REPLAYED] * 2 for tensor in tensors]

    def check(self) -> None:
        """After a load: the same addresses, and the results of what was saved."""
        assert [target.data_ptr() for target in self.targets] == self.pointers, "moved by a load"
        self.graph.replay()
        torch.cuda.synchronize()
        for result, right in zip(self.results, self.compute(self.sources), strict=True):
            assert same_bits(result, right), "the graph replayed on other values than were saved"


class Device:
    """The state on the device, the target beside it, and both sides."""

    def __init__(self, leaves: list[Leaf], device: torch.device) -> None:
        self.device = device
        self.source = device_tensors(leaves, device, seed=1)
        self.target = device_tensors(leaves, device, seed=None)
        self.have, self.want = nested(leaves, self.source), nested(leaves, self.target)
        self.graph = Graph(self.target, self.source) if device.type == "cuda" else None

    def run(self, side: str, what: str, path: Path, **options: Any) -> Measure:
        synchronize(self.device)
        with measured() as measure:
            measure.stats = getattr(self, f"{what}_{side.replace(' ', '_').lower()}")(
                path, **options
            )
            synchronize(self.device)
        return measure

    def save_shardkeep(self, path: Path, **options: Any) -> dict[str, float]:
        from shardkeep.functions import save

        return dict(save(self.have, path, no_dist=True, **options).stats)

    def load_shardkeep(self, path: Path, **options: Any) -> dict[str, float]:
        from shardkeep.functions import load

        return dict(load(self.want, path, no_dist=True, **options).stats)

    def save_torch_dcp(self, path: Path) -> dict[str, float]:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.have, storage_writer=FileSystemWriter(path), no_dist=True)
        return {}

    def load_torch_dcp(self, path: Path) -> dict[str, float]:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.want, storage_reader=FileSystemReader(path), no_dist=True)
        return {}

    def scramble(self) -> None:
        for tensor in self.target:
            tensor.fill_(-7.0)

    def check(self) -> None:
        """Every bit, and what a graph captured before the load makes of them."""
        for tensor, right in zip(self.target, self.source, strict=True):
            assert same_bits(tensor, right), "loaded other bits than were saved"
        if self.graph is not None:
            self.graph.check()


def turn(device: Device, side: str, disk: Path, memory: Path | None) -> dict[str, Measure]:
    """All operations of one side; every load is checked."""
    found: dict[str, Measure] = {}

    def load(name: str, path: Path, **options: Any) -> None:
        device.scramble()
        found[name] = device.run(side, "load", path, **options)
        device.check()

    with checkpoint(disk) as path:
        found["save to disk"] = device.run(side, "save", path)
        if evict(path) > TOLERABLE:
            raise SystemExit(f"{path} stays in the page cache")
        load("cold load from disk", path)
    if memory is not None:
        with checkpoint(memory) as path:
            found["save to memory"] = device.run(side, "save", path)
            load("load from memory", path)
            if side == OURS:
                load("load from memory, verify=False", path, verify=False)
    for name, measure in found.items():
        print(f"{side}, {name}: {measure.seconds:.2f} s", flush=True)
    return found


def show(
    report: Report, results: Results, nbytes: int, pinned: dict[str, dict[str, float]]
) -> None:
    best = {direction: max(rates.values()) / 1e9 for direction, rates in pinned.items()}
    names = [*OPERATIONS, "load from memory, verify=False"]
    rows = []
    for side in (OURS, TORCH):
        for name in names:
            seconds = results.middle(side, name)
            if seconds is None:
                continue
            rate = nbytes / seconds / 1e9
            storage = results.rate(OPERATIONS[name.split(",")[0]]) or 0.0
            copy = best["to host" if name.startswith("save") else "to device"]
            theirs = results.middle(TORCH, name) if side == OURS else None
            cells = [number(rate), ratio(rate, storage / 1e9), ratio(rate, copy)]
            cells.append(ratio(theirs, seconds))
            cells.append(number(results.middle(side, name, "cpu")))
            cells.append(f"{(results.middle(side, name, 'peak') or 0) / 1e6:.0f}")
            rows.append([f"{side}: {name}", *cells])
    headings = ["", "GB/s", "to raw storage", "to pinned copy", "to torch", "CPU s", "peak MB"]
    report.table("Device tensors, medians", headings, rows)
    rows = [
        [direction, *(f"{rate / 1e9:.2f}" for rate in rates.values())]
        for direction, rates in pinned.items()
    ]
    report.table("Pinned copies, GB/s by unit", ["", *pinned["to host"]], rows)
    rows = [[name, number((results.rate(name) or 0) / 1e9)] for name in results.rates]
    report.table("Raw storage, GB/s", ["", "GB/s"], rows)


def picture(path: Path, results: Results, nbytes: int) -> None:
    groups = []
    for name, kind in OPERATIONS.items():
        bars = [
            (side, nbytes / seconds / 1e9)
            for side in (OURS, TORCH)
            if (seconds := results.middle(side, name))
        ]
        groups.append(Group(name, bars, (results.rate(kind) or 0.0) / 1e9))
    draw(path, f"{nbytes / 1e9:.1f} GB on a device", "GB/s, more is better", groups)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks device", description=__doc__)
    parser.add_argument("--size", type=above_zero, default=16.0, help="of the state, in GiB")
    parser.add_argument("--cpu", action="store_true", help="no device: only to see that it runs")
    parser.add_argument(
        "--layers", type=at_least_one, default=24, help="fewer: fewer, larger tensors"
    )
    parser.add_argument("--shm", default=SHM, help="a directory in memory")
    parser.add_argument("--sides", help=f"only these, separated by ';': {OURS}; {TORCH}")
    add_options(parser, repeat=3)
    return parser


def main(argv: list[str] | None = None) -> None:
    chosen = arguments().parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if not chosen.cpu and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --cpu runs without one")
    sides = named(chosen.sides, (OURS, TORCH), (OURS, TORCH))
    device = torch.device("cpu" if chosen.cpu else "cuda")
    leaves = training_state(int(chosen.size * (1 << 30)), chosen.layers)
    total = sum(leaf.nbytes for leaf in leaves)
    if chosen.cpu:
        need_memory(5 * total)
    results = Results()
    with ExitStack() as stack:
        disk = stack.enter_context(scratch(chosen.dir, int(1.3 * total)))
        memory = None
        if shutil.disk_usage(chosen.shm).free > 1.3 * total:
            memory = stack.enter_context(scratch(chosen.shm, int(1.3 * total)))
        else:
            print(f"{chosen.shm} has too little room: nothing is saved to memory", flush=True)
        name = "no device" if chosen.cpu else torch.cuda.get_device_name()
        settings = {"nbytes": total, "tensors": len(leaves), "repeat": chosen.repeat}
        report = Report("device", disk, device=name, **settings)
        report.say(f"{name}: {total / 1e9:.2f} GB in {len(leaves)} tensors")
        some = min(total, 4 << 30)
        pinned = pinned_rates(device, some)
        ways = raw.choose(disk, total)
        report.say(f"raw write: {ways.write}; raw read: {ways.read}")
        state = Device(leaves, device)
        for count in range(chosen.repeat + 1):
            rates = ways.disk(disk, some)
            if memory is not None:
                rates |= ways.memory(memory, some)
            for side in in_turn(sides, count):
                found = turn(state, side, disk, memory)
                for operation, measure in found.items() if count else ():
                    results.add(side, operation, measure)
            for kind, rate in rates.items() if count else ():
                results.rates[kind].append(rate)
        report.say("every loaded bit is right" + ("" if chosen.cpu else "; the graph replayed"))
        show(report, results, total, pinned)
        if chosen.picture:
            picture(chosen.picture, results, total)
        report.finish({**results.plain(), "pinned_bytes_per_s": pinned}, chosen.json)
