"""One test for each fault seen in torch.distributed.checkpoint or HyperParallel: not here.

Numbers are those of the reports the faults were reproduced in: `dcp 1.7` is its table of bad input,
`dcp 2.6 #n` its table of integrity failures, `hp n` the list of HyperParallel's.
"""

import itertools
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptionError,
    MismatchError,
    NativeWriter,
    PerRank,
    PlanError,
    RankError,
    ShardedArray,
    StorageError,
    ThreadRanks,
    UnsupportedValueError,
)
from shardkeep.formats.native import commit
from shardkeep.formats.native.layout import Limits
from shardkeep.formats.native.record import decode_record
from shardkeep.stores.local import LocalStore, WriteFile


def files_in(path: Path) -> list[str]:
    return sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())


def load_all(path: Path):
    with shardkeep.open(path) as ckpt:
        return ckpt.state_dict()


def rows(whole: np.ndarray, rank: int, world: int) -> ShardedArray:
    """An uneven split of the rows over the ranks."""
    edges = np.linspace(0, len(whole), world + 1).astype(int)
    part = whole[edges[rank] : edges[rank + 1]].copy()
    return ShardedArray.from_local(part, (edges[rank], *(0,) * (whole.ndim - 1)), whole.shape)


# --- dcp 1.7: bad input -------------------------------------------------------------------------


def test_dcp_no_checkpoint_id():
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.save({"a": 1})
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.load({"a": 1})
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.save({"a": 1}, storage_writer=NativeWriter())
    with pytest.raises(ValueError, match="checkpoint_id"):
        shardkeep.load({"a": 1}, storage_reader=shardkeep.NativeReader())


def test_dcp_names_only_the_first_missing_key(tmp_path):
    shardkeep.save({"m": {"a": np.zeros(2)}}, tmp_path / "c")
    target = {"m": {"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}, "z": np.ones(1), "y": 5}
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, tmp_path / "c")
    assert caught.value.missing == ("m.b", "m.c", "y", "z")
    assert all(name in str(caught.value) for name in ("m.b", "m.c", "y", "z"))
    assert (target["m"]["a"] == 1).all()


def test_dcp_missing_keys_of_all_ranks(tmp_path):
    shardkeep.save({"m": {"a": np.zeros(2)}}, tmp_path / "c")
    found = ThreadRanks(3).outcomes(
        lambda c: shardkeep.load(
            {"m": {"a": np.ones(2), f"b{c.rank}": np.ones(2)}}, tmp_path / "c", process_group=c
        )
    )
    assert [type(error) for error in found] == [MismatchError] * 3
    assert {error.missing for error in found} == {("m.b0", "m.b1", "m.b2")}


def test_dcp_ignores_unexpected_keys(tmp_path):
    shardkeep.save({"m": {"a": np.zeros(2), "b": np.zeros(2), "c": 5}}, tmp_path / "c")
    target = {"m": {"a": np.ones(2)}}
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, tmp_path / "c")
    assert set(caught.value.unexpected) == {"m.b", "m.c"}
    assert (target["m"]["a"] == 1).all()
    result = shardkeep.load(target, tmp_path / "c", strict=False)
    assert set(result.unexpected) == {"m.b", "m.c"}


def test_dcp_size_mismatch(tmp_path):
    shardkeep.save({"a": np.zeros((2, 3)), "b": np.zeros(4)}, tmp_path / "c")
    with pytest.raises(MismatchError) as caught:
        shardkeep.load({"a": np.ones((3, 2)), "b": np.ones(5)}, tmp_path / "c")
    assert set(caught.value.mismatched) == {"a", "b"}
    assert "(2, 3)" in caught.value.mismatched["a"]
    assert "(3, 2)" in caught.value.mismatched["a"]


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.float32, torch.int8),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
        (torch.bfloat16, torch.float16),
        (torch.int64, torch.int32),
        (torch.bool, torch.uint8),
    ],
)
def test_dcp_casts_silently(tmp_path, saved, wanted):
    shardkeep.save({"a": torch.ones(4).to(saved)}, tmp_path / "c")
    target = {"a": torch.zeros(4, dtype=wanted)}
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, tmp_path / "c")
    text = caught.value.mismatched["a"]
    assert str(saved)[6:] in text
    assert str(wanted)[6:] in text
    assert not target["a"].any()


def test_dcp_cast_only_when_asked_and_never_across_kinds(tmp_path):
    shardkeep.save({"a": torch.full((4,), 1.5)}, tmp_path / "c")
    target = {"a": torch.zeros(4, dtype=torch.float64)}
    shardkeep.load(target, tmp_path / "c", cast="widen")
    assert (target["a"] == 1.5).all()
    with pytest.raises(MismatchError):
        shardkeep.load({"a": torch.zeros(4, dtype=torch.float16)}, tmp_path / "c", cast="widen")
    shardkeep.load({"a": torch.zeros(4, dtype=torch.float16)}, tmp_path / "c", cast=True)
    with pytest.raises(MismatchError):
        shardkeep.load({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "c", cast=True)


def test_dcp_tensor_saved_object_wanted(tmp_path):
    shardkeep.save({"a": np.zeros(2)}, tmp_path / "c")
    target = {"a": "text"}
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, tmp_path / "c")
    assert "an array is stored" in caught.value.mismatched["a"]
    assert target == {"a": "text"}


