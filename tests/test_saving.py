"""Saving: what is refused early, what is left behind, what results say."""

from __future__ import annotations

import os
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    NativeWriter,
    PlanError,
    ShardedArray,
    StorageError,
    ThreadRanks,
    UnsupportedValueError,
)
from shardkeep.formats.native import foreign as native_foreign


def files(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_an_existing_checkpoint_is_an_error_and_stays(tmp_path):
    first = shardkeep.save({"a": 1}, tmp_path)
    before = files(tmp_path)
    with pytest.raises(CheckpointExistsError, match="overwrite=True"):
        shardkeep.save({"a": 2}, tmp_path)
    assert files(tmp_path) == before
    assert shardkeep.open(tmp_path).digest == first.digest


def test_overwriting_removes_exactly_the_replaced_files(tmp_path):
    shardkeep.save({"a": np.ones(3)}, tmp_path)
    shardkeep.save({"b": np.ones(4)}, tmp_path, overwrite=True)
    assert list(shardkeep.open(tmp_path)) == ["b"]
    assert len(files(tmp_path)) == 3


def test_overwriting_a_damaged_checkpoint_works(tmp_path):
    shardkeep.save({"a": 1}, tmp_path)
    (tmp_path / "checkpoint.json").write_text("{}")
    shardkeep.save({"a": 2}, tmp_path, overwrite=True)
    assert shardkeep.open(tmp_path)["a"] == 2
    assert len(shardkeep.gc(tmp_path).removed) == 2
    assert len(files(tmp_path)) == 3


@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        "__0_0.distcp",
        "_CHECKPOINT_METADATA",
        "diffusion_pytorch_model.safetensors",
        "shard-00001-model-00001-of-00001.safetensors",
    ],
)
def test_formats_are_never_mixed(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointExistsError, match="never mixed"):
        shardkeep.save({"a": 1}, tmp_path, overwrite=True)
    with pytest.raises(shardkeep.FormatError, match="seems to hold"):
        shardkeep.open(tmp_path)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("5/_CHECKPOINT_METADATA", b"{}"),  # a step of a manager
        ("params/_METADATA", b'{"tree_metadata": {}}'),  # an item of an old step
    ],
)
def test_nothing_is_saved_beside_folders_of_orbaxs(tmp_path, mark, says, overwrite):
    for name in ("a", "logs", "z"):
        (tmp_path / name).mkdir()
    (tmp_path / mark).parent.mkdir()
    (tmp_path / mark).write_bytes(says)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointExistsError, match=r"a checkpoint of Orbax.*never mixed"):
        shardkeep.save({"a": 1}, tmp_path, overwrite=overwrite)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / mark).write_bytes(b"PAR1")
    if mark.endswith("/_METADATA"):  # what other programs call so, too
        shardkeep.save({"a": 1}, tmp_path, overwrite=overwrite)
        (tmp_path / mark).write_bytes(says)
        shardkeep.save({"a": 2}, tmp_path, overwrite=True)  # ours, and that is told first


def test_folders_that_are_none_of_orbaxs_keep_nobody_waiting(tmp_path, monkeypatch):
    for at in range(150):
        (tmp_path / f"f{at}").mkdir()
        (tmp_path / f"f{at}/_METADATA").write_bytes(b"PAR1")
    looked = []
    monkeypatch.setattr(native_foreign, "beginning", lambda *given: looked.append(given) or b"")
    shardkeep.save({"a": 1}, tmp_path)
    assert len(looked) == 100


def test_a_file_in_the_way(tmp_path):
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(StorageError, match="is a file"):
        shardkeep.save({"a": 1}, path)
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="is a file"):
        shardkeep.open(path)


def test_a_file_of_a_checkpoint_is_told_from_one_of_none(tmp_path):
    shardkeep.save({"a": 1}, tmp_path / "whole")
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"pass its directory, .*whole$"):
        shardkeep.open(tmp_path / "whole" / "checkpoint.json")
    shardkeep.convert(tmp_path / "whole", tmp_path / "state.pt", to="torch-save")
    with pytest.raises(shardkeep.FormatError, match=r"holds? a checkpoint of torch\.save"):
        shardkeep.verify(tmp_path / "state.pt")


