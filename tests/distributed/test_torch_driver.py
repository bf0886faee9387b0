"""Torch's own `save` and `load` over the native format, on real gloo processes."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings

import pytest

import shardkeep
from shardkeep.testing.processes import PRELOAD, RankServer

ROWS, COLUMNS = 23, 10


@pytest.fixture(scope="module")
def processes():
    pytest.importorskip("torch")
    with RankServer((*PRELOAD, "torch.distributed.checkpoint", "torch._dynamo")) as server:
        yield server


def whole():
    import torch

    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)


def state(world, dim=0, factor=1.0):
    """DTensors of both kinds, a plain tensor, values."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    return {
        "model": {
            "cut": distribute_tensor(whole() * factor, mesh, [Shard(dim)]),
            "same": distribute_tensor(whole() * (factor + 1), mesh, [Replicate()]),
            "plain": torch.full((3,), factor),
        },
        "step": int(factor),
        "list": [torch.tensor(factor), {"a": "text"}],
    }


def check(found, world, dim, factor):
    import torch
    from torch.distributed.tensor import DTensor

    expected = state(world, dim, factor)
    for name, tensor in expected["model"].items():
        have = found["model"][name]
        if isinstance(tensor, DTensor):
            tensor, have = tensor.to_local(), have.to_local()
        assert torch.equal(have, tensor), name
    assert found["step"] == expected["step"]
    assert found["list"][1] == {"a": "text"}


def save(content, path, **options):
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    options.setdefault("storage_writer", shardkeep.torch.StorageWriter(path))
    dcp.save(content, **options)


def load(target, path, **options):
    import torch.distributed.checkpoint as dcp

    dcp.load(target, storage_reader=shardkeep.torch.StorageReader(path), **options)
    return target


def save_on_ranks(rank, world, path, factor=1.0):
    save(state(world, 0, factor), path)


def load_on_ranks(rank, world, path, dim, factor=1.0):
    check(load(state(world, dim, 0.0), path), world, dim, factor)


@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (3, 1)])
def test_resharding(processes, tmp_path, ranks, dim):
    processes.run(4, save_on_ranks, 4, tmp_path)
    processes.run(ranks, load_on_ranks, ranks, tmp_path, dim)
    with shardkeep.open(tmp_path) as opened:
        assert opened.verify().ok
        assert opened["model.cut"][3:5].tolist() == whole()[3:5].tolist()
        assert sorted(opened.state_dict()["model"]) == ["cut", "plain", "same"]


def load_once_on_ranks(rank, world, path, broken):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Failing(DefaultLoadPlanner):
        def resolve_tensor(self, read_item):
            if rank == broken:
                raise RuntimeError("this rank cannot")
            return super().resolve_tensor(read_item)

    reader = shardkeep.torch.StorageReader(path, read_once=True)
    target = state(world, 1, 0.0)
    try:
        dcp.load(target, storage_reader=reader, planner=Failing())
    except CheckpointException as error:
        return str(error)
    finally:
        shardkeep.flush()
    check(target, world, 1, 1.0)
    return reader.stats["bytes_received"]


def test_reading_once(processes, tmp_path):
    processes.run(4, save_on_ranks, 4, tmp_path)
    assert sum(processes.run(4, load_once_on_ranks, 4, tmp_path, None)) > 0
    told = processes.run(4, load_once_on_ranks, 4, tmp_path, 2)
    assert all("this rank cannot" in text for text in told)


def load_once_alone(rank, path):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if rank == 1:  # the others do not load
        reader = shardkeep.torch.StorageReader(path, read_once=True)
        target = {"model": {"cut": torch.zeros(ROWS, COLUMNS)}}
        dcp.load(target, storage_reader=reader, no_dist=True)
        assert torch.equal(target["model"]["cut"], whole())
    dist.barrier()


def test_reading_once_alone(processes, tmp_path):
    processes.run(4, save_on_ranks, 4, tmp_path)
    processes.run(2, load_once_alone, tmp_path, timeout_s=30)


# --- what several ranks want, by default

LARGE = (2048, 1024)


def large(world, dim, fill):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    whole = torch.arange(LARGE[0] * LARGE[1], dtype=torch.float32).reshape(LARGE)
    return {
        name: distribute_tensor(whole * factor if fill else whole * 0, mesh, [Shard(dim)])
        for name, factor in (("a", 1), ("b", 3))
    }


def save_large(rank, world, path):
    save(large(world, 0, True), path)


