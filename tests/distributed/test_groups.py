"""Groups of real processes: save on some, load on others, beside what the user does with them."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import shardkeep
from shardkeep import PlanError, ShardedArray

SIZES = [1, 2, 3, 4]
ROWS = 11
"""Divided by none of the sizes."""


def rows(rank, world):
    """Which rows a rank holds; the last may hold fewer."""
    each = -(-ROWS // world)
    return min(rank * each, ROWS), min((rank + 1) * each, ROWS)


def whole(value):
    return np.arange(ROWS * 6, dtype=np.float64).reshape(ROWS, 6) + value


def state(rank, world, value):
    import torch

    low, high = rows(rank, world)
    return {
        "model": {
            "w": ShardedArray.from_local(whole(value)[low:high].copy(), (low, 0), (ROWS, 6)),
            "replicated": torch.full((300,), float(value), dtype=torch.bfloat16),
        },
        "step": value,
    }


def check_state(got, rank, world, value):
    import torch

    low, high = rows(rank, world)
    for shard in got["model"]["w"].local_shards:
        assert np.array_equal(shard.array, whole(value)[low:high])
    assert torch.equal(
        got["model"]["replicated"], torch.full((300,), float(value), dtype=torch.bfloat16)
    )
    assert got["step"] == value


# --- any number to any number


def save_one(rank, where, world):
    result = shardkeep.save(state(rank, world, 7), where)
    return result.digest, result.save_id


def load_each(rank, root, world):
    for saved in SIZES:
        target = state(rank, world, 0)
        shardkeep.load(target, f"{root}/{saved}")
        check_state(target, rank, world, 7)


def test_from_any_number_of_processes_to_any(processes, tmp_path):
    for world in SIZES:
        results = processes.run(world, save_one, str(tmp_path / str(world)), world)
        assert len(set(results)) == 1
        assert shardkeep.verify(tmp_path / str(world)).ok
        with shardkeep.open(tmp_path / str(world)) as ckpt:
            assert np.array_equal(ckpt["model.w"][...], whole(7))
            assert ckpt.digest == results[0][0]
    for world in SIZES:
        processes.run(world, load_each, str(tmp_path), world)


# --- groups


def no_threads(prefix):
    """Whether threads that were told to end have ended."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not any(thread.name.startswith(prefix) for thread in threading.enumerate()):
            return True
        time.sleep(0.01)
    return False


def reuse(rank, root):
    from shardkeep import groups

    shardkeep.save(state(rank, 4, 1), f"{root}/1")
    first = groups.coordinator_for()
    bulk = first._bulk
    assert bulk is not None
    shardkeep.save(state(rank, 4, 2), f"{root}/2")
    target = state(rank, 4, 0)
    shardkeep.load(target, f"{root}/2")
    check_state(target, rank, 4, 2)
    assert groups.coordinator_for() is first
    assert first._bulk is bulk
    assert no_threads("shardkeep-heart")


def test_the_next_save_uses_the_same_group(processes, tmp_path):
    processes.run(4, reuse, str(tmp_path))


def keys_left(rank, root):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_default_store()
    counts = []
    for number in range(6):
        shardkeep.save(state(rank, 2, number), f"{root}/{number}")
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    shardkeep.flush()
    dist.barrier()
    return counts, store.num_keys()


def test_keys_do_not_pile_up_in_the_store(processes, tmp_path):
    for counts, _ in processes.run(2, keys_left, str(tmp_path)):
        # gloo's own barriers may leave a few; a call of ours makes more than ten.
        assert counts[-1] - counts[2] < 10


def some_ranks(rank, root, members):
    """Only some ranks save, in a group of theirs; then the user makes groups of all kinds."""
    import torch
    import torch.distributed as dist

    group = dist.new_group(members)
    dist.new_group([other for other in range(4) if other not in members])
    if rank in members:
        place = members.index(rank)
        shardkeep.save(state(place, len(members), 5), f"{root}/some", process_group=group)
        target = state(place, len(members), 0)
        shardkeep.load(target, f"{root}/some", process_group=group)
        check_state(target, place, len(members), 5)
        with pytest.raises(shardkeep.CheckpointExistsError):
            # An error of some ranks does not reach others, nor end the group.
            shardkeep.save(state(place, len(members), 5), f"{root}/some", process_group=group)
        shardkeep.save(state(place, len(members), 6), f"{root}/more", process_group=group)
    for local in (False, True):
        other = dist.new_group([0, 1, 2, 3], use_local_synchronization=local)
        total = torch.ones(1)
        dist.all_reduce(total, group=other)
        assert int(total) == 4
    # Now ranks are in different numbers of groups, which breaks torch's own local groups; not ours.
    if rank in (0, 1):
        dist.new_group([0, 1], use_local_synchronization=True)
    shardkeep.save(state(rank, 4, 8), f"{root}/all")
    target = state(rank, 4, 0)
    shardkeep.load(target, f"{root}/all")
    check_state(target, rank, 4, 8)


