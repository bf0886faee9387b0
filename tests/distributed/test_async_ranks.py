"""Saves in the background of real processes: one snapshot, one decision, one error for all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from slow_disks import LONG_S, faulty_disk

import shardkeep
from shardkeep import PlanError, RankError, ShardedArray, StorageError
from shardkeep.coordination import Patience

WORLD = 4
SHORT = Patience(beat_s=0.25, gone_s=2.0, linger_s=1.0)
BOUND_S = 15.0


def state(rank, value, world=WORLD):
    local = np.full((3, 500), 100 * value + rank)
    array = ShardedArray.from_local(local, (3 * rank, 0), (3 * world, 500))
    return {"w": array, "same": np.full(9, value), "step": value}


def check_stored(path, value):
    assert shardkeep.verify(path).ok
    with shardkeep.open(path) as found:
        expected = np.repeat(100 * value + np.arange(WORLD), 3)
        assert np.array_equal(found["w"][:, 0], expected)
        assert found["step"] == value


def files(path):
    return [p for p in path.rglob("*") if p.is_file()]


@contextlib.contextmanager
def held_up(rank, victim=1):
    """One rank's disk waits, until it is released."""
    with faulty_disk() as disk:
        if rank == victim:
            disk.hold()
        yield disk


def all_there():
    """A barrier of the program's own."""
    import torch.distributed as dist

    dist.barrier()


# --- what it holds


def dtensors(rank, where):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    whole = [torch.randn(13, 7) for _ in range(4)]
    kinds = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Shard(1)], [Replicate()] * 2]
    held = [distribute_tensor(t.clone(), mesh, kind) for t, kind in zip(whole, kinds, strict=True)]
    saved = {f"t{n}": tensor for n, tensor in enumerate(held)}
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(saved, where)
        for tensor in held:
            tensor.to_local().fill_(-1)
        handle.result(LONG_S)
    with shardkeep.open(where) as found:
        for number, tensor in enumerate(whole):
            assert np.array_equal(found[f"t{number}"][...], tensor.numpy())


def test_dtensors_as_they_were(processes, tmp_path):
    processes.run(WORLD, dtensors, str(tmp_path / "a"))


