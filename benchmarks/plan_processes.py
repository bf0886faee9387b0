"""Planning end to end on real gloo processes: torch's and ours, in turn, over the same DTensors.

Timed is what a save does between its set-up and its first byte of data, from a barrier until the
slowest rank has its final plan. docs/PERFORMANCE.md says what that is on each side.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as TorchSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardkeep
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.groups import coordinator_for, flush
from shardkeep.metadata import Metadata, StorageMeta
from shardkeep.planner import Place, SavePlan
from shardkeep.planning import PlanMemory, Planning
from shardkeep.testing.processes import RankServer

if TYPE_CHECKING:
    from rich.console import Console
    from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
    from torch.distributed.checkpoint.planner import SavePlan as TorchSavePlan

SIDES = ("torch", "shardkeep")
STEPS = ("set up planner", "local plan", "global plan", "layout")
"""What is timed of the whole on rank 0; the rest is messages, and waiting for other ranks."""

SHAPES = ((64, 8), (16, 8), (16, 8), (64, 8), (208, 8), (208, 8), (64, 16), (64,), (64,))
"""Of a layer: as many 1-d and 2-d tensors as llama has, but small; all divide by 4."""


@dataclass
class Round:
    """One planning, on one rank."""

    seconds: float = 0.0
    cpu: float = 0.0
    """Of this process."""
    steps: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.steps[name] = self.steps.get(name, 0.0) + time.perf_counter() - began

    @contextmanager
    def whole(self) -> Iterator[None]:
        gc.collect()
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.cpu = time.perf_counter() - began, time.process_time() - cpu
        dist.barrier()


def sharded_state(count: int, world_size: int) -> dict[str, Any]:
    """`count` DTensors, `Shard(0)` on a mesh of one dimension: parameters and Adam moments."""
    mesh = init_device_mesh("cpu", (world_size,))
    model: dict[str, Any] = {}
    moments: dict[str, dict[str, Any]] = {}

    def tensor(number: int) -> Any:
        rows, *rest = SHAPES[number % len(SHAPES)]
        local = torch.zeros(rows // world_size, *rest)
        # The whole shape is given, or torch would ask every rank for it.
        whole = torch.Size([rows // world_size * world_size, *rest])
        stride = torch.empty(whole, device="meta").stride()
        return DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole, stride=stride
        )

    for made in range(count):
        number = made // 3
        layer, place = divmod(number, len(SHAPES))
        name = f"layers.{layer}.blocks.{place}.weight"
        if made % 3 == 0:
            model[name] = tensor(number)
        else:
            moment = "exp_avg" if made % 3 == 1 else "exp_avg_sq"
            moments.setdefault(name, {})[moment] = tensor(number)
    groups = {"lr": 8e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {"model": model, "optimizer": {"state": moments, "groups": groups}, "step": 12000}


# --- torch ----------------------------------------------------------------------------------------


class _TorchPlanner(TorchSavePlanner):
    def __init__(self, clock: Round) -> None:
        super().__init__()
        self._clock = clock

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        with self._clock.step("set up planner"):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> TorchSavePlan:
        with self._clock.step("local plan"):
            return super().create_local_plan()

    def create_global_plan(
        self, all_plans: list[TorchSavePlan]
    ) -> tuple[list[TorchSavePlan], TorchMetadata]:
        with self._clock.step("global plan"):
            return super().create_global_plan(all_plans)


def plan_torch(state: dict[str, Any], directory: str) -> Round:
    """What `torch.distributed.checkpoint.save` does before it writes."""
    clock = Round()
    planner, writer = _TorchPlanner(clock), FileSystemWriter(directory)
    ranks = _DistWrapper(None, True, 0)

    def local_step() -> TorchSavePlan:
        planner.set_up_planner(state, writer.storage_meta(), ranks.is_coordinator)
        writer.set_up_storage_writer(ranks.is_coordinator)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[TorchSavePlan]) -> list[TorchSavePlan]:
        plans, _ = planner.create_global_plan(plans)
        with clock.step("layout"):
            return writer.prepare_global_plan(plans)

    with clock.whole():
        plan = planner.finish_plan(ranks.reduce_scatter("plan", local_step, global_step))
    assert sum(item.tensor_data is not None for item in plan.items) > 0
    return clock


# --- ours -----------------------------------------------------------------------------------------


class _Planner(DefaultSavePlanner):
    def __init__(self, clock: Round) -> None:
        super().__init__()
        self._clock = clock

    def set_up_planner(
        self,
        state_dict: object,
        storage_meta: StorageMeta | None = None,
        place: Place = Place(),
    ) -> None:
        with self._clock.step("set up planner"):
            super().set_up_planner(state_dict, storage_meta, place)

    def create_local_plan(self) -> SavePlan:
        with self._clock.step("local plan"):
            return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        with self._clock.step("global plan"):
            return super().create_global_plan(all_plans)


class _Writer(NativeWriter):
    clock: Round

    def prepare_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> list[SavePlan]:
        with self.clock.step("layout"):
            return super().prepare_global_plan(plans, metadata)


def plan_ours(state: dict[str, Any], directory: str) -> Round:
    """What `shardkeep.save` does between its set-up and its first byte of data."""
    clock = Round()
    planner, writer = _Planner(clock), _Writer(directory)
    writer.clock = clock
    ranks = coordinator_for(timeout_s=600)
    place = Place(ranks.rank, ranks.world_size)
    with ranks.call("plan"):
        word = ranks.lead("set up", lambda: writer.set_up_storage_writer(place))
        if not place.is_coordinator:
            writer.set_up_storage_writer(place, word)
        with clock.whole():
            plan = Planning(state, writer, planner, ranks, PlanMemory()).plan(ask_reuse=False)
    assert len(plan.items) > 0
    writer.abort(committing=False)
    return clock


# --- the run --------------------------------------------------------------------------------------


SAVES = 4
"""Whole saves of the same state, to see what the plan of the first is good for."""


def save_again(state: dict[str, Any], base: str) -> list[dict[str, float]]:
    """What each of a few saves says about its planning."""
    out = []
    for number in range(SAVES):
        state["step"] += 1
        dist.barrier()
        stats = shardkeep.save(state, os.path.join(base, f"again.{number}")).stats
        out.append({key: value for key, value in stats.items() if key.startswith("plan_")})
    return out


def work(rank: int, world_size: int, tensors: int, rounds: int, base: str) -> dict[str, Any]:
    """On every rank: a few whole saves, then both sides in turn; each begins every other round."""
    state = sharded_state(tensors, world_size)
    sides = {"torch": plan_torch, "shardkeep": plan_ours}
    out: dict[str, Any] = {side: [] for side in sides}
    out["saves"] = save_again(state, base)
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else reversed(SIDES):
            directory = os.path.join(base, f"{side}.{number}")
            out[side].append(sides[side](state, directory))
    flush()
    dist.destroy_process_group()
    return out


def run(processes: int, tensors: int, rounds: int, base: str | None = None) -> dict[str, Any]:
    """Seconds of each side: the slowest rank of each round; and where they go on rank 0."""
    with tempfile.TemporaryDirectory(dir=base) as directory, RankServer() as server:
        ranks = server.run(
            processes, work, processes, tensors, rounds, directory, timeout_s=300.0 + 60 * rounds
        )
    out: dict[str, Any] = {"processes": processes, "tensors": tensors}
    for side in SIDES:
        seconds = [max(one[side][number].seconds for one in ranks) for number in range(rounds)]
        steps = {step: median(one.steps.get(step, 0.0) for one in ranks[0][side]) for step in STEPS}
        cpu = median(sum(one[side][number].cpu for one in ranks) for number in range(rounds))
        out[side] = {
            "seconds": seconds,
            "median": median(seconds),
            "cpu": cpu,
            "steps": steps,
        }
    out["saves"] = [
        {
            "plan_s": max(one["saves"][number]["plan_s"] for one in ranks),
            "reused": ranks[0]["saves"][number]["plan_reused"],
            "bytes": max(
                one["saves"][number]["plan_sent"] + one["saves"][number]["plan_received"]
                for one in ranks
            ),
        }
        for number in range(SAVES)
    ]
    out["ratio"] = out["torch"]["median"] / out["shardkeep"]["median"]
    out["cpu_ratio"] = out["torch"]["cpu"] / out["shardkeep"]["cpu"]
    out["load"] = os.getloadavg()[0]
    return out


def show(console: Console, numbers: dict[str, Any]) -> None:
    title = f"{numbers['processes']} processes, {numbers['tensors']} sharded tensors: seconds"
    table = Table(title=title)
    for heading in ("", *SIDES):
        table.add_column(heading, justify="left" if not heading else "right")
    sides = [numbers[side] for side in SIDES]
    for step in STEPS:
        table.add_row(f"rank 0: {step}", *(f"{side['steps'][step]:.3f}" for side in sides))
    rest = [side["median"] - sum(side["steps"].values()) for side in sides]
    table.add_row("messages and waiting", *(f"{value:.3f}" for value in rest))
    table.add_section()
    table.add_row("end to end, median", *(f"{side['median']:.3f}" for side in sides))
    table.add_row("first round", *(f"{side['seconds'][0]:.3f}" for side in sides))
    table.add_row("CPU of all processes", *(f"{side['cpu']:.3f}" for side in sides))
    console.print(table)
    for side in SIDES:
        every = ", ".join(f"{value:.2f}" for value in numbers[side]["seconds"])
        console.print(f"{side}, all rounds: {every} s")
    saves = Table(title="Saves of the same state, by Shardkeep")
    for heading in ("save", "seconds of planning", "bytes of messages about it", "to the first"):
        saves.add_column(heading, justify="right")
    first = numbers["saves"][0]["plan_s"]
    for number, one in enumerate(numbers["saves"], 1):
        row = (f"{one['plan_s']:.3f}", f"{one['bytes']:.0f}", f"{one['plan_s'] / first:.3f}")
        saves.add_row(str(number), *row)
    console.print(saves)
    console.print(
        f"ratio of medians: {numbers['ratio']:.1f}; of CPU seconds: {numbers['cpu_ratio']:.1f}; "
        f"load average {numbers['load']:.1f}"
    )