def test_a_directory_that_goes_while_it_is_looked_at_is_no_file(tmp_path, monkeypatch):
    # What a killed save left is removed by another program, just now.
    path = tmp_path / "step"
    path.mkdir()
    real = Path.stat

    def look(self, **how):
        found = real(self, **how)
        if self == path and path in gone:
            gone.remove(path)
            path.rmdir()
        return found

    gone = [path]
    monkeypatch.setattr(Path, "stat", look)
    shardkeep.save({"a": np.arange(3)}, path)
    assert not gone
    shardkeep.verify(path)


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnsupportedValueError, match="bad"):
        shardkeep.save({"good": np.ones(5), "bad": object()}, tmp_path)
    assert files(tmp_path) == []
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path)


@pytest.mark.parametrize("when", ["write_at", "sync", "close", "allocate"])
def test_errors_of_the_disk_reach_the_caller_and_clean_up(tmp_path, monkeypatch, when):
    from shardkeep.stores.local import WriteFile

    shardkeep.save({"a": np.ones(3)}, tmp_path)
    before = files(tmp_path)
    real = getattr(WriteFile, when)
    calls = []

    def fail(self, *args):
        calls.append(self.path.name)
        if "-r0" in self.path.name:
            raise OSError(28, "No space left on device")
        return real(self, *args)

    monkeypatch.setattr(WriteFile, when, fail)
    with pytest.raises(StorageError, match="No space left") as caught:
        shardkeep.save({"a": np.zeros(3)}, tmp_path, overwrite=True)
    assert caught.value.errno == 28
    monkeypatch.undo()
    assert files(tmp_path) == before
    assert shardkeep.open(tmp_path)["a"][0] == 1


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        shardkeep.save({"a": np.ones(3)}, tmp_path / "c")
    finally:
        os.umask(old)
    for name in files(tmp_path / "c"):
        assert stat.S_IMODE((tmp_path / "c" / name).stat().st_mode) == 0o640


def test_nothing_of_this_machine_is_stored(tmp_path):
    import socket

    shardkeep.save({"a": np.ones(3), "v": 1}, tmp_path / "secret-place")
    for name in files(tmp_path / "secret-place"):
        data = (tmp_path / "secret-place" / name).read_bytes()
        assert b"secret-place" not in data
        assert str(tmp_path).encode() not in data
        assert socket.gethostname().encode() not in data or len(socket.gethostname()) < 4


def test_results(tmp_path):
    result = shardkeep.save({"a": np.ones(3), "b": {"c": 1}}, tmp_path / "c")
    assert result.checkpoint_id == str(tmp_path / "c")
    assert result.nbytes == 24
    assert len(result.save_id) == 32
    assert result.digest == shardkeep.open(tmp_path / "c").digest
    assert result.stats["files"] == 1
    assert {"set_up_s", "plan_s", "write_s", "commit_s", "bytes"} <= result.stats.keys()
    metadata = result.metadata
    assert set(metadata.state_dict_metadata) == {"a", "b.c"}
    location = metadata.storage_data[shardkeep.MetadataIndex("a")]
    raw = (tmp_path / "c" / location.file).read_bytes()
    assert raw[location.offset : location.offset + location.nbytes] == np.ones(3).tobytes()
    assert shardkeep.MetadataIndex("a", (0,), 5) in metadata.storage_data
    assert shardkeep.MetadataIndex("b.c") in metadata.storage_data
    assert shardkeep.MetadataIndex("a", (1,)) not in metadata.storage_data
    assert len(list(metadata.storage_data)) == len(metadata.storage_data) == 2