def test_dcp_object_saved_tensor_wanted(tmp_path):
    shardkeep.save({"a": "text"}, tmp_path / "c")
    target = {"a": np.ones(2)}
    with pytest.raises(MismatchError) as caught:
        shardkeep.load(target, tmp_path / "c")
    assert "a plain value is stored" in caught.value.mismatched["a"]
    assert (target["a"] == 1).all()


def test_dcp_integer_keys_become_strings(tmp_path):
    state = {5: np.arange(3), "opt": {0: {"step": 1}, 1: {"step": 2}, None: b"no"}}
    shardkeep.save(state, tmp_path / "c")
    target = {5: np.zeros(3, int), "opt": {0: {"step": 0}, 1: {"step": 0}, None: b""}}
    shardkeep.load(target, tmp_path / "c")
    assert list(target) == [5, "opt"]
    assert target[5].tolist() == [0, 1, 2]
    assert target["opt"] == {0: {"step": 1}, 1: {"step": 2}, None: b"no"}
    back = load_all(tmp_path / "c")
    assert [type(k) for k in back] == [int, str]
    assert back["opt"] == target["opt"]


def test_dcp_int_and_str_key_of_one_name(tmp_path):
    state = {"d": {5: np.full(2, 1), "5": np.full(2, 2)}, "a.b": 1, "a": {"b": 2}}
    shardkeep.save(state, tmp_path / "c")
    back = load_all(tmp_path / "c")
    assert back["d"][5].tolist() == [1, 1]
    assert back["d"]["5"].tolist() == [2, 2]
    assert (back["a.b"], back["a"]["b"]) == (1, 2)
    target = {"d": {5: np.zeros(2, int), "5": np.zeros(2, int)}, "a.b": 0, "a": {"b": 0}}
    shardkeep.load(target, tmp_path / "c")
    assert target["d"][5].tolist() == [1, 1]
    assert target["d"]["5"].tolist() == [2, 2]
    assert (target["a.b"], target["a"]["b"]) == (1, 2)


def test_keys_that_python_calls_equal(tmp_path):
    """1 on one rank and True on another would be one key of the whole: refused, not dropped."""
    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.save(
            {"d": {(True if c.rank else 1): np.full(2, c.rank)}}, tmp_path / "c", process_group=c
        )
    )
    assert [type(error) for error in found] == [PlanError] * 2
    assert files_in(tmp_path / "c") == []


def test_dcp_missing_or_cut_metadata_is_an_assertion(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        shardkeep.load({}, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointNotFoundError):
        shardkeep.load({}, tmp_path / "empty")
    shardkeep.save({"a": 1}, tmp_path / "c")
    os.truncate(tmp_path / "c" / "checkpoint.json", 50)
    with pytest.raises(CorruptionError):
        shardkeep.load({"a": 0}, tmp_path / "c")
    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load({"a": 0}, tmp_path / "c", process_group=c)
    )
    assert [type(error) for error in found] == [CorruptionError] * 2


def test_dcp_truncated_file_names_no_key(tmp_path):
    shardkeep.save({"m": {"w": np.zeros(5000), "b": np.zeros(3)}, "step": 1}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").glob("*-r*")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CorruptionError) as caught:
        shardkeep.load({"m": {"w": np.zeros(5000), "b": np.zeros(3)}, "step": 0}, tmp_path / "c")
    assert {"m.w", "m.b"} <= set(caught.value.names)
    assert file.name in str(caught.value)


def test_dcp_overwrite_is_refused_by_default(tmp_path):
    shardkeep.save({"a": np.zeros(2)}, tmp_path / "c")
    before = files_in(tmp_path / "c")
    with pytest.raises(CheckpointExistsError):
        shardkeep.save({"a": np.ones(2)}, tmp_path / "c")
    with pytest.raises(FileExistsError):
        ThreadRanks(2).run(lambda c: shardkeep.save({"a": 1}, tmp_path / "c", process_group=c))
    assert files_in(tmp_path / "c") == before
    assert not load_all(tmp_path / "c")["a"].any()
    shardkeep.save({"a": np.ones(2)}, tmp_path / "c", overwrite=True)
    assert load_all(tmp_path / "c")["a"].all()


def test_dcp_unpicklable_object_leaves_partial_files(tmp_path):
    for bad in (threading.Lock(), lambda: 0, (i for i in ())):
        for allow in (False, True):
            state = {"w": np.zeros(3), "deep": {"bad": bad}}
            with pytest.raises(UnsupportedValueError, match=r"deep\.bad"):
                shardkeep.save(state, tmp_path / "c", allow_pickle=allow)
            assert files_in(tmp_path / "c") == []
    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.save(
            {"w": np.zeros(3), "x": threading.Lock() if c.rank else 1},
            tmp_path / "c",
            process_group=c,
        )
    )
    assert [type(error) for error in found] == [UnsupportedValueError] * 2
    assert files_in(tmp_path / "c") == []


class _Torn(Exception):
    """Cannot be pickled, and its text cannot be had."""

    def __init__(self, lock: object, more: object) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle")


