"""What is sure to have changed is written while the rest is compared; whatever that finds."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import CheckpointError, NativeWriter, ShardedArray, StorageError, ThreadRanks
from shardkeep.coordination import SingleProcess
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.engine import parallel
from shardkeep.engine.contents import digest_memory
from shardkeep.engine.digests import DigestLayout, algorithm
from shardkeep.formats.native import early, same
from shardkeep.formats.native.files import FileWriter
from shardkeep.formats.native.layout import Limits
from shardkeep.formats.native.reader import NativeReader
from shardkeep.planner import SavePlanner
from shardkeep.stores.local import LocalStore, WriteFile
from test_incremental import assert_holds, kept_bytes, record_of

BLOCK = 128 << 10
MIB = 1 << 20


@pytest.fixture
def eager(monkeypatch):
    """Also what is small is written early."""
    monkeypatch.setattr(early, "LARGE", BLOCK)
    monkeypatch.setattr(early, "ENOUGH", 1)


def new_files(path):
    return sorted(row.name.split("-", 1)[1] for row in record_of(path).files if not row.kept)


def large_state(count=8):
    rng = np.random.default_rng(0)
    state = {f"w{n}": rng.integers(0, 255, 4 * MIB, np.uint8) for n in range(count)}
    return {**state, "small": np.arange(50.0), "other": np.ones(7), "step": 0}


def test_what_changed_throughout_and_what_changed_a_little(tmp_path):
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    for step in range(1, 4):
        for number in range(5):
            state[f"w{number}"] += 1
        state["w5"][0] += 1  # in none of the blocks that are looked at
        state["small"] += 1
        state["step"] = step
        done = shardkeep.save(state, tmp_path / str(step), base=tmp_path / str(step - 1))
        assert new_files(tmp_path / str(step)) == ["r00000-0.safetensors", "r00000-1.safetensors"]
        assert done.stats["kept_bytes"] == 2 * 4 * MIB + 7 * 8
        assert done.stats["files"] == 2
        assert done.stats["written_files"] == 2
        assert 6 * 4 * MIB < done.stats["bytes"] < 6 * 4 * MIB + 64_000
        assert_holds(tmp_path / str(step), state)
    for step in range(3):
        shutil.rmtree(tmp_path / str(step))
    assert_holds(tmp_path / "3", state)
    # And is a base like any other.
    done = shardkeep.save(state, tmp_path / "4", base=tmp_path / "3")
    assert done.stats["kept_bytes"] == done.nbytes


def test_small_tensors_that_changed_are_written_early_too(tmp_path, monkeypatch):
    """They are compared first, and once: nothing but values is left to be written after."""
    asked = []
    monkeypatch.setattr(early, "ENOUGH", MIB)
    rng = np.random.default_rng(0)
    state = {f"s{n}": rng.integers(0, 255, 64 << 10, np.uint8) for n in range(40)}
    state |= {"large": rng.integers(0, 255, 8 * MIB, np.uint8), "step": 0}
    shardkeep.save(state, tmp_path / "0")
    for number in range(20):
        state[f"s{number}"] += 1
    state["step"] = 1

    def compare(chunks, *rest, **options):
        asked.extend(chunks.tolist())
        return digest_memory(chunks, *rest, **options)

    monkeypatch.setattr(same, "digest_memory", compare)
    done = shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert sorted(asked) == sorted(a.ctypes.data for a in state.values() if a is not state["step"])
    sizes = {row.name.split("-", 1)[1]: row.size for row in record_of(tmp_path / "1").files}
    assert sizes["r00000-0.safetensors"] > 20 * (64 << 10) > sizes["r00000-1.safetensors"]
    assert done.stats["kept_bytes"] == 20 * (64 << 10) + 8 * MIB
    assert_holds(tmp_path / "1", state)


@pytest.mark.parametrize(
    ("changed", "options"), [(3, {}), (5, {"memory_budget": 8 << 20})], ids=["few", "no room"]
)
def test_where_it_is_not_worth_it(tmp_path, changed, options):
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    for number in range(changed):
        state[f"w{number}"] += 1
    shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", **options)
    assert new_files(tmp_path / "1") == ["r00000-0.safetensors"]
    assert_holds(tmp_path / "1", state)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 40)), max_size=5),
        min_size=1,
        max_size=3,
    )
)
def test_any_places(tmp_path, eager, steps):
    """-1 is all of a tensor, and any other number one byte in it."""
    root = tmp_path / "run"
    shutil.rmtree(root, ignore_errors=True)
    rng = np.random.default_rng(2)
    sizes = [BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 17, 5 * BLOCK]
    state = {f"w{n}": rng.integers(0, 255, size, np.uint8) for n, size in enumerate(sizes)}
    shardkeep.save(state, root / "0")
    for step, changes in enumerate(steps, 1):
        state = {name: array.copy() for name, array in state.items()}
        for number, place in changes:
            array = state[f"w{number}"]
            array[... if place < 0 else place * len(array) // 41] ^= 1
        shardkeep.save(state, root / str(step), base=root / str(step - 1))
        assert_holds(root / str(step), state)


@pytest.mark.parametrize("world", [2, 3])
def test_several_ranks(tmp_path, eager, world):
    frozen, moving = np.zeros((6, MIB // 4), "f4"), np.ones((6, MIB // 4), "f4")
    few = np.arange(6.0)

    def save(path, base):
        def work(coordinator):
            rank, rows = coordinator.rank, 6 // world
            mine = slice(rank * rows, (rank + 1) * rows)

            def part(array):
                return ShardedArray.from_local(array[mine], (rank * rows, 0), array.shape)

            state = {"frozen": part(frozen), "moving": part(moving), "few": few, "step": 1}
            return shardkeep.save(state, path, base=base, process_group=coordinator)

        return ThreadRanks(world).run(work)

    save(tmp_path / "0", None)
    for step in (1, 2):
        moving[: 6 - step] += 1  # of the last rank, not all
        few += 1
        save(tmp_path / str(step), tmp_path / str(step - 1))
        expected = {"frozen": frozen, "moving": moving, "few": few, "step": 1}
        assert_holds(tmp_path / str(step), expected)
        assert kept_bytes(tmp_path / str(step)) > frozen.nbytes
        assert f"r{world - 2:05}-0.safetensors" in new_files(tmp_path / str(step))
    shutil.rmtree(tmp_path / "0")
    assert_holds(tmp_path / "1", {**expected, "few": few - 1, "moving": moving_before(moving)})


def test_every_rank_writes_early(tmp_path, eager):
    moving = {f"m{rank}": np.full(2 * MIB, rank, np.uint8) for rank in range(3)}
    frozen = {f"f{rank}": np.zeros(2 * MIB, np.uint8) for rank in range(3)}

    def save(path, base):
        def work(coordinator):
            mine = {f"{what}{coordinator.rank}" for what in "mf"}
            state = {name: array for name, array in (moving | frozen).items() if name in mine}
            return shardkeep.save({**state, "step": 1}, path, base=base, process_group=coordinator)

        return ThreadRanks(3).run(work)

    save(tmp_path / "0", None)
    for array in moving.values():
        array += 100
    save(tmp_path / "1", tmp_path / "0")
    # And a file for the value, which is numbered after what its rank wrote early.
    assert len(new_files(tmp_path / "1")) == 4
    assert {f"r0000{rank}-0.safetensors" for rank in range(3)} < set(new_files(tmp_path / "1"))
    assert_holds(tmp_path / "1", {**moving, **frozen, "step": 1})


def moving_before(moving):
    before = moving.copy()
    before[:4] -= 1
    return before


def test_a_file_that_cannot_be_written_early_fails_the_save(tmp_path, eager, monkeypatch):
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    state["w1"] += 1
    write = FileWriter.write

    def fail(self, name, *args, **options):
        if "-r00000-0" in name:
            raise StorageError("No space left on device")
        return write(self, name, *args, **options)

    monkeypatch.setattr(FileWriter, "write", fail)
    with pytest.raises(StorageError, match="No space"):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert os.listdir(tmp_path / "1" / "data") == []
    monkeypatch.undo()
    assert_holds(tmp_path / "0", {**state, "w1": state["w1"] - 1})


def test_a_base_whose_digests_are_damaged_is_not_used(tmp_path, eager, caplog):
    """Found while the rest is digested already: none of it is kept then."""
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    row = record_of(tmp_path / "0").files[0]
    place, _ = DigestLayout(row.payload, BLOCK, 16).page_range(0)
    with open(tmp_path / "0" / row.name, "r+b") as file:
        file.seek(place)
        file.write(bytes(16))
    state["w1"] += 1
    done = shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert done.stats["kept_bytes"] == 0
    assert "page 0 of its digests is damaged" in caplog.text
    assert_holds(tmp_path / "1", state)


def test_nothing_is_left_of_what_was_written_early(tmp_path, eager, monkeypatch):
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    state["w1"] += 1

    def fail(self, plan, planner):
        assert any("-r00000-0" in name for name in os.listdir(tmp_path / "1" / "data"))
        raise OSError(errno.EIO, "no more")

    monkeypatch.setattr(shardkeep.NativeWriter, "write_data", fail)
    with pytest.raises(OSError, match="no more"):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0")
    assert os.listdir(tmp_path / "1" / "data") == []
    assert not [t for t in threading.enumerate() if t.name == "shardkeep-behind"]


def test_a_file_that_is_begun_late_goes_too_if_comparing_fails(tmp_path, eager):
    """Whoever gives up waits for what is written early: its name is known only then."""
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    state["w1"] += 1
    begun, failed = threading.Event(), threading.Event()
    written, told = [], []

    class Late(LocalStore):
        def create(self, name):
            if "-r00000-0" in name:
                begun.set()
                assert failed.wait(60)
                time.sleep(0.3)
                written.append(name)
            return super().create(name)

    def fail(nbytes):
        told.append(nbytes)
        if len(told) > 1 and not failed.is_set():  # what is small is compared before
            assert begun.wait(60)
            failed.set()
            raise RuntimeError("no more")

    writer = NativeWriter(open_store=Late, progress=fail)
    with pytest.raises(RuntimeError, match="no more"):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", storage_writer=writer)
    for thread in threading.enumerate():
        if thread.name == "shardkeep-behind":
            thread.join(60)
    assert written
    assert os.listdir(tmp_path / "1" / "data") == []


def test_what_is_written_early_ends_with_the_save(tmp_path, eager, monkeypatch):
    """Also where a disk takes longer than anybody waits: no other file is begun then."""
    state = large_state()
    shardkeep.save(state, tmp_path / "0")
    for number in range(6):
        state[f"w{number}"] += 1
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(parallel, "GRACE_S", 0.1)
    created, told = [], []

    class Slow(LocalStore):
        def create(self, name):
            created.append(name)
            return super().create(name)

    def write(self, data, offset):
        if "-r00000-0" in self.path.name:
            begun.set()
            assert ended.wait(60)
        return real(self, data, offset)

    def interrupt(nbytes):
        told.append(nbytes)
        if len(told) > 1 and not ended.is_set():  # what is small is compared before
            assert begun.wait(60)
            raise KeyboardInterrupt

    real = WriteFile.write_at
    monkeypatch.setattr(WriteFile, "write_at", write)
    limits = Limits(payload=8 * MIB, least=8 * MIB)
    writer = NativeWriter(open_store=Slow, limits=limits, progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", storage_writer=writer)
    before = len(created)
    ended.set()
    for thread in threading.enumerate():
        if thread.name == "shardkeep-behind":
            thread.join(60)
    assert len(created) == before
    assert os.listdir(tmp_path / "1" / "data") == []


def test_a_save_that_is_to_stop_while_it_compares_stops(tmp_path):
    """What stops it says nothing of the base."""
    state = large_state()
    shardkeep.save(state, tmp_path / "0")

    def stop(nbytes):
        raise CheckpointError("another rank failed")

    writer = NativeWriter(progress=stop)
    with pytest.raises(CheckpointError, match="another rank failed") as caught:
        shardkeep.save(state, tmp_path / "1", base=tmp_path / "0", storage_writer=writer)
    assert any(entry.name == "compare" for entry in caught.traceback)
    assert os.listdir(tmp_path / "1" / "data") == []


def test_who_compares_says_that_it_goes_on(tmp_path):
    """Before anything is kept or written: who cancels need not wait for that."""
    state, seen = large_state(), []
    shardkeep.save(state, tmp_path / "0")
    state["small"] += 1
    done = shardkeep.save(
        state, tmp_path / "1", base=tmp_path / "0", progress=lambda done, total: seen.append(done)
    )
    assert seen == sorted(seen)
    assert seen[0] == 0
    assert seen[-1] >= done.stats["kept_bytes"] > 0


@pytest.mark.parametrize("how", ["in memory", "by way of buffers"])
def test_who_compares_for_long_is_seen_to_work(tmp_path, monkeypatch, how):
    """Other ranks give up one that makes no progress."""
    events = []

    class Watched(SingleProcess):
        def advance(self, nbytes):
            events.append(nbytes)

    state = large_state()
    if how == "by way of buffers":
        monkeypatch.setattr(DefaultSavePlanner, "addresses", SavePlanner.addresses)
    shardkeep.save(state, tmp_path / "0")
    with shardkeep.Checkpointer(process_group=Watched()) as keeper:
        done = keeper.save(state, tmp_path / "1", base=tmp_path / "0")
    assert 1 in events[: events.index(done.stats["kept_bytes"])]
    assert done.stats["bytes"] < 1 * MIB


@pytest.mark.parametrize("written", [True, False])
def test_an_array_that_is_another_one_than_before(tmp_path, eager, written):
    """The plan of the save before is used again, and found not to fit; also if all is kept."""
    state = large_state()
    with shardkeep.Checkpointer() as keeper:
        keeper.save(state, tmp_path / "0")
        keeper.save(state, tmp_path / "1", base=tmp_path / "0")
        if written:
            state["w1"] += 1
        state["w2"].shape = (2, 2 * MIB)
        keeper.save(state, tmp_path / "2", base=tmp_path / "1")
    assert_holds(tmp_path / "2", state)
    assert sorted(os.listdir(tmp_path / "2")) == ["checkpoint.json", "data"]
    named = {
        row.name for row in (record_of(tmp_path / "2").index, *record_of(tmp_path / "2").files)
    }
    assert {f"data/{name}" for name in os.listdir(tmp_path / "2/data")} == named


def test_an_array_that_becomes_another_one_meanwhile(tmp_path, eager):
    """The plan is found not to fit when some of it is written already."""
    state = {**large_state(), "swapped": np.arange(600, dtype=">f8")}

    def reshape(done, total):
        state["swapped"].shape = (20, 30)

    with shardkeep.Checkpointer() as keeper:
        for step in range(2):
            base = tmp_path / str(step - 1) if step else None
            keeper.save(state, tmp_path / str(step), base=base)
        state["w1"] += 1
        keeper.save(state, tmp_path / "2", base=tmp_path / "1", progress=reshape)
    assert state["swapped"].shape == (20, 30)
    assert_holds(tmp_path / "2", {**state, "swapped": state["swapped"].astype("<f8")})


def test_only_whole_blocks_of_what_lies_in_memory_are_looked_at(tmp_path, eager, monkeypatch):
    """Never a byte beside a chunk; and every chunk that has such a block is told."""
    sizes = [BLOCK, 3 * BLOCK, BLOCK + 64, 2 * BLOCK - 64, 5 * BLOCK + 1, 2 * BLOCK, BLOCK // 2]
    state = {f"w{n}": np.zeros(size, np.uint8) for n, size in enumerate(sizes)}
    shardkeep.save(state, tmp_path, storage_writer=shardkeep.NativeWriter(block=BLOCK))
    arrays = [np.ones(size, np.uint8) for size in sizes]
    address = np.array([array.ctypes.data for array in arrays], np.uint64)
    address[1] = 0
    real = early.view_memory

    def view(low, nbytes):
        places = zip(address.tolist(), sizes, strict=True)
        assert any(at and at <= low and low + nbytes <= at + size for at, size in places)
        return real(low, nbytes)

    monkeypatch.setattr(early, "view_memory", view)
    with contextlib.closing(NativeReader(tmp_path)) as base:
        base.read_tables()
        chunks, _ = base.index.chunks_among(np.arange(len(sizes)))
        places = (chunks.file, chunks.start, np.array(sizes), address)
        found = early.surely_changed(base, *places, algorithm(base.record.digests))
    blocks = [(s + n) // BLOCK - -(-s // BLOCK) for s, n in zip(chunks.start, sizes, strict=True)]
    assert 0 in blocks
    assert 1 in blocks
    wanted = [count > 0 and at > 0 for count, at in zip(blocks, address, strict=True)]
    assert found.tolist() == wanted