def load_large(rank, world, path, planner, read_once="auto"):
    """What it read and got, or what it was told; a rank that is not cut short fills its tensors."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from shardkeep.engine import passing

    passing.STALL_S = 1.0
    passing.LOOK_S = 0.1
    target = large(world, 1, False)
    reader = shardkeep.torch.StorageReader(path, read_once=read_once)
    chosen = planner(rank, path)
    error = ""
    try:
        dcp.load(target, storage_reader=reader, planner=chosen)
    except CheckpointException as caught:
        error = str(caught)
    wanted = large(world, 1, True)
    right = {name: torch.equal(target[name].to_local(), wanted[name].to_local()) for name in target}
    return reader.stats.get("bytes_read"), reader.stats.get("bytes_received"), right, error


def default_planner(rank, path):
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    return DefaultLoadPlanner()


def dropping(rank, path):
    """On one rank, a planner that leaves out what it has announced, and all word of storages."""
    import dataclasses

    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Dropping(DefaultLoadPlanner):
        def finish_plan(self, plan):
            if rank == 2:
                kept = [item for item in plan.items if item.dest_index.fqn != "b"]
                plan = dataclasses.replace(plan, items=kept, storage_data=None)
            return plan

    return Dropping()


def forgetting(rank, path):
    """A planner that makes plans of its own, without what storages told each other."""
    import dataclasses

    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Forgetting(DefaultLoadPlanner):
        def create_global_plan(self, plans):
            return [dataclasses.replace(plan, storage_data=None) for plan in plans]

    return Forgetting()


def failing(rank, path, where):
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class Failing(DefaultLoadPlanner):
        def finish_plan(self, plan):
            if rank == 1 and where == "finish_plan":
                raise RuntimeError("this rank cannot")
            return super().finish_plan(plan)

        def resolve_tensor(self, read_item):
            if rank == 1 and where == "resolve_tensor":
                raise RuntimeError("this rank cannot")
            if rank == 1 and where == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item, tensor):
            (path / f"read-{rank}").touch()

    return Failing()


@pytest.mark.parametrize(
    ("read_once", "times"), [("auto", (1.0, 1.1)), (True, (1.0, 1.1)), (False, (3.9, 4.1))]
)
def test_bytes_read_by_all_ranks(processes, tmp_path, read_once, times):
    processes.run(4, save_large, 4, tmp_path)
    read, received, right, errors = zip(
        *processes.run(4, load_large, 4, tmp_path, default_planner, read_once), strict=True
    )
    assert not any(errors)
    assert all(all(one.values()) for one in right)
    distinct = 2 * LARGE[0] * LARGE[1] * 4
    assert times[0] * distinct <= sum(read) <= times[1] * distinct
    assert all(received) == (read_once is not False)


def test_a_planner_that_drops_items_on_one_rank(processes, tmp_path):
    processes.run(4, save_large, 4, tmp_path)
    outcomes = processes.run(4, load_large, 4, tmp_path, dropping)
    for rank, (_, received, right, error) in enumerate(outcomes):
        assert not error
        assert received > 0
        assert right == {"a": True, "b": rank != 2}


def test_a_planner_that_forgets_what_storages_told(processes, tmp_path):
    processes.run(2, save_large, 2, tmp_path)
    for _, received, right, error in processes.run(2, load_large, 2, tmp_path, forgetting):
        assert not error
        assert all(right.values())
        assert received == 0


@pytest.mark.parametrize("where", ["finish_plan", "resolve_tensor"])
def test_others_do_not_wait_for_a_rank_that_failed(processes, tmp_path, where):
    processes.run(4, save_large, 4, tmp_path)
    planner = functools.partial(failing, where=where)
    outcomes = processes.run(4, load_large, 4, tmp_path, planner, timeout_s=90)
    for rank, (_, _, right, error) in enumerate(outcomes):
        assert "this rank cannot" in error
        assert rank == 1 or all(right.values())


def test_others_do_not_wait_for_a_rank_that_is_killed(processes, tmp_path):
    """Torch's other ranks wait for it, or see its connection close; but all have read."""
    processes.run(3, save_large, 3, tmp_path)
    planner = functools.partial(failing, where="kill")
    outcomes = processes.outcomes(3, load_large, 3, tmp_path, planner, timeout_s=6)
    assert outcomes[1].died == signal.SIGKILL
    assert (tmp_path / "read-0").exists()
    assert (tmp_path / "read-2").exists()