class _Failing:
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict:
        if self.fails:
            raise _Torn(1, 2)
        return {"w": np.zeros(2)}

    def load_state_dict(self, state: dict) -> None:
        if self.fails:
            raise _Torn(1, 2)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_dcp_error_that_cannot_be_pickled_is_lost(tmp_path, bad):
    found = ThreadRanks(3).outcomes(
        lambda c: shardkeep.save({"m": _Failing(c.rank == bad)}, tmp_path / "c", process_group=c)
    )
    for error in found:
        assert isinstance(error, RankError)
        assert set(error.failures) == {bad}
        assert "_Torn" in error.failures[bad]
    assert files_in(tmp_path / "c") == []


def test_dcp_error_while_filling_reaches_every_rank(tmp_path):
    shardkeep.save({"m": {"w": np.zeros(2)}}, tmp_path / "c")

    class Target(_Failing):
        def state_dict(self) -> dict:
            return {"w": np.ones(2)}

    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load({"m": Target(c.rank == 1)}, tmp_path / "c", process_group=c)
    )
    assert [type(error) for error in found] == [RankError] * 2
    assert all(set(error.failures) == {1} for error in found)


# --- dcp 2.6: integrity -------------------------------------------------------------------------


def test_dcp_1_write_error_on_another_thread_is_swallowed(tmp_path, monkeypatch):
    """Every single write of a save is made to fail in turn, on whichever thread it happens."""
    monkeypatch.setattr("shardkeep.formats.native.writer.usable_cores", lambda *_: 4)
    state = {f"t{i}": np.full(1 << 18, i, np.float32) for i in range(8)} | {"step": 1}
    original = WriteFile.write_at
    lock = threading.Lock()
    fails_at, calls = -1, 0
    threads = set()

    def write_at(self, data, offset):
        nonlocal calls
        with lock:
            calls += 1
            mine = calls
        threads.add(threading.current_thread().name)
        if mine == fails_at:
            raise OSError(28, "No space left on device")
        original(self, data, offset)

    monkeypatch.setattr(WriteFile, "write_at", write_at)

    def save(path: Path) -> None:
        shardkeep.save(state, path, memory_budget=16 << 20)

    save(tmp_path / "good")
    total = calls
    assert len(threads) > 1
    assert total > 6
    for fails_at in range(1, total + 1):  # noqa: B007 - read by `write_at`
        calls = 0
        with pytest.raises(StorageError, match="No space left") as caught:
            save(tmp_path / "c")
        assert caught.value.errno == 28
        assert files_in(tmp_path / "c") == []
        with pytest.raises(CheckpointNotFoundError):
            shardkeep.open(tmp_path / "c")
    fails_at = -1
    save(tmp_path / "c")
    assert shardkeep.verify(tmp_path / "c").ok


@pytest.mark.parametrize("step", ["sync", "close", "allocate"])
def test_dcp_1_other_failures_of_a_file(tmp_path, monkeypatch, step):
    """A failed fsync, close or allocation of the k-th file is an error, for every k."""
    original, lock = getattr(WriteFile, step), threading.Lock()
    for number in itertools.count(1):
        calls = []  # files may be written side by side

        def failing(self, *args, number=number, calls=calls):
            with lock:
                calls.append(args)
                fails = len(calls) == number
            original(self, *args)
            if fails:
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(WriteFile, step, failing)
        path = tmp_path / f"c{number}"

        def save(path=path):
            state = {"w": np.arange(9.0)}
            writer = NativeWriter(limits=Limits(payload=1))
            shardkeep.save({**state, "v": np.arange(3), "s": 1}, path, storage_writer=writer)

        try:
            save()
        except StorageError as error:
            assert error.errno == 5  # noqa: PT017 - how often it fails is not known before
            with pytest.raises(CheckpointNotFoundError):
                shardkeep.open(path)
            assert files_in(path) == []
        else:
            assert len(calls) < number
            break
    assert number > 3


def test_dcp_1_write_error_on_one_rank_reaches_all(tmp_path, monkeypatch):
    original = WriteFile.write_at

    def write_at(self, data, offset):
        if "-r00001-" in self.path.name:
            raise OSError(28, "No space left on device")
        original(self, data, offset)

    monkeypatch.setattr(WriteFile, "write_at", write_at)
    found = ThreadRanks(3).outcomes(
        lambda c: shardkeep.save({"m": {c.rank: np.zeros(4)}}, tmp_path / "c", process_group=c)
    )
    assert [type(error) for error in found] == [StorageError] * 3
    assert all(set(error.failures) == {1} for error in found)
    assert files_in(tmp_path / "c") == []


def test_dcp_2_flipped_bit_loads(tmp_path):
    shardkeep.save({"a": np.zeros(1000), "b": np.zeros(10)}, tmp_path / "c")
    with shardkeep.open(tmp_path / "c") as ckpt:
        place = ckpt.metadata.storage_data[shardkeep.MetadataIndex("a", (0,))]
    with open(tmp_path / "c" / place.file, "r+b") as file:
        file.seek(place.offset + 4000)
        file.write(b"\x01")
    with pytest.raises(CorruptionError) as caught:
        shardkeep.load({"a": np.zeros(1000), "b": np.zeros(10)}, tmp_path / "c")
    assert "a" in caught.value.names


