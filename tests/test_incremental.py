"""A save that uses files of an earlier checkpoint again, where nothing in them changed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import CancelledError

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import shardkeep
from shardkeep import CorruptionError, ShardedArray, ThreadRanks
from shardkeep.engine.digests import ContentDigests
from shardkeep.formats.native.commit import collect_garbage, read_record
from shardkeep.formats.native.keeping import worth_keeping
from shardkeep.stores.local import LocalStore


def record_of(path):
    return read_record(LocalStore(path))


def kept_bytes(path):
    return sum(row.size for row in record_of(path).files if row.kept)


def assert_holds(path, state):
    """It verifies, and loads bit for bit."""
    report = shardkeep.verify(path)
    assert report.ok, report.problems
    with shardkeep.open(path) as found:
        stored = found.state_dict()
    assert stored.keys() == state.keys()
    for key, value in state.items():
        if isinstance(value, np.ndarray):
            assert stored[key].dtype == value.dtype
            assert stored[key].shape == value.shape
            assert stored[key].tobytes() == value.tobytes()
        else:
            assert stored[key] == value


def some_state(seed=0, count=20, size=40_000):
    rng = np.random.default_rng(seed)
    state = {f"w{number:02d}": rng.standard_normal(size // 4, "f4") for number in range(count)}
    return {**state, "step": 0}


def test_what_did_not_change_is_not_written(tmp_path):
    state = some_state(count=40)
    shardkeep.save(state, tmp_path / "0")
    whole = sum(row.size for row in record_of(tmp_path / "0").files)
    for step in range(1, 11):
        for number in (0, step):
            state[f"w{number:02d}"] += 1
        state["step"] = step
        result = shardkeep.save(state, tmp_path / str(step), base=tmp_path / str(step - 1))
        assert result.stats["bytes"] < 0.06 * whole + 8192
        assert result.stats["kept_bytes"] == 38 * 40_000
        assert result.nbytes == sum(v.nbytes for v in state.values() if hasattr(v, "nbytes"))
        assert_holds(tmp_path / str(step), state)
    shutil.rmtree(tmp_path / "0")
    for step in range(1, 11):
        assert shardkeep.verify(tmp_path / str(step)).ok


def test_files_of_which_little_is_wanted_are_not_kept(tmp_path):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    for number in range(1, 20):
        state[f"w{number:02d}"] += 1
    state["large"] = np.ones(1)  # one in twenty is wanted, and the rest would be as much again
    del state["w19"]
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert kept_bytes(tmp_path / "1") == 0
    assert_holds(tmp_path / "1", state)


@pytest.mark.parametrize(
    ("wanted", "total", "most", "kept"),
    [
        ([90, 10, 50, 0, 1], 1000, 9, [0, 1, 2, 4]),
        ([90, 10, 50, 0, 0], 150, 9, [0, 1, 2]),  # 10, 50 and 90 are not wanted
        ([90, 10, 50, 0, 0], 149, 9, [0, 2]),
        ([90, 10, 50, 0, 0], 60, 9, [0, 2]),
        ([90, 10, 50, 0, 0], 59, 9, [0]),
        ([10, 50, 90, 100, 0], 1000, 2, [2, 3]),
        ([10, 50, 90, 100, 0], 1000, 0, []),
        ([10, 50, 90, 100, 0], 0, 9, [3]),
        ([100, 1, 2, 3, 4], 0, 9, [0]),
    ],
)
def test_which_files_are_worth_keeping(wanted, total, most, kept):
    sizes = np.full(5, 100)
    assert worth_keeping(sizes, np.array(wanted), total, most) == kept


def test_files_of_which_most_is_wanted_are_kept_first():
    sizes, wanted = np.array([4000, 400]), np.array([1000, 200])
    assert worth_keeping(sizes, wanted, 3000, 9) == [1]
    assert worth_keeping(sizes, wanted, 3200, 9) == [0, 1]


def test_every_rank_may_keep_files(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkeep.formats.native.keeping.MOST_FILES", 1)
    whole = np.random.default_rng(0).standard_normal((64, 900))

    def save(path, base):
        def work(coordinator):
            state = sharded_state(coordinator.rank, 2, whole, whole[:, :20])
            return shardkeep.save(state, path, base=base, process_group=coordinator)

        ThreadRanks(2).run(work)

    save(tmp_path / "0", None)
    save(tmp_path / "1", tmp_path / "0")
    assert sum(row.kept for row in record_of(tmp_path / "1").files) == 2


def test_room_and_files_are_bounded_over_many_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("shardkeep.formats.native.keeping.MOST_FILES", 5)
    rng = np.random.default_rng(0)
    state = some_state(count=16, size=12_000)
    total = 16 * 12_000
    shardkeep.save(state, tmp_path / "0")
    for step in range(1, 40):
        for number in rng.choice(16, 2, replace=False).tolist():
            state[f"w{number:02d}"] += 1
        state["step"] = step
        shardkeep.save(state, tmp_path / str(step), base=tmp_path / str(step - 1))
        shutil.rmtree(tmp_path / str(step - 1))
        record = record_of(tmp_path / str(step))
        assert len(record.files) <= 6
        assert sum(row.size for row in record.files) < 2 * total + len(record.files) * 12_288
    assert_holds(tmp_path / "39", state)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["change", "drop", "add", "retype", "reshape", "flip a bit"]),
        st.integers(0, 7),
    ),
    max_size=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    steps=st.lists(CHANGES, min_size=1, max_size=4),
    back=st.integers(1, 2),
    budget=st.sampled_from([None, 8 << 20]),
)
def test_any_changes(tmp_path, steps, back, budget):
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    rng = np.random.default_rng(1)
    state = {f"w{n}": rng.integers(0, 99, (n + 1, 3000), "i4") for n in range(6)}
    state["step"] = 0
    shardkeep.save(state, root / "0")
    states = [dict(state)]
    for step, changes in enumerate(steps, 1):
        for what, number in changes:
            name = f"w{number}"
            if what == "add" and name not in state:
                state[name] = rng.integers(0, 99, (2, 2000), "i4")
            elif name not in state:
                continue
            elif what == "change":
                state[name] = state[name] + 1
            elif what == "drop":
                del state[name]
            elif what == "retype":
                state[name] = state[name].view("u4" if state[name].dtype == "i4" else "i4")
            elif what == "reshape":
                state[name] = state[name].reshape(-1, 1000)
            else:
                state[name] = state[name].copy()
                state[name].reshape(-1).view("u1")[-1] ^= 128
        state["step"] = step
        base = root / str(max(0, step - back))
        shardkeep.save(state, root / str(step), base=base, memory_budget=budget)
        states.append(dict(state))
    for step in range(len(states) - 1, -1, -1):
        assert_holds(root / str(step), states[step])
    for step in range(len(states) - 1):
        shutil.rmtree(root / str(step))
        assert_holds(root / str(len(states) - 1), states[-1])


def zeros(dtype="f4", shape=(128, 128)):
    return np.zeros(shape, dtype)


def by_columns():
    parts = [(zeros(shape=(128, 64)), (0, at)) for at in (0, 64)]
    return ShardedArray.from_shards(parts, (128, 128))


def by_rows(*sizes):
    at = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [(zeros(shape=(size, 128)), (begin, 0)) for size, begin in zip(sizes, at, strict=True)]
    return ShardedArray.from_shards(parts, (128, 128))


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 4),
        ({"a": zeros("i4")}, 3),
        ({"b": zeros("i4")}, 3),
        ({"d": zeros("i4"), "a": None}, 2),
        ({"a": zeros(shape=(64, 256))}, 3),
        ({"b": zeros(shape=(128 * 128,))}, 3),
        ({"d": zeros(shape=(128, 2, 64))}, 3),
        ({"0": zeros(), "e": zeros("i4")}, 4),
        ({"a": None, "x": zeros("i4")}, 3),
        ({"a": None, "b": None, "x": zeros(shape=(64, 256))}, 2),
        ({"s": by_columns()}, 3),
        ({"s": by_rows(32, 96)}, 3),
        ({"s": by_rows(64, 32, 32)}, 3.5),
        ({"s": by_rows(64, 32, 32), "a": zeros("i4"), "e": zeros()}, 2.5),
        ({"s": zeros()}, 3),
    ],
)
def test_equal_bytes_are_kept_only_as_what_they_were(tmp_path, changes, kept):
    """All contents are equal: only names, types, shapes and boxes tell what is in the base."""
    state = {"a": zeros(), "b": zeros(), "d": zeros(), "s": by_rows(64, 64)}
    shardkeep.save(state, tmp_path / "0", no_dist=True)
    state = {key: new for key, new in {**state, **changes}.items() if new is not None}
    done = shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", no_dist=True)
    assert done.stats["kept_bytes"] == kept * 128 * 128 * 4
    whole = {key: zeros() if isinstance(new, ShardedArray) else new for key, new in state.items()}
    assert_holds(tmp_path / "1", whole)


def test_a_tensor_of_another_shape_is_not_compared_with_others(tmp_path):
    """They have its new box, and its bytes, but another type."""
    others = {name: zeros("i4", (64, 256)) for name in "AB"}
    shardkeep.save({**others, "a": zeros()}, tmp_path / "0", no_dist=True)
    state = {**others, "a": zeros(shape=(64, 256))}
    done = shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", no_dist=True)
    assert done.stats["kept_bytes"] == 2 * 128 * 128 * 4
    assert_holds(tmp_path / "1", state)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"step": 1}, {"step": 2}),
        ({"step": 1}, {"step": 2, "w": np.ones(3)}),
        ({"w": np.ones(3)}, {"step": 2}),
        ({"other": np.ones(3)}, {"w": np.ones(3)}),
        ({"w": np.array(3.0), "e": np.zeros((0, 2))}, {"w": np.array(3.0), "e": np.zeros((0, 2))}),
    ],
)
def test_nothing_to_compare(tmp_path, before, after):
    shardkeep.save(before, tmp_path / "0")
    shardkeep.save(after, tmp_path / "1", base=tmp_path / "0")
    assert_holds(tmp_path / "1", after)


def test_torch_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    state = {
        "half": torch.randn(300, 50).to(torch.bfloat16),
        "turned": torch.randn(200, 90).t(),
        "tied": torch.ones(5),
        "flags": torch.rand(999) > 0.5,
        "large": torch.randn(3 << 20),
    }
    state["again"] = state["tied"]
    shardkeep.save(state, tmp_path / "0")
    result = shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert result.stats["bytes"] == 0
    state["large"][-1] += 1
    state["turned"][3, 5] += 1
    shardkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    assert shardkeep.verify(tmp_path / "2").ok
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    shardkeep.load(target, tmp_path / "2")
    assert all(torch.equal(target[key], value) for key, value in state.items())


def test_large_and_strided_chunks_are_compared(tmp_path):
    rng = np.random.default_rng(0)
    large = rng.integers(0, 255, (9 << 20) + 13, "u1")
    strided = rng.standard_normal((600, 700))[::2, ::3]
    odd = rng.integers(0, 2, (999, 2001), "u1").astype(bool)[:, ::2]
    state = {
        "large": large,
        "strided": strided,
        "odd": odd,
        "swapped": np.arange(9000, dtype=">f8"),
    }
    shardkeep.save(state, tmp_path / "0")
    result = shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", memory_budget=8 << 20)
    assert result.stats["bytes"] == 0
    assert_holds(tmp_path / "1", {**state, "swapped": state["swapped"].astype("<f8")})
    large[-1] ^= 1
    shardkeep.save(state, tmp_path / "2", base=tmp_path / "1")
    assert_holds(tmp_path / "2", {**state, "swapped": state["swapped"].astype("<f8")})


def sharded_state(rank, world, frozen, moving):
    rows = len(frozen) // world
    mine = slice(rank * rows, (rank + 1) * rows)
    return {
        "frozen": ShardedArray.from_local(frozen[mine], (rank * rows, 0), frozen.shape),
        "moving": ShardedArray.from_local(moving[mine], (rank * rows, 0), moving.shape),
        "step": int(moving[0, 0]),
    }


@pytest.mark.parametrize("worlds", [(2, 2), (2, 4), (4, 1)])
def test_several_ranks(tmp_path, worlds):
    frozen = np.random.default_rng(0).standard_normal((64, 900))
    moving = np.ones((64, 20))

    def save(path, world, base):
        def work(coordinator):
            state = sharded_state(coordinator.rank, world, frozen, moving)
            return shardkeep.save(state, path, base=base, process_group=coordinator)

        return ThreadRanks(world).run(work)

    save(tmp_path / "0", worlds[0], None)
    moving += 1
    save(tmp_path / "1", worlds[1], tmp_path / "0")
    expected = {"frozen": frozen, "moving": moving, "step": 2}
    assert_holds(tmp_path / "1", expected)
    kept = kept_bytes(tmp_path / "1")
    assert (kept > frozen.nbytes) == (worlds[0] == worlds[1])  # else the boxes are others
    shutil.rmtree(tmp_path / "0")
    assert_holds(tmp_path / "1", expected)


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_in_the_background(tmp_path, writer):
    state = some_state(size=400_000)
    with shardkeep.Checkpointer(writer=writer) as keeper:
        keeper.async_save(state, tmp_path / "0").result()
        for step in range(1, 4):
            state["w00"] = state["w00"] + 1
            state["step"] = step
            handle = keeper.async_save(state, tmp_path / str(step), base=tmp_path / str(step - 1))
            result = handle.result()
            assert result.stats["bytes"] < 500_000
            assert_holds(tmp_path / str(step), state)
    for step in range(3):
        shutil.rmtree(tmp_path / str(step))
    assert_holds(tmp_path / "3", state)


def test_a_snapshot_that_changes_nothing_is_warned_of(tmp_path, caplog):
    state = some_state()
    with shardkeep.Checkpointer() as keeper:
        keeper.async_save(state, tmp_path / "0").result()
        keeper.async_save(state, tmp_path / "1", base=tmp_path / "0").result()
        assert "bit-equal" in caplog.text
        caplog.clear()
        state["w00"] += 1
        keeper.async_save(state, tmp_path / "2", base=tmp_path / "1").result()
        assert "bit-equal" not in caplog.text


def test_the_same_beside_one_base_is_warned_of(tmp_path, caplog):
    state = some_state()
    with shardkeep.Checkpointer() as keeper:

        def save(step):
            caplog.clear()
            keeper.async_save(state, tmp_path / str(step), base=tmp_path / "0").result()
            return "bit-equal" in caplog.text

        keeper.async_save(state, tmp_path / "0").result()
        state["w00"] += 1
        assert [save(1), save(2)] == [False, True]
        state["w00"] -= 1
        state["w01"] += 1
        assert [save(3), save(4)] == [False, True]
        state["w00"], state["w01"] = state["w01"], state["w00"]
        assert not save(5)


def test_a_cancelled_one_on_several_ranks(tmp_path):
    frozen, moving = np.random.default_rng(0).standard_normal((64, 9000)), np.ones((64, 20))

    def work(coordinator):
        state = sharded_state(coordinator.rank, 2, frozen, moving)
        with shardkeep.Checkpointer(process_group=coordinator) as keeper:
            keeper.save(state, tmp_path / "0")
            handle = keeper.async_save(state, tmp_path / "1", base=tmp_path / "0")
            if coordinator.rank == 0:
                handle.cancel()
            try:
                handle.result()
            except CancelledError:
                return "cancelled"
            return "saved"

    assert ThreadRanks(2).run(work) in (["cancelled"] * 2, ["saved"] * 2)


def test_another_directory_meanwhile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = some_state()
    with shardkeep.Checkpointer() as keeper:
        keeper.save(state, "0")
        real = shardkeep.NativeWriter.compare_data

        def compare_elsewhere(self, plan, planner):
            (tmp_path / "elsewhere").mkdir()
            monkeypatch.chdir(tmp_path / "elsewhere")
            return real(self, plan, planner)

        monkeypatch.setattr(shardkeep.NativeWriter, "compare_data", compare_elsewhere)
        handle = keeper.async_save(state, tmp_path / "1", base="0")
        assert handle.result().stats["kept_bytes"] > 0


def test_saves_of_equal_changes_on_different_bases_are_not_called_equal(tmp_path, caplog):
    one, two = np.ones(9000), np.full(9000, 2.0)
    shardkeep.save({"x": one, "y": one}, tmp_path / "a")
    shardkeep.save({"x": one, "y": two}, tmp_path / "z")
    with shardkeep.Checkpointer() as keeper:
        keeper.async_save({"x": two, "y": one}, tmp_path / "b", base=tmp_path / "a").result()
        keeper.async_save({"x": two, "y": two}, tmp_path / "c", base=tmp_path / "z").result()
    assert "bit-equal" not in caplog.text


def test_the_newest_comes_last_by_name(tmp_path):
    state = {"x": np.ones(9000), "y": np.ones(9000), "z": np.ones(9000)}
    shardkeep.save(state, tmp_path / "0")
    for step, name in ((1, "x"), (2, "z")):
        state[name] = state[name] + 1
        shardkeep.save(state, tmp_path / str(step), base=tmp_path / str(step - 1))
    merged = {}
    for path in sorted((tmp_path / "2" / "data").glob("*.safetensors")):
        if "index" not in path.name:
            merged |= load_file(path)
    assert all(np.array_equal(merged[name], state[name]) for name in state)


# --- a base that is of no use


def test_no_base(tmp_path, caplog):
    state = some_state()
    with caplog.at_level(logging.WARNING, "shardkeep"):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert "cannot be compared with" in caplog.text
    assert_holds(tmp_path / "1", state)


def test_a_base_that_is_digested_otherwise(tmp_path):
    state = some_state()
    base = tmp_path / "0"
    shardkeep.save(state, base, storage_writer=shardkeep.NativeWriter(base, block=4096))
    shardkeep.save(state, tmp_path / "1", base=base)
    assert kept_bytes(tmp_path / "1") == 0
    assert_holds(tmp_path / "1", state)


def test_a_base_whose_index_is_damaged(tmp_path):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    with open(tmp_path / "0" / record_of(tmp_path / "0").index.name, "r+b") as file:
        file.seek(5000)
        file.write(b"damaged")
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert_holds(tmp_path / "1", state)


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_files_that_cannot_be_linked(tmp_path, monkeypatch, number):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")

    def refuse(self, other, old, new):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalStore, "link_from", refuse)
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert kept_bytes(tmp_path / "1") == 0
    assert_holds(tmp_path / "1", state)


def test_a_file_that_is_linked_though_the_server_says_no(tmp_path, monkeypatch):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    real = LocalStore.link_from

    def link(self, other, old, new):
        real(self, other, old, new)
        raise OSError(errno.EIO, "no answer")

    monkeypatch.setattr(LocalStore, "link_from", link)
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert not [name for name in os.listdir(tmp_path / "1" / "data") if "-k" in name]
    assert_holds(tmp_path / "1", state)
    assert_holds(tmp_path / "0", state)


@pytest.mark.parametrize("gone", [False, True])
def test_a_base_that_is_replaced_meanwhile(tmp_path, monkeypatch, gone):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    real = shardkeep.NativeWriter.share_data

    def share_late(self, told, metadata):
        monkeypatch.undo()
        if gone:
            shutil.rmtree(tmp_path / "0")
        else:
            other = {key: value * 2 for key, value in state.items()}
            shardkeep.save(other, tmp_path / "0", overwrite=True)
        return real(self, told, metadata)

    monkeypatch.setattr(shardkeep.NativeWriter, "share_data", share_late)
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert kept_bytes(tmp_path / "1") == 0
    assert_holds(tmp_path / "1", state)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_base_file_of_another_size_is_not_kept(tmp_path, monkeypatch, more, caplog):
    """The commit would look for its size for a minute, and blame the file system."""
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    (row,) = record_of(tmp_path / "0").files
    real = shardkeep.NativeWriter.share_data

    def share_late(self, told, metadata):
        os.truncate(tmp_path / "0" / row.name, row.size + more)
        return real(self, told, metadata)

    monkeypatch.setattr(shardkeep.NativeWriter, "share_data", share_late)
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert kept_bytes(tmp_path / "1") == 0
    assert f"{row.size + more} bytes, expected {row.size}" in caplog.text
    assert_holds(tmp_path / "1", state)


def test_other_storages_refuse_a_base(tmp_path):
    class Other(shardkeep.StorageWriter):
        def __getattr__(self, name):
            raise AssertionError(name)

    Other.__abstractmethods__ = frozenset()
    Other.reset = lambda self, checkpoint_id=None: None
    with pytest.raises(ValueError, match="base"):
        shardkeep.save({"a": 1}, tmp_path / "1", storage_writer=Other(), base=tmp_path / "0")


# --- nothing is lost


def test_what_is_kept_is_synced(tmp_path, monkeypatch):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    synced = []
    real = LocalStore.sync_file

    def sync(self, name):
        synced.append((self.root.name, name))
        return real(self, name)

    linked, link = [], LocalStore.link_from

    def link_from(self, other, old, new):
        linked.append((other.root.name, old))
        assert linked[-1] in synced
        link(self, other, old, new)

    monkeypatch.setattr(LocalStore, "sync_file", sync)
    monkeypatch.setattr(LocalStore, "link_from", link_from)
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "copy")
    assert len(linked) == sum(row.kept for row in record_of(tmp_path / "1").files) > 0
    assert synced == [("copy", row.name) for row in record_of(tmp_path / "copy").files]
    # A file that took the name of the one that was synced is synced by its new name.
    synced.clear()
    monkeypatch.setattr(LocalStore, "identify", lambda self, name: (0, 0))
    shardkeep.save(state, tmp_path / "3", base=tmp_path / "copy")
    kept = [row.name for row in record_of(tmp_path / "3").files if row.kept]
    assert [name for where, name in synced if where == "3"] == kept

    def fail(self, name):
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(LocalStore, "sync_file", fail)
    shardkeep.save(state, tmp_path / "2", base=tmp_path / "copy")
    assert kept_bytes(tmp_path / "2") == 0
    assert_holds(tmp_path / "2", state)
    assert not [name for name in os.listdir(tmp_path / "2" / "data") if "-k" in name]


def test_content_digests_that_lie_are_found(tmp_path, monkeypatch):
    real = ContentDigests.results
    monkeypatch.setattr(ContentDigests, "results", lambda self: real(self) ^ np.uint8(1))
    shardkeep.save(some_state(), tmp_path / "0")
    monkeypatch.undo()
    (problem,) = shardkeep.verify(tmp_path / "0").problems
    assert "content digests" in problem.text
    assert "w07" in problem.names


def test_damage_in_a_kept_file_is_found_and_named(tmp_path):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    state["w00"] += 1
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    (kept,) = [row for row in record_of(tmp_path / "1").files if row.kept]
    data = bytearray((tmp_path / "1" / kept.name).read_bytes())
    at = data.index(state["w07"].tobytes())
    data[at + 100] ^= 1
    (tmp_path / "1" / kept.name).write_bytes(data)
    with pytest.raises(CorruptionError, match="w07"), shardkeep.open(tmp_path / "1") as found:
        found.state_dict()
    assert not shardkeep.verify(tmp_path / "1").ok


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    before = os.listdir(tmp_path / "0" / "data")

    def fail(self, plan, planner):
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(shardkeep.NativeWriter, "write_data", fail)
    with pytest.raises(OSError, match="no more"):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert os.listdir(tmp_path / "1" / "data") == []
    assert os.listdir(tmp_path / "0" / "data") == before
    assert_holds(tmp_path / "0", state)


@pytest.mark.parametrize("step", ["identify", "sync_file"])
def test_an_interrupted_one_leaves_nothing(tmp_path, monkeypatch, step):
    state = some_state()
    shardkeep.save(state, tmp_path / "0")
    real = getattr(LocalStore, step)

    def interrupt(self, name):
        if self.root.name == "1":
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(LocalStore, "identify", lambda self, name: (0, 0))
    monkeypatch.setattr(LocalStore, step, interrupt)
    with pytest.raises(KeyboardInterrupt):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert os.listdir(tmp_path / "1" / "data") == []


KILLED = """
    import os, sys
    import numpy as np
    import shardkeep

    root, = sys.argv[1:]
    state = {"w": np.arange(100_000), "step": 1}
    shardkeep.NativeWriter.write_data = lambda self, plan, planner: os.kill(os.getpid(), 9)
    shardkeep.save(state, root + "/1", base=root + "/0")
"""


def test_what_a_killed_save_linked_is_collected(tmp_path):
    state = {"w": np.arange(100_000), "step": 0}
    shardkeep.save(state, tmp_path / "0")
    subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], check=False)
    linked = [name for name in os.listdir(tmp_path / "1" / "data") if "-k" in name]
    assert len(linked) == 1
    kept = collect_garbage(LocalStore(tmp_path / "1"))
    assert kept.removed == ()  # it may be alive
    collect_garbage(LocalStore(tmp_path / "1"), stale_s=0)
    assert os.listdir(tmp_path / "1" / "data") == []
    assert_holds(tmp_path / "0", state)
    shardkeep.save({**state, "step": 1}, tmp_path / "1", base=tmp_path / "0")
    assert_holds(tmp_path / "1", {**state, "step": 1})
