"""Faults that were found by attacking the library: each once, and never again."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Mapping

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CheckpointExistsError,
    CorruptionError,
    MismatchError,
    PerRank,
    PlanError,
    ShardedArray,
    StorageError,
    ThreadRanks,
    UnsupportedValueError,
)
from shardkeep.stores.local import LocalStore


def descriptors():
    return len(os.listdir("/proc/self/fd"))


linux = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")


def test_overwrite_does_not_stick_to_a_writer(tmp_path):
    shardkeep.save({"x": 1}, tmp_path / "a")
    writer = shardkeep.NativeWriter()
    shardkeep.save({"x": 2}, tmp_path / "b", storage_writer=writer, overwrite=True)
    with pytest.raises(CheckpointExistsError):
        shardkeep.save({"x": 3}, tmp_path / "a", storage_writer=writer)
    assert shardkeep.open(tmp_path / "a")["x"] == 1


def test_settings_of_storage_objects_hold_and_come_back(tmp_path):
    shardkeep.save({"x": 1}, tmp_path)
    pinned = shardkeep.NativeReader(tmp_path, expect_digest="xxh3-128:" + "0" * 32)
    with pytest.raises(CorruptionError, match="pinned"):
        shardkeep.load({"x": 0}, storage_reader=pinned)
    seen = []
    reader = shardkeep.NativeReader(
        tmp_path, verify=False, memory_budget=9 << 20, progress=seen.append
    )
    shardkeep.load({"x": 0}, storage_reader=reader, memory_budget=10 << 20)
    assert (reader.verify, reader.memory_budget) == (False, 9 << 20)
    assert reader.progress == seen.append


class Asked:
    def __init__(self, k):
        self.k = k

    def state_dict(self):
        return {"k": self.k}

    def load_state_dict(self, state):
        pass


class MadeOnAccess(Mapping):
    def __init__(self, k):
        self.k = k

    def __getitem__(self, key):
        return Asked(self.k)

    def __iter__(self):
        return iter("a")

    def __len__(self):
        return 1


def test_statefuls_made_on_access_never_swap_their_states(tmp_path):
    for _ in range(20):
        with pytest.raises(UnsupportedValueError, match="each time it is read"):
            shardkeep.save({"z": MadeOnAccess(1), "y": MadeOnAccess(2)}, tmp_path)


def test_statefuls_without_end_are_refused(tmp_path):
    class Endless:
        def state_dict(self):
            return {"next": Endless()}

        def load_state_dict(self, state):
            pass

    with pytest.raises(UnsupportedValueError, match="deep"):
        shardkeep.save({"x": Endless()}, tmp_path)


def test_a_target_whose_elements_overlap_is_refused(tmp_path):
    shardkeep.save({"x": np.arange(12.0).reshape(4, 3)}, tmp_path)
    overlapping = np.lib.stride_tricks.as_strided(np.zeros(6), (4, 3), (8, 8))
    with pytest.raises(UnsupportedValueError, match="share memory"):
        shardkeep.load({"x": overlapping}, tmp_path)


@pytest.mark.parametrize("keys", [["rng"], ["rng.*"], ["*.s"], None])
def test_per_rank_is_refused_however_it_is_asked_for(tmp_path, keys):
    ThreadRanks(3).run(
        lambda c: shardkeep.save({"rng": PerRank({"s": c.rank})}, tmp_path, process_group=c)
    )
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load({"rng": PerRank({"s": -1})}, tmp_path, keys=keys, process_group=c)
    )
    assert all(isinstance(outcome, MismatchError) for outcome in outcomes)


def test_flat_state_dicts_are_strict(tmp_path):
    shardkeep.save({"layer1.weight": np.ones(2), "layer2.weight": np.ones(2)}, tmp_path)
    with pytest.raises(MismatchError) as caught:
        shardkeep.load({"layer1.weight": np.zeros(2)}, tmp_path)
    assert caught.value.unexpected == ("layer2.weight",)


def test_one_container_at_two_places_holds_one_content(tmp_path):
    shardkeep.save({"a": {"v": [1, 2]}, "b": {"v": 3}, "c": {"v": [1, 2]}}, tmp_path)
    shared = {"v": 0}
    with pytest.raises(MismatchError, match="one dict"):
        shardkeep.load({"a": shared, "b": shared, "c": {"v": 0}}, tmp_path)
    shardkeep.load({"a": shared, "b": {"v": 0}, "c": shared}, tmp_path)
    assert shared == {"v": [1, 2]}


def test_keys_that_match_nothing_are_an_error(tmp_path):
    shardkeep.save({"m": {"a": 1, "c": 2}}, tmp_path)
    with pytest.raises(MismatchError) as caught:
        shardkeep.load({"m": {"a": 0, "c": 0}}, tmp_path, keys=["m.a", "m.zzz"])
    assert caught.value.missing == ("m.zzz",)


def test_gc_leaves_a_copy_alone_whose_record_has_not_arrived(tmp_path):
    shardkeep.save({"x": np.ones(9)}, tmp_path)
    record = (tmp_path / "checkpoint.json").read_bytes()
    (tmp_path / "checkpoint.json").unlink()
    for name in (tmp_path / "data").iterdir():
        os.utime(name, (1, 1))  # as a copy that keeps times would
    assert shardkeep.gc(tmp_path).removed == ()
    (tmp_path / "checkpoint.json").write_bytes(record)
    assert shardkeep.verify(tmp_path).ok


def test_nothing_is_written_after_a_load_has_failed(tmp_path, monkeypatch):
    ones = np.ones(20_000_000)
    shardkeep.save({"x": ones}, tmp_path)
    real = threading.Thread.start
    started = []

    def start(self):
        if self.name.startswith("shardkeep-io"):
            started.append(self)
            if len(started) == 2:
                raise MemoryError("no room for a thread")  # a plain refusal is no failure
        real(self)

    monkeypatch.setattr("shardkeep.engine.region_reader.io_threads", lambda *_: 2)
    monkeypatch.setattr(threading.Thread, "start", start)
    target = np.zeros(20_000_000)
    before = descriptors() if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(MemoryError, match="no room"):
        shardkeep.load({"x": target}, tmp_path)
    target[:] = 0
    time.sleep(0.2)
    assert not target.any()
    if before:
        assert descriptors() <= before


def test_many_tied_targets_are_checked_quickly(tmp_path):
    tied = np.ones(10)
    state = {f"k{i}": tied for i in range(3000)}
    shardkeep.save(state, tmp_path)
    begun = time.monotonic()
    shardkeep.load(state, tmp_path)
    assert time.monotonic() - begun < 30  # it took minutes


def test_listing_a_large_container_is_not_quadratic(tmp_path):
    shardkeep.save({"m": {str(i): np.zeros(1) for i in range(5000)}}, tmp_path)
    with shardkeep.open(tmp_path) as ckpt:
        begun = time.monotonic()
        assert len(list(ckpt["m"].items())) == 5000
        assert "nothing" not in ckpt
        assert time.monotonic() - begun < 5  # it took many times that


@linux
@pytest.mark.parametrize("which", ["index", "r00000"])
def test_a_wrong_file_size_leaks_no_descriptor(tmp_path, which):
    shardkeep.save({"x": np.ones(9)}, tmp_path)
    name = next(p for p in (tmp_path / "data").iterdir() if which in p.name)
    name.write_bytes(name.read_bytes()[:-1])
    before = descriptors()
    for _ in range(20):
        with pytest.raises(CorruptionError):
            shardkeep.load({"x": np.zeros(9)}, tmp_path)
        assert not shardkeep.verify(tmp_path).ok
    assert descriptors() <= before + 1


@linux
def test_forgotten_checkpoints_leak_no_descriptor(tmp_path):
    result = shardkeep.save({"x": np.ones(9)}, tmp_path)
    before = descriptors()
    for _ in range(20):
        assert shardkeep.open(tmp_path)["x"][0] == 1
        assert len(result.metadata.state_dict_metadata) == 1
    import gc

    gc.collect()
    assert descriptors() <= before + 1


def test_an_interrupted_lease_does_not_live_on(tmp_path, monkeypatch):
    real = threading.Thread.start

    def start(self):
        real(self)
        if self.name == "shardkeep-lease":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        shardkeep.save({"x": 1}, tmp_path)
    time.sleep(0.1)
    assert not any(t.name == "shardkeep-lease" for t in threading.enumerate())
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


@linux
def test_too_many_open_files_is_said_to_be_that(tmp_path):
    import resource

    shardkeep.save({"x": np.ones(9)}, tmp_path)
    shardkeep.open(tmp_path)["x"][...]  # imports what it needs
    ckpt = shardkeep.open(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/", os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(StorageError) as caught:
            ckpt["x"][...]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "replaced" not in str(caught.value)
    assert "open files" in str(caught.value)


@linux
@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_what_the_system_is_short_of_is_not_damage(tmp_path, monkeypatch, code):
    """Said to be damaged, a checkpoint would be passed over, or removed."""
    shardkeep.save({"x": np.ones(9)}, tmp_path)
    look = LocalStore.open

    def short(self, name):
        if "-r00000-" in name:
            raise OSError(code, os.strerror(code))
        return look(self, name)

    monkeypatch.setattr(LocalStore, "open", short)
    with pytest.raises(StorageError) as caught:
        shardkeep.verify(tmp_path)
    assert caught.value.errno == code
    assert caught.value.transient


def test_files_go_with_a_checkpoint_that_nobody_holds(tmp_path):
    shardkeep.save({"x": np.ones(9)}, tmp_path)
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            shardkeep.open(tmp_path)["x"][...]
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_ranks_asked_for_different_loads(tmp_path):
    for rank in range(2):
        shardkeep.save({"x": rank}, tmp_path / str(rank))
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load({"x": 0}, tmp_path / str(c.rank), process_group=c)
    )
    assert all(isinstance(o, PlanError) and "checkpoint_id" in str(o) for o in outcomes)
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load({"x": 0}, tmp_path / "0", strict=c.rank == 0, process_group=c)
    )
    assert all(isinstance(o, PlanError) and "strict" in str(o) for o in outcomes)


def test_results_speak_of_their_own_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = shardkeep.save({"x": 1}, "run")
    opened = shardkeep.open("run")
    monkeypatch.chdir("/")
    assert list(first.metadata.state_dict_metadata) == ["x"]
    assert opened.verify().ok
    shardkeep.save({"y": 1}, tmp_path / "run", overwrite=True)
    with pytest.raises(StorageError, match="replaced"):
        first.metadata  # noqa: B018
    with pytest.raises(StorageError, match="replaced"):
        opened.verify()


def test_a_late_error_says_that_targets_are_undefined(tmp_path):
    class Broken(Asked):
        def load_state_dict(self, state):
            raise RuntimeError("boom")

    shardkeep.save({"m": {"k": 1}, "x": np.ones(2)}, tmp_path)
    with pytest.raises(RuntimeError, match="boom") as caught:
        shardkeep.load({"m": Broken(0), "x": np.zeros(2)}, tmp_path)
    assert any("undefined" in note for note in caught.value.__notes__)


def test_a_refused_value_on_one_rank_leaves_all_targets_untouched(tmp_path):
    def state(rank):
        return {"v": PerRank(os.path.join if rank else 1), "x": np.ones(4)}

    ThreadRanks(2).run(
        lambda c: shardkeep.save(state(c.rank), tmp_path, process_group=c, allow_pickle=True)
    )
    targets = [{"v": PerRank(None), "x": np.zeros(4)} for _ in range(2)]
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load(targets[c.rank], tmp_path, process_group=c)
    )
    assert all(isinstance(o, shardkeep.UnsafeCheckpointError) for o in outcomes)
    assert not any(target["x"].any() for target in targets)


def test_errors_of_the_system_are_ours(tmp_path, monkeypatch):
    from shardkeep.stores.local import ReadFile

    shardkeep.save({"x": np.ones(9)}, tmp_path / "c")
    ckpt = shardkeep.open(tmp_path / "c")
    ckpt.close()
    with pytest.raises(StorageError, match="closed"):
        ckpt["x"].metadata  # noqa: B018
    with pytest.raises(StorageError, match="name too long"):
        shardkeep.save({"x": 1}, tmp_path / ("n" * 300))
    with pytest.raises(TypeError, match="pass text"):
        shardkeep.save({"x": 1}, os.fsencode(tmp_path / "d"))

    def broken(self, out, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ReadFile, "read_into", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        shardkeep.open(tmp_path / "c")


def test_huge_integers_as_keys(tmp_path):
    with pytest.raises(UnsupportedValueError, match="4096"):
        shardkeep.save({10**6000: np.ones(1)}, tmp_path)
    state = {10**1500: np.ones(1), "a": {-(10**2000): 2}}
    shardkeep.save(state, tmp_path)
    assert shardkeep.open(tmp_path).state_dict()["a"] == state["a"]


def test_a_view_of_no_dimensions_as_torch(tmp_path):
    shardkeep.save({"x": np.float32(3) + np.zeros(()), "y": np.ones(3)}, tmp_path)
    assert shardkeep.open(tmp_path)["y"].torch(1).shape == ()
    assert shardkeep.open(tmp_path)["y"].torch().shape == (3,)


@pytest.mark.parametrize("replicas", [(5, 9), (1, 2), (0, 1, 7)])
def test_declared_replicas_must_make_sense(tmp_path, replicas):
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.save(
            {"x": ShardedArray.from_local(np.ones(4), (0,), (4,), replicas=replicas)},
            tmp_path,
            process_group=c,
        )
    )
    assert all(isinstance(outcome, PlanError) for outcome in outcomes)


def test_a_saver_that_was_collected_learns_it_at_once(tmp_path, monkeypatch):
    from shardkeep.formats.native import writer as module

    real = module.wait_visible

    def collected(store, sizes, lease, **rest):
        shardkeep.gc(tmp_path, stale_s=0)
        return real(store, sizes, lease, **rest)

    monkeypatch.setattr(module, "wait_visible", collected)
    begun = time.monotonic()
    with pytest.raises(StorageError, match="collected"):
        shardkeep.save({"x": 1}, tmp_path)
    assert time.monotonic() - begun < 20


def test_ranks_that_ask_for_different_keys(tmp_path):
    shardkeep.save({"m": {"a": 1, "b": 2}}, tmp_path)
    outcomes = ThreadRanks(2).outcomes(
        lambda c: shardkeep.load(
            {"m": {"a": 0, "b": 0}}, tmp_path, keys=["m.a", "m.b"][: c.rank + 1], process_group=c
        )
    )
    assert all(isinstance(o, PlanError) and "keys" in str(o) for o in outcomes)