def both_ways(rank, world, path):
    shardkeep.load(target := state(world, 1, 0.0), path / "torch")
    check(target, world, 1, 1.0)
    shardkeep.save(state(world, 0, 3.0), path / "ours")
    check(load(state(world, 1, 0.0), path / "ours"), world, 1, 3.0)


def test_both_ways_with_our_own_calls(processes, tmp_path):
    processes.run(4, save_on_ranks, 4, tmp_path / "torch")
    processes.run(4, both_ways, 4, tmp_path)


def save_with_cached_plans(rank, world, path):
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    for step in range(4):
        content = state(world, 0, float(step + 1))
        if step == 3 and rank == 1:
            content["more"] = step  # the plan of one rank changes, those of others do not
        planner = DefaultSavePlanner(enable_plan_caching=True)
        save(content, path / f"step-{step}", planner=planner)
        check(load(state(world, 1, 0.0), path / f"step-{step}"), world, 1, step + 1.0)


def test_cached_plans(processes, tmp_path):
    """A cached plan carries the word of an earlier save, and this save is another."""
    processes.run(4, save_with_cached_plans, 4, tmp_path)
    for step in range(4):
        with shardkeep.open(tmp_path / f"step-{step}") as opened:
            assert opened.verify().ok
            assert ("more" in opened.state_dict()) == (step == 3)


def save_in_a_group(rank, path):
    import torch
    import torch.distributed as dist

    group = dist.new_group([1, 2])
    if rank in (1, 2):
        save({"a": torch.full((4,), 5.0)}, path / "group", process_group=group)
        found = load({"a": torch.zeros(4)}, path / "group", process_group=group)
        assert found["a"].tolist() == [5.0] * 4
    save({"a": torch.full((4,), float(rank))}, path / f"own-{rank}", no_dist=True)
    found = load({"a": torch.zeros(4)}, path / f"own-{rank}", no_dist=True)
    assert found["a"].tolist() == [float(rank)] * 4


def test_groups_and_no_groups(processes, tmp_path):
    processes.run(3, save_in_a_group, tmp_path)


def save_with_another_coordinator(rank, path):
    from torch.distributed.checkpoint.state_dict_saver import save_state_dict

    warnings.simplefilter("ignore")
    writer = shardkeep.torch.StorageWriter(path)
    save_state_dict(state(3)["model"], writer, coordinator_rank=2)


def test_another_coordinator(processes, tmp_path):
    processes.run(3, save_with_another_coordinator, tmp_path)
    assert shardkeep.open(tmp_path).verify().ok


def save_alone(rank, path):
    from torch.distributed.checkpoint.api import CheckpointException

    with pytest.raises(BaseException, match="use_collectives=False") as caught:
        save({"a": 1}, path, use_collectives=False)
    assert not isinstance(caught.value, CheckpointException)


def test_without_collectives(processes, tmp_path):
    processes.run(2, save_alone, tmp_path)


# --- in the background


def save_behind(rank, world, path, kind):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    warnings.simplefilter("ignore")
    for step in (1.0, 2.0):
        content = state(world, 0, step)
        future = dcp.async_save(
            content,
            storage_writer=shardkeep.torch.StorageWriter(path),
            async_checkpointer_type=AsyncCheckpointerType[kind],
        )
        content["model"]["cut"].to_local().zero_()  # the snapshot is not disturbed
        future.result(timeout=100)
        check(load(state(world, 1, 0.0), path), world, 1, step)


def test_async_in_threads(processes, tmp_path):
    processes.run(4, save_behind, 4, tmp_path, "THREAD")
    assert shardkeep.open(tmp_path).verify().ok


@pytest.mark.slow
def test_async_in_processes(processes, tmp_path):
    """Torch starts a process for each rank, and each imports torch."""
    processes.run(2, save_behind, 2, tmp_path, "PROCESS", timeout_s=200)
    assert shardkeep.open(tmp_path).verify().ok


# --- what goes wrong