def test_dcp_3_crash_while_overwriting_mixes_old_and_new(tmp_path, monkeypatch):
    """Whatever write is the last one of a killed save, the old checkpoint stays whole."""
    old = {"a": np.zeros(3000), "b": {"c": np.zeros(5)}, "step": 1}
    new = {"a": np.ones(3000), "b": {"c": np.ones(5)}, "step": 2}

    class Killed(BaseException):
        pass

    shardkeep.save(old, tmp_path / "c")
    for name in ("write_at", "sync", "close"):
        original = getattr(WriteFile, name)
        for number in itertools.count(1):
            calls = 0

            def dying(self, *args, number=number, original=original):
                nonlocal calls
                calls += 1
                if calls == number:
                    raise Killed
                original(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(WriteFile, name, dying)
                patch.setattr(NativeWriter, "abort", lambda self, **_: None)  # as if killed
                try:
                    shardkeep.save(new, tmp_path / "c", overwrite=True)
                except Killed:
                    pass
                else:
                    break
            assert shardkeep.verify(tmp_path / "c").ok
            back = load_all(tmp_path / "c")
            assert back["step"] == 1
            assert not back["a"].any()
        assert load_all(tmp_path / "c")["step"] == 2
        shardkeep.save(old, tmp_path / "c", overwrite=True)


def test_dcp_4_record_is_synced_before_it_is_written(tmp_path, monkeypatch):
    """When the record gets its name, every byte of it and of all files has been synced."""
    synced: dict[str, int] = {}
    dirs: list[str] = []
    seen: list[str] = []
    sync, link, rename = WriteFile.sync, LocalStore.link, LocalStore.rename
    sync_directory = LocalStore.sync_directory

    def log_sync(self):
        synced[self.path.name] = os.fstat(self.fd).st_size
        sync(self)

    def log_directory(self, name=""):
        dirs.append(name)
        sync_directory(self, name)

    def check(store, old):
        data = (store.root / old).read_bytes()
        record = decode_record(data, "")  # whole: its digest fits
        assert synced[old] == len(data)
        for row in (record.index, *record.files):
            assert synced[Path(row.name).name] == row.size == (store.root / row.name).stat().st_size
        assert dirs[-1] == "data"
        seen.append(old)

    def log_link(self, old, new):
        check(self, old)
        link(self, old, new)

    def log_rename(self, old, new):
        check(self, old)
        assert (self.root / new).exists()  # the old record is there up to the rename
        rename(self, old, new)

    monkeypatch.setattr(WriteFile, "sync", log_sync)
    monkeypatch.setattr(LocalStore, "sync_directory", log_directory)
    monkeypatch.setattr(LocalStore, "link", log_link)
    monkeypatch.setattr(LocalStore, "rename", log_rename)
    state = {"a": np.zeros(3), "s": 1}
    shardkeep.save(state, tmp_path / "c")
    assert len(seen) == 1
    assert dirs[-1] == ""  # the directory that holds the record's name
    shardkeep.save(state, tmp_path / "c", overwrite=True)
    assert len(seen) == 2
    assert dirs[-1] == ""


def test_dcp_5_files_of_a_wider_save_stay(tmp_path):
    def save(world: int) -> None:
        ThreadRanks(world).run(
            lambda c: shardkeep.save(
                {"w": rows(np.arange(24.0), c.rank, world)},
                tmp_path / "c",
                process_group=c,
                overwrite=True,
            )
        )

    save(8)
    assert len(files_in(tmp_path / "c")) == 1 + 1 + 8
    save(2)
    assert len(files_in(tmp_path / "c")) == 1 + 1 + 2
    assert load_all(tmp_path / "c")["w"].tolist() == list(range(24))


def test_dcp_6_two_shards_of_one_tensor_on_a_rank(tmp_path):
    whole = np.arange(32.0).reshape(8, 4)

    def held(rank: int, fill: float | None = None) -> ShardedArray:
        shards = [(whole[i : i + 2].copy(), (i, 0)) for i in (2 * rank, 4 + 2 * rank)]
        if fill is not None:
            for array, _ in shards:
                array[:] = fill
        return ShardedArray.from_shards(shards, whole.shape)

    ThreadRanks(2).run(
        lambda c: shardkeep.save({"w": held(c.rank)}, tmp_path / "c", process_group=c)
    )
    assert np.array_equal(load_all(tmp_path / "c")["w"], whole)
    targets = [held(0, -1), held(1, -1)]
    ThreadRanks(2).run(
        lambda c: shardkeep.load({"w": targets[c.rank]}, tmp_path / "c", process_group=c)
    )
    for rank, target in enumerate(targets):
        for shard, expected in zip(target.local_shards, held(rank).local_shards, strict=True):
            assert np.array_equal(shard.array, expected.array)


def test_dcp_7_values_beside_tensors(tmp_path):
    state = {
        "w": torch.randn(3),
        "lr": 1e-3,
        "name": "x",
        "none": None,
        "b": b"\0\xff",
        "l": [1, 2],
    }
    shardkeep.save(state, tmp_path / "c")
    back = load_all(tmp_path / "c")
    assert {k: back[k] for k in state if k != "w"} == {k: state[k] for k in state if k != "w"}
    assert shardkeep.verify(tmp_path / "c").ok


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "int8", "bool", "uint8"])
def test_dcp_8_scalars_integers_and_bools(tmp_path, dtype):
    kind = getattr(torch, dtype)
    state = {
        "zero_d": torch.tensor(7).to(kind),
        "many": torch.arange(6).reshape(2, 3).to(kind),
    }
    shardkeep.save(state, tmp_path / "c")
    target = {k: torch.zeros_like(v) for k, v in state.items()}
    shardkeep.load(target, tmp_path / "c")
    for key, tensor in state.items():
        assert target[key].dtype == kind
        assert target[key].shape == tensor.shape
        assert torch.equal(target[key], tensor)