@pytest.mark.parametrize("members", [[0, 1], [1, 3], [2, 3], [0, 1, 2]])
def test_a_group_of_some_ranks_disturbs_nobody(processes, tmp_path, members):
    processes.run(4, some_ranks, str(tmp_path), members)
    with shardkeep.open(tmp_path / "more") as ckpt:
        assert np.array_equal(ckpt["model.w"][...], whole(6))


def not_a_member(rank, root):
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    if rank > 1:
        with pytest.raises((TypeError, shardkeep.RankError)):
            shardkeep.save({"a": 1}, root, process_group=group)
    else:
        shardkeep.save({"a": 1}, root, process_group=group)


def test_a_process_that_is_not_in_the_group_is_refused(processes, tmp_path):
    processes.run(3, not_a_member, str(tmp_path))


def mesh(rank, root):
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(TypeError, match="2 dimensions"):
        shardkeep.save({"a": 1}, root, process_group=grid)
    if grid.get_local_rank("replicate") == 0:
        place = grid.get_local_rank("shard")
        shardkeep.save(state(place, 2, 4), f"{root}/c", process_group=grid["shard"])
    target = state(rank, 4, 0)
    import torch.distributed as dist

    dist.barrier()
    shardkeep.load(target, f"{root}/c")
    check_state(target, rank, 4, 4)


def test_one_replica_of_a_mesh_saves_alone(processes, tmp_path):
    processes.run(4, mesh, str(tmp_path))


# --- beside the user's own work