def late_step(rank, where, guarded):
    """A step of every rank; on rank 2 it comes while the snapshot is still taken."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from shardkeep.engine.snapshot import Snapshot

    go, copy = threading.Event(), Snapshot.copy

    def copy_late(self, copying):
        if threading.current_thread().name == "shardkeep-stage" and rank == 2:
            assert go.wait(LONG_S)
        copy(self, copying)

    Snapshot.copy = copy_late
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW([weight], lr=0.5, foreach=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    expected = weight.full_tensor().detach().numpy().copy()
    saved = {"w": weight, "optim": optimizer.state_dict()["state"]}
    with shardkeep.Checkpointer() as keeper:
        handle = keeper.async_save(saved, where, snapshot="lazy")
        if rank != 2:
            handle.wait_staged(LONG_S)
        if guarded:
            shardkeep.torch.guard(optimizer, handle)
            threading.Timer(0.2, go.set).start()
        optimizer.step()
        go.set()
        error = handle.exception(LONG_S)
    if guarded:
        assert error is None
        assert np.array_equal(shardkeep.open(where)["w"][...], expected)
        assert not np.array_equal(weight.full_tensor().detach().numpy(), expected)
    return type(error).__name__, str(error)


def test_a_step_too_early_on_one_rank_is_an_error_on_all(processes, tmp_path):
    """Also of DTensors and all at once, which torch does not count as changes."""
    results = processes.run(WORLD, late_step, str(tmp_path / "a"), False)
    assert {kind for kind, _ in results} == {"PlanError"}
    assert len({text for _, text in results}) == 1
    assert "w" in results[0][1]
    assert "[rank 2]" in results[0][1]
    assert files(tmp_path) == []


def test_a_guarded_step_waits_on_the_rank_that_is_late(processes, tmp_path):
    results = processes.run(WORLD, late_step, str(tmp_path / "a"), True)
    assert {kind for kind, _ in results} == {"NoneType"}


# --- cancelling, overlaps


def cancel_on_one(rank, root):
    with shardkeep.Checkpointer() as keeper, held_up(rank) as disk:
        handle = keeper.async_save(state(rank, 1), f"{root}/a")
        if rank == 3:
            assert handle.cancel()
        time.sleep(0.1)
        disk.release()
        try:
            handle.result(LONG_S)
        except concurrent.futures.CancelledError:
            cancelled = handle.cancelled()
        all_there()
        left = [os.path.join(at, name) for at, _, names in os.walk(root) for name in names]
        all_there()
        keeper.async_save(state(rank, 2), f"{root}/a").result(LONG_S)
    return cancelled, left


def test_one_rank_cancels_for_all(processes, tmp_path):
    assert processes.run(WORLD, cancel_on_one, str(tmp_path)) == [(True, [])] * WORLD
    check_stored(tmp_path / "a", 2)


def cancel_in_commit(rank, where):
    """Rank 0 is asked while it commits: too late, on all ranks."""
    from shardkeep import NativeWriter

    handles, finish = [], NativeWriter.finish

    def ask(self, *args):
        while not handles:
            time.sleep(0.005)
        handles[0].cancel()
        return finish(self, *args)

    NativeWriter.finish = ask
    with shardkeep.Checkpointer() as keeper:
        handles.append(keeper.async_save(state(rank, 1), where))
        return handles[0].result(LONG_S).digest, handles[0].cancelled()


def test_a_save_that_commits_is_completed(processes, tmp_path):
    results = processes.run(WORLD, cancel_in_commit, str(tmp_path / "a"))
    assert len(set(results)) == 1
    assert not results[0][1]
    check_stored(tmp_path / "a", 1)


def overlap(rank, root, how):
    """Rank 1 is still cleaning up after the commit; the others are done, and do not know."""
    from shardkeep import NativeWriter
    from shardkeep.adapters.torch_groups import TorchRanks

    go, settle = threading.Event(), NativeWriter.settle

    def settle_late(self):
        settle(self)
        assert rank != 1 or go.wait(LONG_S)

    NativeWriter.settle = settle_late
    told = []
    group = TorchRanks(patience=Patience(beat_s=0.25, gone_s=30.0, linger_s=0.1))
    with shardkeep.Checkpointer(process_group=group) as keeper:
        first = keeper.async_save(state(rank, 1), f"{root}/1")
        if rank != 1:
            first.result(LONG_S)
        all_there()
        assert first.done() is (rank != 1)
        if how == "wait":
            threading.Timer(0.3, go.set).start()
        begun = time.monotonic()
        try:
            second = keeper.async_save(state(rank, 2), f"{root}/2", on_overlap=how)
            told.append("skipped" if second.skipped else "saved")
        except PlanError as error:
            told.append("is still running" in str(error))
        waited = time.monotonic() - begun
        go.set()
        first.result(LONG_S)
        third = keeper.async_save(state(rank, 3), f"{root}/3", on_overlap=how)
        third.result(LONG_S)
    return told[0], waited > 0.2


@pytest.mark.parametrize(
    ("how", "expected"),
    [("wait", ("saved", True)), ("skip", ("skipped", False)), ("error", (True, False))],
)
def test_one_rank_that_is_busy_decides_for_all(processes, tmp_path, how, expected):
    results = processes.run(WORLD, overlap, str(tmp_path), how)
    assert {told for told, _ in results} == {expected[0]}
    if how == "wait":
        assert all(waited for _, waited in results)
    assert (tmp_path / "2").exists() is (how == "wait")
    for value in (1, 3):
        check_stored(tmp_path / str(value), value)


# --- failures


class Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []
        logging.getLogger("shardkeep").addHandler(self)

    def emit(self, record):
        self.texts.append(f"{record.getMessage()}: {record.exc_info[1]}")


def fail_on_one(rank, root, number, look):
    records = Records()
    keeper = shardkeep.Checkpointer()
    with faulty_disk() as disk:
        if rank == 2:
            disk.fail(number, "disk says no")
        handle = keeper.async_save(state(rank, 1), f"{root}/a")
        while not handle.done():
            time.sleep(0.005)
        seen = handle.exception() if look else None
        disk.heal()
        try:
            keeper.async_save(state(rank, 2), f"{root}/b").result(LONG_S)
            again = None
        except StorageError as error:
            again = error
        keeper.save(state(rank, 3), f"{root}/c")
    keeper.close()
    told = seen or again
    return type(told).__name__, str(told), again is None, records.texts


@pytest.mark.parametrize(("number", "look"), [(errno.ENOSPC, True), (errno.EIO, False)])
def test_an_error_of_one_rank_is_that_of_all(processes, tmp_path, number, look):
    results = processes.run(WORLD, fail_on_one, str(tmp_path), number, look)
    assert {kind for kind, *_ in results} == {"StorageError"}
    assert len({text for _, text, *_ in results}) == 1
    assert "disk says no" in results[0][1]
    assert "[rank 2]" in results[0][1]
    assert [went_on for *_, went_on, _ in results] == [look] * WORLD
    for *_, texts in results:
        (text,) = texts
        assert "disk says no" in text
    assert files(tmp_path / "a") == []
    assert (tmp_path / "b").exists() is look
    check_stored(tmp_path / "c", 3)


def seen_by_some(rank, root):
    """Rank 0 looked, the others did not: the next save fails on all, the one after goes well."""
    with shardkeep.Checkpointer() as keeper, faulty_disk() as disk:
        if rank == 2:
            disk.fail(errno.EIO, "disk says no")
        handle = keeper.async_save(state(rank, 1), f"{root}/a")
        concurrent.futures.wait([handle])
        disk.heal()
        if rank == 0:
            handle.exception()
        with pytest.raises((StorageError, RankError), match="disk says no"):
            keeper.async_save(state(rank, 2), f"{root}/b")
        keeper.async_save(state(rank, 3), f"{root}/c").result(LONG_S)


def test_an_error_that_only_some_ranks_saw(processes, tmp_path):
    processes.run(WORLD, seen_by_some, str(tmp_path))
    check_stored(tmp_path / "c", 3)


def die_while_writing(rank, where, victim):
    from shardkeep.adapters.torch_groups import TorchRanks

    group = TorchRanks(patience=SHORT, timeout_s=30)
    keeper = shardkeep.Checkpointer(process_group=group)
    keeper.async_save(state(rank, 1), f"{where}/before").result(LONG_S)
    with held_up(rank, victim) as disk:
        handle = keeper.async_save(state(rank, 2), f"{where}/a")
        if rank == victim:
            assert disk.reached.wait(LONG_S)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        error = handle.exception(60)
        return type(error).__name__, str(error), time.monotonic() - begun


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_in_the_background(processes, tmp_path, victim):
    outcomes = processes.outcomes(WORLD, die_while_writing, str(tmp_path), victim)
    assert outcomes[victim].died == signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.ok, outcome
            kind, text, took = outcome.value
            assert kind == "RankError"
            assert f"rank {victim}" in text
            assert took < BOUND_S
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path / "a")
    check_stored(tmp_path / "before", 1)


# --- beside other things


def beside(rank, root):
    with shardkeep.Checkpointer() as keeper, held_up(rank) as disk:
        disk.release()
        shardkeep.save(state(rank, 0), f"{root}/other")
        if rank == 1:
            disk.hold()
        handle = keeper.async_save(state(rank, 1), f"{root}/1")
        target = state(rank, 9)
        keeper.load(target, f"{root}/other")
        assert target["step"] == 0
        assert not keeper.should_stop()
        with shardkeep.Checkpointer() as second:
            other = second.async_save(state(rank, 2), f"{root}/2")
            all_there()
            assert not handle.done()
            disk.release()
            keeper.save(state(rank, 3), f"{root}/3")
            other.result(LONG_S)
        handle.result(LONG_S)
    shardkeep.async_save(state(rank, 4), f"{root}/4")
    shardkeep.flush()
    all_there()
    left = [one for one in threading.enumerate() if one.name.startswith("shardkeep-helper")]
    for thread in left:
        thread.join(5)  # it was told to end, and may still be about to
    return [thread.name for thread in left if thread.is_alive()]


def test_other_calls_beside_a_save(processes, tmp_path):
    left = processes.run(WORLD, beside, str(tmp_path))
    for value in (1, 2, 3, 4):
        check_stored(tmp_path / str(value), value)
    assert left == [[]] * WORLD


def destroy_group(rank, root):
    """Without a word to us before, as many programs end."""
    import torch.distributed as dist

    with shardkeep.Checkpointer() as keeper, held_up(rank) as disk:
        handle = keeper.async_save(state(rank, 1), f"{root}/1")
        dist.destroy_process_group()
        disk.release()
        handle.result(LONG_S)
        with pytest.raises(PlanError, match="was destroyed"):
            keeper.async_save(state(rank, 2), f"{root}/2")


@pytest.mark.parametrize("store", ["harness", "rank 0"])
def test_a_save_that_is_running_does_without_the_group(processes, tmp_path, store):
    processes.run(WORLD, destroy_group, str(tmp_path), store=store)
    check_stored(tmp_path / "1", 1)
    assert not (tmp_path / "2").exists()


SCRIPT = """
import sys, time
import numpy as np
import torch.distributed as dist
import shardkeep
from shardkeep.stores.local import WriteFile