def test_progress_counts_up_to_the_total(tmp_path):
    seen = []
    state = {"a": np.zeros(1 << 20)}
    shardkeep.save(state, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen
    assert seen == sorted(seen)
    assert seen[-1][0] >= 8 << 20
    seen.clear()
    shardkeep.load(state, tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] >= 8 << 20
    shardkeep.verify(tmp_path, progress=True)
    shardkeep.verify(tmp_path, progress=False)  # as of all ranks but one


@pytest.mark.parametrize("read_once", [True, False])
def test_progress_of_a_load_counts_what_is_read(tmp_path, read_once):
    """Of columns, every rank reads all rows; of what is tied in the checkpoint, each byte once."""
    whole = np.arange(1 << 20, dtype=np.float64).reshape(1 << 10, 1 << 10)
    shardkeep.save({"a": whole, "b": whole}, tmp_path)
    seen: list[list[tuple[int, int]]] = [[], []]

    def load(c):
        columns = slice(c.rank * 512, c.rank * 512 + 512)
        state = {
            name: ShardedArray.from_local(np.zeros((1 << 10, 512)), (0, columns.start), whole.shape)
            for name in "ab"
        }
        progress = lambda done, total: seen[c.rank].append((done, total))  # noqa: E731
        shardkeep.load(state, tmp_path, process_group=c, progress=progress, read_once=read_once)

    ThreadRanks(2).run(load)
    for calls in seen:
        assert calls[-1][0] == calls[-1][1]
        assert {total for _, total in calls} == {calls[-1][1]}
        assert whole.nbytes <= calls[-1][1] < whole.nbytes + (1 << 20)
        assert calls[0][0] < calls[-1][1] or len(calls) == 1


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.save({})
    with pytest.raises(ValueError, match="memory_budget"):
        shardkeep.save({}, tmp_path, memory_budget=1 << 20)
    with pytest.raises(ValueError, match="check_replicas"):
        shardkeep.save({}, tmp_path, check_replicas="maybe")
    with pytest.raises(UnsupportedValueError, match="mapping"):
        shardkeep.save([1, 2], tmp_path)
    with pytest.raises(StorageError, match="no storage knows"):
        shardkeep.save({}, "s3://bucket/x")
    with pytest.raises(TypeError, match="process_group"):
        shardkeep.save({}, tmp_path, process_group=3)


def test_torch_objects_get_an_error_that_says_why(tmp_path):
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    with pytest.raises(TypeError, match="torch's own planner"):
        shardkeep.save({}, tmp_path, planner=DefaultSavePlanner())
    with pytest.raises(TypeError, match="FileSystemWriter"):
        shardkeep.save({}, tmp_path, storage_writer=FileSystemWriter(tmp_path))


def test_launched_as_many_but_alone_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(PlanError, match="no_dist=True"):
        shardkeep.save({"a": 1}, tmp_path)
    shardkeep.save({"a": 1}, tmp_path, no_dist=True)


def test_ranks_asked_for_different_saves(tmp_path):
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.save({"a": 1}, tmp_path / str(c.rank), process_group=c)
    )
    assert all(isinstance(o, PlanError) and "checkpoint_id" in str(o) for o in outcomes)


def test_an_error_on_one_rank_is_the_same_error_on_all(tmp_path):
    outcomes = ThreadRanks(3).outcomes(
        lambda c: shardkeep.save({"a": object() if c.rank == 1 else 1}, tmp_path, process_group=c)
    )
    assert all(isinstance(o, UnsupportedValueError) for o in outcomes)
    assert {str(o) for o in outcomes} == {str(outcomes[0])}
    assert list(outcomes[0].failures) == [1]
    assert files(tmp_path) == []


def test_a_foreign_error_on_one_rank_is_a_rank_error(tmp_path):
    class Broken:
        def state_dict(self):
            raise RuntimeError("boom")

        def load_state_dict(self, state):
            pass

    outcomes = ThreadRanks(3).outcomes(
        lambda c: shardkeep.save(
            {"a": Broken() if c.rank == 2 else {"x": 1}}, tmp_path, process_group=c
        )
    )
    assert all(isinstance(o, shardkeep.RankError) for o in outcomes)
    assert "rank 2: RuntimeError: boom" in str(outcomes[0])