@pytest.mark.parametrize(
    ("boxes", "fault"),
    [
        ([(0, 3), (4, 8)], "no rank holds"),
        ([(0, 4), (3, 8)], "overlaps"),
        ([(0, 4)], "no rank holds"),
        ([(1, 8)], "no rank holds"),
    ],
)
def test_dcp_9_gaps_are_refused_on_save(tmp_path, boxes, fault):
    whole = np.arange(8.0)

    def state(rank: int) -> dict:
        mine = boxes[rank : rank + 1]
        shards = [(whole[low:high], (low,)) for low, high in mine]
        return {"m": {"w": ShardedArray.from_shards(shards, (8,), dtype="float64")}}

    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.save(state(c.rank), tmp_path / "c", process_group=c)
    )
    for error in found:
        assert isinstance(error, PlanError)
        assert "m.w" in str(error)
        assert fault in str(error)
    assert files_in(tmp_path / "c") == []


def test_dcp_9_nothing_is_left_uncovered_on_load(tmp_path):
    whole = np.arange(1.0, 61.0).reshape(10, 6)
    ThreadRanks(3).run(
        lambda c: shardkeep.save({"w": rows(whole, c.rank, 3)}, tmp_path / "c", process_group=c)
    )
    for low in range(10):
        for high in range(low + 1, 11):
            part = np.zeros((high - low, 4))
            target = ShardedArray.from_local(part, (low, 1), whole.shape)
            shardkeep.load({"w": target}, tmp_path / "c", no_dist=True)
            assert np.array_equal(part, whole[low:high, 1:5])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss differs")