write_at = WriteFile.write_at

def slowly(self, data, offset):
    time.sleep(0.2)
    return write_at(self, data, offset)

WriteFile.write_at = slowly
dist.init_process_group("gloo")
rank = dist.get_rank()
local = np.full((3, 500), float(rank))
array = shardkeep.ShardedArray.from_local(local, (3 * rank, 0), (6, 500))
assert not shardkeep.async_save({"w": array}, sys.argv[1]).done()
if sys.argv[2] == "destroys":
    dist.destroy_process_group()
if sys.argv[2] == "raises" and rank == 1:
    raise ValueError("of the program")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "destroys", "raises"])
def test_programs_that_end_right_after(tmp_path, how):
    """Launched as by torchrun: every process completes its part of the save."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "a"), how]
    started = [
        subprocess.Popen(command, env={**place, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in started]
    codes = [process.returncode for process in started]
    assert codes == ([0, 1] if how == "raises" else [0, 0]), told
    assert shardkeep.verify(tmp_path / "a").ok


def train_and_save(rank, root, saves):
    import torch
    import torch.distributed as dist

    weight = torch.full((3, 500), float(rank))
    local = ShardedArray.from_local(weight.numpy(), (3 * rank, 0), (3 * WORLD, 500))
    expected = []
    with shardkeep.Checkpointer() as keeper:
        for step in range(saves):
            for _ in range(3):
                gradient = torch.ones(500) * (rank + 1)
                dist.all_reduce(gradient)
                weight += gradient
            expected.append(float(weight[0, 0]))
            keeper.async_save({"w": local, "step": step}, f"{root}/{step}")
            dist.barrier()
    return expected


@pytest.mark.parametrize("saves", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_training_goes_on_meanwhile(processes, tmp_path, saves):
    expected = processes.run(WORLD, train_and_save, str(tmp_path), saves, timeout_s=240)
    for step in range(saves):
        assert shardkeep.verify(tmp_path / str(step)).ok
        with shardkeep.open(tmp_path / str(step)) as found:
            first = [float(found["w"][3 * rank, 0]) for rank in range(WORLD)]
            assert first == [values[step] for values in expected]
            assert found["step"] == step