def save_and_fail(rank, world, path, victim, how):
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    class Failing(DefaultSavePlanner):
        def resolve_data(self, write_item):
            if rank == victim and write_item.index.fqn == "model.cut":
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("this rank cannot")
            return super().resolve_data(write_item)

    writer = shardkeep.torch.StorageWriter(path)  # outlives its save, as a program's may
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        save(state(world, 0, 9.0), path, planner=Failing(), storage_writer=writer)
    if how == "raise":
        assert [name for name in os.listdir(path) if name.endswith(".tmp")] == []
        assert isinstance(caught.value, CheckpointException)
        assert list(caught.value.failures) == [victim]
        assert "this rank cannot" in str(caught.value)
    return True


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_fails(processes, tmp_path, victim):
    processes.run(4, save_on_ranks, 4, tmp_path)
    before = sorted(os.listdir(tmp_path / "data"))
    assert processes.run(4, save_and_fail, 4, tmp_path, victim, "raise") == [True] * 4
    processes.run(4, load_on_ranks, 4, tmp_path, 1)
    # Torch's driver tells no storage that others have failed: what they wrote is left to `gc`.
    shardkeep.gc(tmp_path, stale_s=0)
    assert sorted(os.listdir(tmp_path / "data")) == before
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.json", "data"]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_is_killed(processes, tmp_path, victim):
    processes.run(4, save_on_ranks, 4, tmp_path)
    # Torch's other ranks wait for ever for one that is gone, or see its connection close.
    outcomes = processes.outcomes(4, save_and_fail, 4, tmp_path, victim, "kill", timeout_s=4)
    assert outcomes[victim].died == signal.SIGKILL
    assert not any(one.error for one in outcomes)
    processes.run(4, load_on_ranks, 4, tmp_path, 1)
    assert shardkeep.open(tmp_path).verify().ok
    # And the next save is not hindered by what is left.
    processes.run(4, save_on_ranks, 4, tmp_path, 2.0)
    processes.run(4, load_on_ranks, 4, tmp_path, 1, 2.0)


def load_what_is_replaced(rank, path, read_once):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    old, new = path / "old", path / "new"
    at = path / f"at-{rank}"  # which each rank looks up at another time
    at.symlink_to(new if rank == 2 else old)
    reader = shardkeep.torch.StorageReader(at, read_once=read_once)
    target = {"a": torch.zeros(4)}
    with pytest.raises(CheckpointException, match="rank 2 has opened another save") as caught:
        dcp.load(target, storage_reader=reader)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], shardkeep.StorageError)
    assert failure[0].transient
    assert target["a"].tolist() == [0.0] * 4
    if rank == 2:
        at.unlink()
        at.symlink_to(old)
    dcp.load(target, storage_reader=reader)
    shardkeep.flush()
    assert target["a"].tolist() == [1.0] * 4


@pytest.mark.parametrize("read_once", [False, True])
def test_ranks_open_different_saves(processes, tmp_path, read_once):
    """One that is slower opens the checkpoint when it has been replaced."""
    import torch

    shardkeep.save({"a": torch.full((4,), 1.0)}, tmp_path / "old")
    shardkeep.save({"a": torch.full((4,), 2.0)}, tmp_path / "new")
    processes.run(3, load_what_is_replaced, tmp_path, read_once)


def save_to_own_directories(rank, path):
    from torch.distributed.checkpoint.api import CheckpointException

    from shardkeep.formats.native import claiming

    claiming.LEASE_SEEN_S = 0.2
    begun = time.monotonic()
    with pytest.raises(CheckpointException, match="storage that all ranks share"):
        save(state(2), path / f"host-{rank}")
    assert time.monotonic() - begun < 20


def test_directories_that_are_not_shared(processes, tmp_path):
    processes.run(2, save_to_own_directories, tmp_path)
    assert not list(tmp_path.rglob("checkpoint.json"))


def save_in_sharded_tensors(rank, path):
    import torch
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    warnings.simplefilter("ignore")

    def made(fill, order):
        spec = ChunkShardingSpec(dim=0, placements=[f"rank:{n}/cpu" for n in order])
        tensor = sharded_tensor.zeros(spec, 10, 4)
        for shard in tensor.local_shards():
            low = shard.metadata.shard_offsets[0]
            rows = torch.arange(low, low + shard.tensor.shape[0])
            shard.tensor.copy_(rows[:, None].expand_as(shard.tensor) * fill)
        return {"a": tensor}

    save(made(1, [0, 1]), path)
    target = load(made(0, [1, 0, 0, 1]), path)
    for have, want in zip(
        target["a"].local_shards(), made(1, [1, 0, 0, 1])["a"].local_shards(), strict=True
    ):
        assert torch.equal(have.tensor, want.tensor)


def test_sharded_tensors(processes, tmp_path):
    processes.run(2, save_in_sharded_tensors, tmp_path)