@pytest.mark.parametrize("kind", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_dcp_10_host_memory_grows_with_the_state(tmp_path, kind):
    """512 MiB of strided state, saved and loaded under 32 MiB, grow the process by less than 64."""
    script = f"""
        import resource, sys
        import numpy as np, shardkeep
        kind = {kind!r}
        base = np.zeros((8192, 16400), np.float32)
        base[:] = np.arange(16400, dtype=np.float32)
        array = base[:, :16384]
        assert not array.flags.c_contiguous
        if kind == "torch":
            import torch
            array = torch.from_numpy(base)[:, :16384]
        halves = {{"a": array[:4096], "b": {{"c": array[4096:]}}, "tiny": np.zeros(1)}}
        shardkeep.save({{"warm": array[:2, :2]}}, sys.argv[1] + "/warm", memory_budget=32 << 20)
        with shardkeep.open(sys.argv[1] + "/warm") as ckpt:
            ckpt.state_dict()
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        before = peak()
        result = shardkeep.save(halves, sys.argv[1] + "/c", memory_budget=32 << 20)
        saved = peak() - before
        assert result.nbytes == (512 << 20) + 8, result.nbytes
        shardkeep.load(halves, sys.argv[1] + "/c", memory_budget=32 << 20)
        loaded = peak() - before
        report = shardkeep.verify(sys.argv[1] + "/c", memory_budget=32 << 20)
        assert report.ok
        print(saved, loaded, peak() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for grown in map(int, done.stdout.split()):
        assert grown < 64, done.stdout


def test_dcp_tuples_that_hold_tensors(tmp_path):
    state = {"t": (torch.ones(2), [torch.zeros(3), 5]), "plain": (1, "two")}
    shardkeep.save(state, tmp_path / "c")
    with shardkeep.open(tmp_path / "c") as ckpt:
        assert set(ckpt) == {"t.0", "t.1.0", "t.1.1", "plain"}
        back = ckpt.state_dict("torch")
    assert type(back["t"]) is tuple
    assert type(back["t"][1]) is list
    assert torch.equal(back["t"][0], torch.ones(2))
    assert back["plain"] == (1, "two")
    target = {"t": (torch.zeros(2), [torch.ones(3), 0]), "plain": ()}
    result = shardkeep.load(target, tmp_path / "c")
    assert torch.equal(target["t"][0], torch.ones(2))  # in place
    assert result.state_dict["t"][1][1] == 5


def test_dcp_lists_of_different_lengths(tmp_path):
    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.save(
            {"l": [np.zeros(2)] * (c.rank + 1)}, tmp_path / "c", process_group=c
        )
    )
    for error in found:
        assert isinstance(error, PlanError)
        assert "l has 1 entries on rank 0 and 2 on rank 1" in str(error)


# --- HyperParallel ------------------------------------------------------------------------------


def test_hp_1_files_with_our_suffix_open_in_torch_and_safetensors(tmp_path):
    from safetensors.torch import load_file

    shardkeep.save({"w": torch.arange(4.0)}, tmp_path / "c")
    (file,) = (tmp_path / "c" / "data").glob("*-r*")
    assert torch.equal(load_file(file)["w"], torch.arange(4.0))


def test_hp_2_save_returns_before_the_record_is_there(tmp_path):
    """Right after `save` returns, on every rank, the whole checkpoint loads on that rank."""
    whole = np.arange(40.0)

    def work(c):
        for step in range(5):
            path = tmp_path / f"step-{step}"
            shardkeep.save({"w": rows(whole, c.rank, 8), "s": step}, path, process_group=c)
            with shardkeep.open(path) as ckpt:
                assert ckpt["s"] == step
                assert np.array_equal(ckpt["w"][...], whole)
        return True

    assert ThreadRanks(8).run(work) == [True] * 8


def test_hp_2_readers_see_the_old_or_the_new_one(tmp_path):
    """A reader beside a saver that overwrites in place never sees a half-written checkpoint."""
    shardkeep.save({"a": np.full(5000, 0), "step": 0}, tmp_path / "c")
    stop = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not stop.is_set():
            target = {"a": np.full(5000, -1), "step": -1}
            try:
                shardkeep.load(target, tmp_path / "c", no_dist=True)
            except StorageError as error:
                if not error.transient:  # replaced twice while being read
                    wrong.append(error)
            except BaseException as error:
                wrong.append(error)
            else:
                if not (target["a"] == target["step"]).all():
                    wrong.append(target)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in range(1, 40):
        shardkeep.save({"a": np.full(5000, step), "step": step}, tmp_path / "c", overwrite=True)
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []


def test_hp_3_wider_layout_is_filled_whole(tmp_path):
    whole = np.arange(1.0, 33.0).reshape(8, 4)
    ThreadRanks(2).run(
        lambda c: shardkeep.save({"w": rows(whole, c.rank, 2)}, tmp_path / "c", process_group=c)
    )
    target = np.full((8, 4), np.nan)
    shardkeep.load({"w": target}, tmp_path / "c")
    assert np.array_equal(target, whole)


def test_hp_3_one_rank_of_two_alone_is_refused(tmp_path):
    half = rows(np.arange(8.0), 0, 2)
    with pytest.raises(PlanError, match="no rank holds"):
        shardkeep.save({"w": half}, tmp_path / "c", no_dist=True)


def test_hp_5_bytes_load_back(tmp_path):
    state = {
        "b": b"\x80\x04.",
        "empty": b"",
        "a": bytearray(b"xyz"),
        "k/e/y": {"a/b": b"/"},
        "/": 1,
    }
    shardkeep.save(state, tmp_path / "c")
    assert load_all(tmp_path / "c") == state
    target = {"b": b"", "empty": b"?", "a": bytearray(), "k/e/y": {"a/b": b""}, "/": 0}
    shardkeep.load(target, tmp_path / "c")
    assert target == state
    assert type(target["a"]) is bytearray


def test_hp_5_tensor_keys_with_slashes(tmp_path):
    state = {"a/b": np.arange(3), "../../etc": np.arange(4), "/abs": {"x/..": np.arange(5)}}
    shardkeep.save(state, tmp_path / "c")
    back = load_all(tmp_path / "c")
    assert np.array_equal(back["/abs"]["x/.."], np.arange(5))
    assert all(f.startswith(("data/", "checkpoint.json")) for f in files_in(tmp_path / "c"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_hp_6_no_dist_needs_no_process_group(tmp_path):
    assert not torch.distributed.is_initialized()
    shardkeep.save({"a": torch.ones(2)}, tmp_path / "c", no_dist=True)
    target = {"a": torch.zeros(2)}
    shardkeep.load(target, tmp_path / "c", no_dist=True)
    assert target["a"].all()


def test_hp_6_no_dist_as_one_of_many(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(PlanError, match="WORLD_SIZE"):
        shardkeep.save({"a": 1}, tmp_path / "c")
    shardkeep.save({"a": 1}, tmp_path / "c", no_dist=True)


def test_hp_6_second_save_leaves_stale_files(tmp_path):
    shardkeep.save({"a": np.zeros(3), "b": np.zeros(3)}, tmp_path / "c")
    first = set(files_in(tmp_path / "c"))
    shardkeep.save({"a": np.zeros(3)}, tmp_path / "c", overwrite=True)
    assert set(files_in(tmp_path / "c")) & first == {"checkpoint.json"}
    assert len(files_in(tmp_path / "c")) == 3


def test_hp_7_small_view_of_a_large_storage(tmp_path):
    big = torch.arange(1 << 20, dtype=torch.float32)
    shardkeep.save({"view": big[1000:1002], "n": np.arange(1 << 20)[5:7]}, tmp_path / "c")
    size = sum((tmp_path / "c" / f).stat().st_size for f in files_in(tmp_path / "c"))
    assert size < 32 << 10
    back = load_all(tmp_path / "c")
    assert back["view"].tolist() == [1000.0, 1001.0]
    assert back["n"].tolist() == [5, 6]


def test_hp_7_tied_tensors(tmp_path):
    weight = torch.randn(64, 32)
    state = {"emb": {"w": weight}, "head": {"w": weight}, "view": weight.view(32, 64)}
    result = shardkeep.save(state, tmp_path / "c")
    assert result.nbytes == 2 * weight.nbytes  # the reshaped view is not an exact tie
    with shardkeep.open(tmp_path / "c") as ckpt:
        back = ckpt.state_dict("torch")
    assert torch.equal(back["emb"]["w"], weight)
    assert back["emb"]["w"].data_ptr() == back["head"]["w"].data_ptr()
    shared = torch.zeros(64, 32)
    shardkeep.load({"emb": {"w": shared}, "head": {"w": shared}}, tmp_path / "c", strict=False)
    assert torch.equal(shared, weight)
    apart = {"emb": {"w": torch.zeros(64, 32)}, "head": {"w": torch.zeros(64, 32)}}
    shardkeep.load(apart, tmp_path / "c", strict=False)
    assert torch.equal(apart["emb"]["w"], weight)
    assert torch.equal(apart["head"]["w"], weight)


def test_hp_7_tied_target_of_different_tensors(tmp_path):
    shardkeep.save({"a": torch.zeros(4), "b": torch.ones(4)}, tmp_path / "c")
    shared = torch.full((4,), 5.0)
    with pytest.raises(MismatchError):
        shardkeep.load({"a": shared, "b": shared}, tmp_path / "c")
    assert (shared == 5).all()


def test_hp_7_non_contiguous_tensors(tmp_path):
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    state = {
        "t": base.transpose(0, 3),
        "step": base[:, ::2, 1:3, ::2],
        "expanded": torch.arange(3.0).expand(4, 3),
        "channels": base.to(memory_format=torch.channels_last),
        "numpy": np.arange(24).reshape(4, 6)[::-1, ::-2],
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "big": np.arange(5, dtype=">i4"),
    }
    shardkeep.save(state, tmp_path / "c")
    back = load_all(tmp_path / "c")
    for key, value in state.items():
        assert np.array_equal(back[key], np.asarray(value)), key
    target = {
        "t": torch.zeros(2, 3, 4, 5).transpose(0, 3),
        "step": torch.zeros(4, 4, 4, 6)[::2, ::2, ::2, ::2],
        "expanded": torch.zeros(3, 4).t(),
        "channels": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "numpy": np.zeros((8, 6), int)[::-2, ::2],
        "fortran": np.zeros((4, 3)).T,
        "big": np.zeros(5, ">i4"),
    }
    shardkeep.load(target, tmp_path / "c")
    for key, value in state.items():
        assert np.array_equal(np.asarray(target[key]), np.asarray(value)), key


def test_hp_7_complex128(tmp_path):
    value = torch.randn(3, 4, dtype=torch.complex128)
    shardkeep.save({"c": value, "conj": value.conj(), "imag": value.imag}, tmp_path / "c")
    target = {k: torch.zeros(3, 4, dtype=torch.complex128) for k in ("c", "conj")}
    target["imag"] = torch.zeros(3, 4, dtype=torch.float64)
    shardkeep.load(target, tmp_path / "c")
    assert torch.equal(target["c"], value)
    assert torch.equal(target["conj"], value.conj().resolve_conj())
    assert torch.equal(target["imag"], value.imag)


def test_hp_8_one_dimension_over_two_mesh_axes(tmp_path):
    whole = np.arange(48.0).reshape(12, 4)
    spec = shardkeep.MeshShardingSpec((2, 3), (shardkeep.Shard(0), shardkeep.Shard(0)))

    def state(rank: int, fill: bool) -> dict:
        place = divmod(rank, 3)
        box = spec.boxes_of(place, whole.shape)
        low, high = box.offsets[0], box.offsets[0] + box.sizes[0]
        part = np.zeros(box.sizes) if fill else whole[low:high]
        return {"w": ShardedArray.from_mesh(part, spec, place, whole.shape)}

    ThreadRanks(6).run(
        lambda c: shardkeep.save(state(c.rank, False), tmp_path / "c", process_group=c)
    )
    assert np.array_equal(load_all(tmp_path / "c")["w"], whole)
    targets = [state(rank, True) for rank in range(6)]
    ThreadRanks(6).run(lambda c: shardkeep.load(targets[c.rank], tmp_path / "c", process_group=c))
    for rank, target in enumerate(targets):
        expected = state(rank, False)["w"].local_shards[0].array
        assert np.array_equal(target["w"].local_shards[0].array, expected)


@pytest.mark.parametrize(("saved", "loaded"), [(8, 4), (4, 8), (3, 5), (7, 1), (1, 7), (5, 13)])
def test_hp_8_9_uneven_splits_on_other_numbers_of_ranks(tmp_path, saved, loaded):
    whole = np.random.default_rng(0).standard_normal((11, 3)).astype(np.float32)
    ThreadRanks(saved).run(
        lambda c: shardkeep.save(
            {"w": rows(whole, c.rank, saved), "step": 4}, tmp_path / "c", process_group=c
        )
    )
    targets = [{"w": rows(np.zeros_like(whole), r, loaded), "step": 0} for r in range(loaded)]
    ThreadRanks(loaded).run(
        lambda c: shardkeep.load(targets[c.rank], tmp_path / "c", process_group=c)
    )
    parts = [s.array for target in targets for s in target["w"].local_shards]
    assert np.array_equal(np.concatenate(parts), whole)
    assert all(target["step"] == 4 for target in targets)


# --- replicas that differ (both peers write one and drop the others without a word) ---------------


def test_differing_replicas_are_refused(tmp_path):
    def state(rank: int) -> dict:
        mean = torch.zeros(5)
        mean[2] = rank == 2  # BatchNorm's running mean, under DDP
        return {"bn": {"running_mean": mean, "weight": torch.ones(5)}, "step": 1}

    found = ThreadRanks(3).outcomes(
        lambda c: shardkeep.save(state(c.rank), tmp_path / "c", process_group=c)
    )
    for error in found:
        assert isinstance(error, PlanError)
        assert "bn.running_mean" in str(error)
        assert "bn.weight" not in str(error)
        assert "ranks 0, 1, 2" in str(error)
        assert "PerRank" in str(error)
    assert files_in(tmp_path / "c") == []


def test_differing_values_are_refused(tmp_path):
    found = ThreadRanks(3).outcomes(
        lambda c: shardkeep.save({"a": {"seed": c.rank}, "s": 1}, tmp_path / "c", process_group=c)
    )
    for error in found:
        assert isinstance(error, PlanError)
        assert "a.seed" in str(error)
        assert "PerRank" in str(error)


def test_one_element_of_a_large_replica_differs(tmp_path):
    """Sampling looks at the ends and the middle; `full` looks everywhere."""

    def state(rank: int, at: int) -> dict:
        big = np.zeros(1 << 20, np.float32)
        big[at] = rank
        return {"big": big}

    def save(at: int, how: str, name: str):
        return ThreadRanks(2).outcomes(
            lambda c: shardkeep.save(
                state(c.rank, at), tmp_path / name, process_group=c, check_replicas=how
            )
        )

    for at in (0, 1 << 19, (1 << 20) - 1):
        assert all(isinstance(e, PlanError) for e in save(at, "sample", "c"))
    assert all(isinstance(e, PlanError) for e in save(1 << 18, "full", "c"))
    assert all(isinstance(e, shardkeep.SaveResult) for e in save(0, "off", "off"))


def test_per_rank_state_is_kept_and_restored(tmp_path):
    def state(rank: int) -> dict:
        return {
            "bn": PerRank({"running_mean": torch.full((5,), float(rank)), "n": rank}),
            "rng": PerRank(bytes([rank])),
            "w": torch.ones(3),
        }

    ThreadRanks(3).run(lambda c: shardkeep.save(state(c.rank), tmp_path / "c", process_group=c))
    targets = [
        {
            "bn": PerRank({"running_mean": torch.full((5,), -1.0), "n": -1}),
            "rng": PerRank(b""),
            "w": torch.zeros(3),
        }
        for _ in range(3)
    ]
    ThreadRanks(3).run(lambda c: shardkeep.load(targets[c.rank], tmp_path / "c", process_group=c))
    for rank, target in enumerate(targets):
        assert (target["bn"].value["running_mean"] == rank).all()
        assert target["bn"].value["n"] == rank
        assert target["rng"].value == bytes([rank])
    found = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load(state(c.rank), tmp_path / "c", process_group=c)
    )
    for error in found:
        assert isinstance(error, MismatchError)
        assert {"bn", "rng"} <= set(error.mismatched)


def test_equal_replicas_are_stored_once(tmp_path):
    whole = np.arange(1000.0)
    result = ThreadRanks(4).run(
        lambda c: shardkeep.save({"w": whole.copy(), "s": "x"}, tmp_path / "c", process_group=c)
    )[0]
    assert result.nbytes == whole.nbytes
    assert np.array_equal(load_all(tmp_path / "c")["w"], whole)


def test_gc_leaves_the_committed_checkpoint_alone(tmp_path, monkeypatch):
    """What a killed save leaves behind is removed, and nothing else (dcp keeps it for ever)."""
    shardkeep.save({"a": np.zeros(3)}, tmp_path / "c")
    before = files_in(tmp_path / "c")
    with monkeypatch.context() as patch:
        patch.setattr(NativeWriter, "abort", lambda self, **_: None)
        patch.setattr(
            commit.Lease, "commit", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "x"))
        )
        with pytest.raises(OSError, match="x"):
            shardkeep.save({"a": np.ones(3)}, tmp_path / "c", overwrite=True)
    assert len(files_in(tmp_path / "c")) > len(before)
    assert shardkeep.gc(tmp_path / "c").removed == ()  # its lease is fresh: it may be running
    assert len(shardkeep.gc(tmp_path / "c", stale_s=0).removed) == 3
    assert files_in(tmp_path / "c") == before
    assert shardkeep.verify(tmp_path / "c").ok