def test_replicas_are_spread_and_large_ones_split(tmp_path):
    def state(rank):
        everyone = (0, 1, 2, 3)
        big = np.arange(8 << 20, dtype=np.float32)
        return {
            "big": ShardedArray.from_local(big, (0,), big.shape, replicas=everyone),
            "small": {
                str(i): ShardedArray.from_local(np.full(4096, i), (0,), (4096,), replicas=everyone)
                for i in range(40)
            },
        }

    results = ThreadRanks(4).run(lambda c: shardkeep.save(state(c.rank), tmp_path, process_group=c))
    sizes = [r.stats["bytes"] for r in results]
    assert max(sizes) < 1.1 * min(sizes)
    ckpt = shardkeep.open(tmp_path)
    assert len(ckpt["big"].metadata.chunks) == 4
    assert np.array_equal(ckpt["big"][...], state(0)["big"].local_shards[0].array)
    assert ckpt["small"]["7"][0] == 7


def test_two_creators_one_wins(tmp_path):
    barrier = threading.Barrier(2)
    outcomes = []

    def create(value):
        class Slow:
            def state_dict(self):
                barrier.wait(10)
                return {"v": value}

            def load_state_dict(self, state):
                pass

        try:
            outcomes.append(shardkeep.save({"x": Slow()}, tmp_path))
        except CheckpointExistsError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(o).__name__ for o in outcomes) == ["CheckpointExistsError", "SaveResult"]
    assert shardkeep.verify(tmp_path).ok
    assert len(files(tmp_path)) == 3


def test_a_collected_save_cannot_commit(tmp_path):
    class Collected:
        def state_dict(self):
            shardkeep.gc(tmp_path, stale_s=0)
            return {"v": 1}

        def load_state_dict(self, state):
            pass

    with pytest.raises(StorageError, match="collected"):
        shardkeep.save({"x": Collected()}, tmp_path)
    assert files(tmp_path) == []


def test_gc_leaves_live_saves_alone(tmp_path):
    seen = []

    class Looked:
        def state_dict(self):
            seen.append(shardkeep.gc(tmp_path))
            return {"v": 1}

        def load_state_dict(self, state):
            pass

    shardkeep.save({"x": Looked()}, tmp_path)
    assert len(seen[0].live) == 1
    assert seen[0].removed == ()
    assert shardkeep.open(tmp_path)["x.v"] == 1


def test_gc_refuses_to_guess_beside_a_damaged_record(tmp_path):
    shardkeep.save({"a": np.ones(3)}, tmp_path)
    (tmp_path / "checkpoint.json").write_text("damaged")
    before = files(tmp_path)
    with pytest.raises(shardkeep.CorruptionError):
        shardkeep.gc(tmp_path, stale_s=0)
    assert files(tmp_path) == before


def test_blake3_digests(tmp_path):
    pytest.importorskip("blake3")
    writer = NativeWriter(tmp_path, digest="blake3")
    result = shardkeep.save({"a": np.ones(300_000)}, storage_writer=writer)
    assert result.digest.startswith("blake3:")
    assert shardkeep.verify(tmp_path).ok
    assert shardkeep.open(tmp_path)["a"][299_999] == 1


def test_what_is_counted_fails_no_save_that_is_committed(tmp_path, monkeypatch):
    """Also where a clock stands still, and a storage counts what is no number."""

    class Told(shardkeep.NativeWriter):
        def write_data(self, plan, planner):
            out = super().write_data(plan, planner)
            self.stats["store"] = "s3"
            return out

    state = {"w": np.arange(1000.0)}
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    for number, save in enumerate((shardkeep.save, background_save)):
        done = save(state, storage_writer=Told(tmp_path / str(number)), no_dist=True)
        assert done.stats["bytes_per_s"] == 0
    target = {"w": np.zeros(1000)}
    assert shardkeep.load(target, tmp_path / "1", no_dist=True).stats["bytes_per_s"] == 0
    assert (target["w"] == state["w"]).all()


def background_save(*args, **options):
    return shardkeep.async_save(*args, **options).result(60)