def busy(rank, root, saves):
    """The user reduces on groups of their own, in threads, while we save."""
    import torch
    import torch.distributed as dist

    mine = dist.new_group([0, 1, 2, 3])
    pair = dist.new_group([0, 1]), dist.new_group([2, 3])
    stop = torch.zeros(1)
    rounds = [0, 0]
    done = threading.Event()

    def reduce(number, group, size):
        while True:
            flag = torch.tensor([1.0 if done.is_set() else 0.0])
            dist.all_reduce(flag, group=group)
            rounds[number] += 1
            if int(flag) == size:
                return

    threads = [
        threading.Thread(target=reduce, args=(0, mine, 4)),
        threading.Thread(target=reduce, args=(1, pair[rank // 2], 2)),
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(saves):
            shardkeep.save(state(rank, 4, number), f"{root}/c", overwrite=True)
    finally:
        done.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    again = dist.new_group([0, 1, 2, 3])
    dist.all_reduce(stop, group=again)
    dist.all_reduce(stop)
    target = state(rank, 4, 0)
    shardkeep.load(target, f"{root}/c")
    check_state(target, rank, 4, saves - 1)
    return rounds


def test_fifty_saves_beside_collectives_of_the_user(processes, tmp_path):
    for rounds in processes.run(4, busy, str(tmp_path), 50, timeout_s=120):
        assert min(rounds) > 50
    assert shardkeep.verify(tmp_path / "c").ok


# --- the end of a group


def flushed(rank, root, world):
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_default_store()
    shardkeep.save(state(rank, world, 1), f"{root}/1")
    shardkeep.flush()
    assert no_threads("shardkeep")
    shardkeep.save(state(rank, world, 2), f"{root}/2")
    shardkeep.flush()
    shardkeep.flush()
    dist.destroy_process_group()
    # The same store again, as in a program that starts over: nothing old is taken for new.
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    shardkeep.save(state(rank, world, 3), f"{root}/3")
    target = state(rank, world, 0)
    shardkeep.load(target, f"{root}/3")
    check_state(target, rank, world, 3)


def test_flush_before_the_group_is_destroyed(processes, tmp_path):
    processes.run(3, flushed, str(tmp_path), 3)


def forgotten(rank, root):
    import os

    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    store = c10d._get_default_store()
    group = dist.group.WORLD
    keeper = shardkeep.Checkpointer()
    keeper.save(state(rank, 2, 1), f"{root}/1")
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(PlanError, match=r"flush\(\) on every rank"):
        keeper.save(state(rank, 2, 1), f"{root}/2")
    with pytest.raises(PlanError, match=r"flush\(\) on every rank"):
        shardkeep.save(state(rank, 2, 1), f"{root}/2", process_group=group)
    del os.environ["WORLD_SIZE"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    shardkeep.save(state(rank, 2, 3), f"{root}/3")
    dist.barrier()
    dist.destroy_process_group()
    with pytest.raises(PlanError, match=r"flush\(\) on every rank"):
        shardkeep.save(state(rank, 2, 1), f"{root}/2")
    shardkeep.save({"a": 1}, f"{root}/alone-{rank}", no_dist=True)


def test_a_group_destroyed_without_flush_is_an_error_that_says_so(processes, tmp_path):
    processes.run(2, forgotten, str(tmp_path))


def alone(rank, root):
    import os

    os.environ["WORLD_SIZE"] = "2"
    with pytest.raises(PlanError, match="WORLD_SIZE=2"):
        shardkeep.save({"a": 1}, f"{root}/{rank}")


def test_launched_as_two_and_found_as_one(processes, tmp_path):
    processes.run(2, alone, str(tmp_path), init=False)


def own_timeout(rank, root):
    import os

    from shardkeep import groups

    os.environ["SHARDKEEP_TIMEOUT_S"] = "123"
    assert groups.coordinator_for().timeout_s == 123
    assert groups.coordinator_for(timeout_s=5).timeout_s == 5
    assert groups.coordinator_for().timeout_s == 123
    os.environ["SHARDKEEP_TIMEOUT_S"] = "soon"
    with pytest.raises(ValueError, match="SHARDKEEP_TIMEOUT_S"):
        groups.coordinator_for()


def test_timeouts_come_from_the_call_or_the_environment(processes, tmp_path):
    processes.run(2, own_timeout, str(tmp_path))


def unequal(rank):
    """Bytes of unequal sizes, empty ones among them, in both directions."""
    from shardkeep.adapters.torch_groups import TorchRanks

    ranks = TorchRanks()
    sizes = [0, 1, 1 << 20, 12_345_678]
    got = []

    def join(told):
        got.extend(told)
        return [bytes([n]) * sizes[3 - n] for n in range(4)]

    for _ in range(3):
        got.clear()
        back = ranks.gather_scatter("x", lambda: bytes([rank]) * sizes[rank], join)
        assert back == bytes([rank]) * sizes[3 - rank]
        if rank == 0:
            assert [len(part) for part in got] == sizes
            assert all(set(part) <= {n} for n, part in enumerate(got))
        for word in (b"", b"word", b"w" * 3_000_000):
            assert ranks.lead("y", lambda word=word: word) == word
    ranks.close()


def test_bytes_of_unequal_sizes(processes):
    processes.run(4, unequal)


# --- the harness itself


def misbehave(rank, how):
    import time

    if rank == 1 and how == "hang":
        time.sleep(60)
    if rank == 1 and how == "raise":
        raise ValueError("seen by the parent")
    return rank


def test_the_harness_kills_what_hangs_and_shows_where(processes):
    outcomes = processes.outcomes(2, misbehave, "hang", timeout_s=1.0, init=False)
    assert outcomes[0].ok
    assert outcomes[1].hung
    assert "misbehave" in outcomes[1].log
    outcomes = processes.outcomes(2, misbehave, "raise", init=False)
    assert str(outcomes[1].error) == "seen by the parent"
    assert processes.run(3, misbehave, "", init=False) == [0, 1, 2]


def look_up(rank, path, seconds):
    path.write_text(str(os.getpid()))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.01)
    return rank


def test_ranks_that_were_stopped_with_their_server_have_not_hung(processes, tmp_path):
    """As when a machine sleeps: nobody has seen that time pass."""
    processes.run(1, look_up, tmp_path / "first", 0.0, init=False)  # there is a server then
    path, server = tmp_path / "pid", processes._process.pid

    def stop():
        for _ in range(1000):
            if path.exists() and path.read_text():
                break
            time.sleep(0.01)
        rank = int(path.read_text())
        for pid in (server, rank):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        for pid in (rank, server):
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    (outcome,) = processes.outcomes(1, look_up, path, 0.5, init=False, timeout_s=1.0)
    thread.join()
    assert outcome.ok, outcome


class Collective:
    """Like FSDP1's: to give and take its state, all ranks must do so."""

    def state_dict(self):
        import torch.distributed as dist

        dist.barrier()
        return {"a": 1}

    def load_state_dict(self, state):
        import torch.distributed as dist

        dist.barrier()


class Faulty:
    def __init__(self, fails):
        self.fails = fails

    def state_dict(self):
        if self.fails == "give":
            raise RuntimeError("this rank cannot")
        return {"b": 2}

    def load_state_dict(self, state):
        if self.fails == "take":
            raise RuntimeError("this rank cannot")


def meet_in_an_object(rank, path):
    def state(fails=None):
        return {"first": Faulty(fails if rank == 1 else None), "second": Collective()}

    shardkeep.save(state(), path)
    for call in (
        lambda: shardkeep.save(state("give"), path / "again"),
        lambda: shardkeep.load(state("give"), path),
        lambda: shardkeep.load(state("take"), path),
    ):
        with pytest.raises(shardkeep.CheckpointError, match="this rank cannot"):
            call()
    shardkeep.load(state(), path)


def test_an_object_that_fails_on_one_rank_does_not_leave_others_in_the_next(processes, tmp_path):
    processes.run(3, meet_in_an_object, tmp_path, timeout_s=30)
