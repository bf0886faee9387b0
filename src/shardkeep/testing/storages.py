# SPDX-License-Identifier: Apache-2.0
"""What every storage must do, as tests: subclass `StorageTests` and give it your two classes.

    class TestMine(StorageTests):
        def make_writer(self, path, **options):
            return MyWriter(path, **options)

        def make_reader(self, path):
            return MyReader(path)

A storage that passes works under `shardkeep.save` and `shardkeep.load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardkeep.arrays import Sink
from shardkeep.checkpointer import Checkpointer
from shardkeep.coordination import Coordinator
from shardkeep.default_load_planner import DefaultLoadPlanner
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    PlanError,
)
from shardkeep.functions import load, save
from shardkeep.loading import LoadResult
from shardkeep.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from shardkeep.per_rank import PerRank
from shardkeep.planner import Place, ReadItem, SavePlan, WriteItem
from shardkeep.saving import SaveResult
from shardkeep.sharding import ShardedArray
from shardkeep.storage import StorageReader, StorageWriter, WriteResult
from shardkeep.thread_ranks import ThreadRanks

__all__ = ["StorageTests"]

Array = Any
KINDS = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


class _Save:
    """A save of one process, step by step."""

    STEPS = ("set_up", "plan", "write", "finish", "settle")

    def __init__(self, writer: StorageWriter, state: object) -> None:
        self.writer = writer
        self.planner = DefaultSavePlanner()
        self.state = state
        self.plan: SavePlan
        self.metadata: Metadata
        self.final: Metadata
        self.results: list[WriteResult] = []

    def set_up(self) -> None:
        self.writer.reset()
        self.writer.set_up_storage_writer(Place())

    def plan_all(self) -> None:
        self.planner.set_up_planner(self.state, self.writer.storage_meta(), Place())
        local = self.writer.prepare_local_plan(self.planner.create_local_plan())
        plans, self.metadata = self.planner.create_global_plan([local])
        (plan,) = self.writer.prepare_global_plan(plans, self.metadata)
        self.plan = self.planner.finish_plan(plan)

    def write(self) -> None:
        self.results = self.writer.write_data(self.plan, self.planner)

    def finish(self) -> None:
        self.final = self.writer.finish(self.metadata, [self.results])

    def run(self, until: str = "settle") -> _Save:
        """Everything up to and including a step."""
        calls = (self.set_up, self.plan_all, self.write, self.finish, self.writer.settle)
        for step, call in zip(self.STEPS, calls, strict=True):
            call()
            if step == until:
                break
        return self


class _Failing(DefaultSavePlanner):
    """A planner whose n-th item cannot be had."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.left = number

    def resolve_data(self, write_item: WriteItem) -> Any:
        if self.left == 0:
            raise PlanError("this item cannot be had")
        self.left -= 1
        return super().resolve_data(write_item)


def _state(fill: int = 0) -> dict[str, Any]:
    """Tensors of every kind and size, values of several."""
    rng = np.random.default_rng(fill)
    return {
        "model": {
            "w": rng.standard_normal((16, 33)),
            "b": rng.integers(0, 100, 7, np.int8),
            "scalar": np.array(fill, np.float32),
            "none": np.zeros((4, 0, 2), np.int16),
        },
        "opt": {0: {"m": rng.standard_normal(5).astype(np.float16)}, 1: {"m": np.ones(1)}},
        "step": fill,
        "text": "größe",
        "more": {"list": [1, "two", None, 2.5], "bytes": b"\x00\xff", "empty": {}},
    }


def _blank(state: Any) -> Any:
    """The same nesting, holding something else."""
    if isinstance(state, dict):
        return {key: _blank(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return np.full(state.shape, 1, state.dtype)
    return "not loaded"


def _assert_same(a: Any, b: Any, where: str = "") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            _assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, where
        assert a.shape == b.shape, where
        assert a.tobytes() == b.tobytes(), where
    else:
        assert a == b, where


def _rows(whole: Array, rank: int, world: int) -> ShardedArray:
    """This rank's rows of an uneven split."""
    edges = [len(whole) * r // world for r in range(world + 1)]
    part = whole[edges[rank] : edges[rank + 1]].copy()
    return ShardedArray.from_local(part, (edges[rank], *(0,) * (whole.ndim - 1)), whole.shape)


def _columns(whole: Array, rank: int, world: int) -> ShardedArray:
    """This rank's columns, likewise."""
    edges = [whole.shape[1] * r // world for r in range(world + 1)]
    part = whole[:, edges[rank] : edges[rank + 1]].copy()
    return ShardedArray.from_local(part, (0, edges[rank]), whole.shape)


class StorageTests(ABC):
    """The conformance suite. Every test gets a fresh temporary folder."""

    @abstractmethod
    def make_writer(self, path: Any, **options: Any) -> StorageWriter:
        """A writer for a place. Options: `overwrite=True` must let it replace what is there."""

    @abstractmethod
    def make_reader(self, path: Any) -> StorageReader:
        """A reader for a place."""

    def make_place(self, folder: Path, name: str) -> Any:
        """A checkpoint id that does not exist yet; by default a path in the temporary folder."""
        return folder / name

    # --- helpers

    def save(self, state: object, place: Any, **options: Any) -> SaveResult:
        """Save from one process."""
        writer = self.make_writer(place, **options)
        return save(state, storage_writer=writer, no_dist=True)

    def load(self, state: object, place: Any, **options: Any) -> LoadResult:
        """Load into one process."""
        return load(state, storage_reader=self.make_reader(place), no_dist=True, **options)

    def save_ranks(
        self,
        world: int,
        state: Callable[[int], object],
        place: Any,
        **options: Any,
    ) -> list[Any]:
        """Save from several ranks; returns what each got, errors included."""

        def work(ranks: Coordinator) -> SaveResult:
            writer = self.make_writer(place, **options)
            return save(state(ranks.rank), storage_writer=writer, process_group=ranks)

        return ThreadRanks(world).outcomes(work)

    def load_ranks(self, targets: list[Any], place: Any) -> list[Any]:
        """Load into several ranks, one target each; returns what each got, errors included."""

        def work(ranks: Coordinator) -> LoadResult:
            reader = self.make_reader(place)
            return load(targets[ranks.rank], storage_reader=reader, process_group=ranks)

        return ThreadRanks(len(targets)).outcomes(work)

    def assert_absent(self, place: Any) -> None:
        """No checkpoint can be seen."""
        reader = self.make_reader(place)
        try:
            with pytest.raises(CheckpointNotFoundError):
                reader.read_metadata()
        finally:
            reader.close()

    def assert_holds(self, state: Any, place: Any) -> None:
        """Exactly this state is there."""
        target = _blank(state)
        result = self.load(target, place)
        _assert_same(target, state)
        assert result.missing == result.unexpected == result.skipped == ()

    # --- round trips

    def test_round_trip(self, tmp_path: Path) -> None:
        """Everything comes back, bit for bit, into the arrays of the target."""
        place = self.make_place(tmp_path, "a")
        state = _state()
        result = self.save(state, place)
        assert result.nbytes == 16 * 33 * 8 + 7 + 4 + 5 * 2 + 8
        target = _blank(state)
        held = target["model"]["w"]
        loaded = self.load(target, place)
        _assert_same(target, state)
        assert target["model"]["w"] is held
        assert loaded.nbytes == result.nbytes

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind(self, tmp_path: Path, kind: str) -> None:
        """Every bit pattern of numpy's types survives."""
        raw = np.random.default_rng(1).integers(0, 256, 16 * 24, np.uint8)
        array = (raw % 2).astype(kind) if kind == "bool" else raw.view(kind)
        place = self.make_place(tmp_path, "a")
        state = {"x": array, "strided": array[::-3], "one": array[:1].reshape(())}
        self.save(state, place)
        self.assert_holds({key: np.array(value) for key, value in state.items()}, place)

    def test_empty_state(self, tmp_path: Path) -> None:
        """A checkpoint of nothing is a checkpoint."""
        place = self.make_place(tmp_path, "a")
        assert self.save({}, place).nbytes == 0
        self.assert_holds({}, place)

    def test_values_only(self, tmp_path: Path) -> None:
        """No tensor at all."""
        place = self.make_place(tmp_path, "a")
        state = {"a": 1, "b": {"c": "x", "d": None}, "e": [b"", 2**70, float("inf")]}
        self.save(state, place)
        self.assert_holds(state, place)

    def test_zero_size_tensors(self, tmp_path: Path) -> None:
        """Tensors without elements keep shape and dtype."""
        place = self.make_place(tmp_path, "a")
        state = {"a": np.zeros((0,)), "b": {"c": np.zeros((3, 0, 5), np.int8)}}
        self.save(state, place)
        self.assert_holds(state, place)
        with pytest.raises(CheckpointError):
            self.load({"a": np.zeros((0, 1)), "b": {"c": np.zeros((3, 0, 5), np.int8)}}, place)

    def test_many_small_tensors(self, tmp_path: Path) -> None:
        """Hundreds of names."""
        place = self.make_place(tmp_path, "a")
        state = {"m": {f"layer.{i}": np.full(i % 5, i, np.int32) for i in range(300)}}
        self.save(state, place)
        self.assert_holds(state, place)

    def test_larger_than_a_buffer(self, tmp_path: Path) -> None:
        """A tensor of several megabytes, cut anywhere inside."""
        place = self.make_place(tmp_path, "a")
        state = {"big": np.random.default_rng(2).standard_normal((1031, 1021)), "s": np.ones(3)}
        self.save(state, place)
        self.assert_holds(state, place)

    def test_awkward_names(self, tmp_path: Path) -> None:
        """Names are anything that is valid Unicode; they are no paths."""
        place = self.make_place(tmp_path, "a")
        names = [
            "../x",
            "/etc",
            "a/b",
            "a.b",
            "",
            " ",
            "ü",
            "重み",
            '"',
            "\\",
            "\n",
            "\0",
            "x" * 900,
        ]
        state = {
            "m": {name: np.full(2, i) for i, name in enumerate(names)},
            "v": dict.fromkeys(names),
        }
        self.save(state, place)
        with_values = _blank(state)
        self.load(with_values, place)
        _assert_same(with_values, state)

    # --- several ranks

    @pytest.mark.parametrize(("saved", "loaded"), [(1, 3), (2, 2), (3, 2), (4, 1), (5, 7)])
    def test_resharding(self, tmp_path: Path, saved: int, loaded: int) -> None:
        """Saved by rows on some ranks, loaded by columns on others."""
        place = self.make_place(tmp_path, "a")
        whole = np.random.default_rng(3).standard_normal((11, 13))

        def state(rank: int) -> dict[str, Any]:
            return {"w": _rows(whole, rank, saved), "same": np.arange(5), "step": 3}

        results = self.save_ranks(saved, state, place)
        assert all(isinstance(r, SaveResult) for r in results), results
        assert len({(r.nbytes, r.save_id) for r in results}) == 1
        blank = np.zeros_like(whole)
        targets: list[dict[str, Any]] = [
            {"w": _columns(blank, rank, loaded), "same": np.zeros(5, int), "step": 0}
            for rank in range(loaded)
        ]
        got = self.load_ranks(targets, place)
        assert all(isinstance(r, LoadResult) for r in got), got
        for rank, target in enumerate(targets):
            expected: Any = _columns(whole, rank, loaded).local_shards[0].array
            assert np.array_equal(target["w"].local_shards[0].array, expected)
            assert target["same"].tolist() == [0, 1, 2, 3, 4]
            assert target["step"] == 3

    def test_state_of_its_own_on_each_rank(self, tmp_path: Path) -> None:
        """Names that only one rank has, and values kept per rank."""
        place = self.make_place(tmp_path, "a")

        def state(rank: int, fill: int) -> dict[str, Any]:
            return {
                "stage": {f"layer{rank}": np.full(3, fill), f"v{rank}": fill},
                "rng": PerRank({"seed": fill, "at": np.full(2, fill)}),
            }

        results = self.save_ranks(3, lambda rank: state(rank, rank + 10), place)
        assert all(isinstance(r, SaveResult) for r in results), results
        targets = [state(rank, 0) for rank in range(3)]
        got = self.load_ranks(targets, place)
        assert all(isinstance(r, LoadResult) for r in got), got
        for rank, target in enumerate(targets):
            _assert_same(target["stage"], state(rank, rank + 10)["stage"])
            _assert_same(target["rng"].value, {"seed": rank + 10, "at": np.full(2, rank + 10)})

    def test_state_of_its_own_on_other_ranks(self, tmp_path: Path) -> None:
        """What each rank kept is read by ranks of another number: some of it, or all."""
        place = self.make_place(tmp_path, "a")
        own = [{"seed": rank, "at": np.full(2, rank)} for rank in range(3)]
        results = self.save_ranks(3, lambda rank: {"own": PerRank(own[rank]), "x": 5}, place)
        assert all(isinstance(r, SaveResult) for r in results), results

        def resize(saved: Sequence[Any], rank: int, world_size: int) -> dict[str, Any]:
            return {"last": saved[-1], "all": list(saved), "rank": rank, "of": world_size}

        targets: list[dict[str, Any]] = [
            {"own": PerRank({}, resize=resize), "x": 0} for _ in range(2)
        ]
        got = self.load_ranks(targets, place)
        assert all(isinstance(r, LoadResult) for r in got), got
        for rank, target in enumerate(targets):
            got_all = dict(enumerate(target["own"].value.pop("all")))
            _assert_same(target["own"].value, {"last": own[2], "rank": rank, "of": 2})
            _assert_same(got_all, dict(enumerate(own)))
            assert target["x"] == 5

    @pytest.mark.parametrize("world", [1, 3])
    def test_in_the_background(self, tmp_path: Path, world: int) -> None:
        """What is stored is what was there when the save began, chunk by chunk."""
        place = self.make_place(tmp_path, "a")
        whole = np.arange(60.0).reshape(10, 6)

        def work(ranks: Coordinator) -> None:
            part = _rows(whole, ranks.rank, world)
            writer = self.make_writer(place)
            with Checkpointer(process_group=ranks) as keeper:
                handle = keeper.async_save({"w": part, "step": 3}, storage_writer=writer)
                for shard in part.local_shards:
                    held: Any = shard.array
                    held[...] = -1
                assert handle.result().nbytes == whole.nbytes

        assert ThreadRanks(world).outcomes(work) == [None] * world
        self.assert_holds({"w": whole, "step": 3}, place)

    def test_cancelled_in_the_background(self, tmp_path: Path) -> None:
        """Nothing can be seen of it, or all of it; the next one works."""
        place = self.make_place(tmp_path, "a")
        with Checkpointer(no_dist=True) as keeper:
            handle = keeper.async_save(_state(1), storage_writer=self.make_writer(place))
            handle.cancel()
            keeper.close()
            if handle.cancelled():
                self.assert_absent(place)
            writer = self.make_writer(place, overwrite=True)
            keeper.async_save(_state(2), storage_writer=writer).result()
        self.assert_holds(_state(2), place)

    def test_a_rank_with_nothing(self, tmp_path: Path) -> None:
        """Ranks that hold nothing take part all the same."""
        place = self.make_place(tmp_path, "a")
        results = self.save_ranks(3, lambda rank: {"a": np.ones(2)} if rank == 1 else {}, place)
        assert all(isinstance(r, SaveResult) for r in results), results
        self.assert_holds({"a": np.ones(2)}, place)

    def test_failure_of_one_rank(self, tmp_path: Path) -> None:
        """One rank's state cannot be stored: all ranks fail, and nothing is there."""
        place = self.make_place(tmp_path, "a")
        found = self.save_ranks(
            3, lambda rank: {"a": np.ones(2), f"x{rank}": rank or object()}, place
        )
        assert all(isinstance(error, CheckpointError) for error in found), found
        self.assert_absent(place)

    def test_announcement_of_the_writer(self, tmp_path: Path) -> None:
        """What the coordinator returns from set-up is all that other ranks need."""
        place = self.make_place(tmp_path, "a")
        first, second = self.make_writer(place), self.make_writer(place)
        word = first.set_up_storage_writer(Place(0, 2))
        assert isinstance(word, bytes)
        second.set_up_storage_writer(Place(1, 2), word)
        second.abort()
        first.abort()
        self.assert_absent(place)

    def test_a_rank_that_sees_another_storage(self, tmp_path: Path) -> None:
        """A directory that is not shared is found at set-up, before data is written."""
        first = self.make_writer(self.make_place(tmp_path, "a"))
        second = self.make_writer(self.make_place(tmp_path, "b"))
        word = first.set_up_storage_writer(Place(0, 2))
        with pytest.raises(CheckpointError):
            second.set_up_storage_writer(Place(1, 2), word)
        second.abort()
        first.abort()
        self.assert_absent(self.make_place(tmp_path, "a"))
        self.assert_absent(self.make_place(tmp_path, "b"))

    def test_announcement_of_the_reader(self, tmp_path: Path) -> None:
        """Other ranks read what the coordinator read, even if it was replaced in between."""
        place = self.make_place(tmp_path, "a")
        self.save(_state(), place)
        first, second = self.make_reader(place), self.make_reader(place)
        try:
            read = first.read_metadata()
            word = first.announcement()
            assert isinstance(word, bytes)
            other = second.read_metadata(word)
            assert set(other.state_dict_metadata) == set(read.state_dict_metadata)
            assert other.storage_meta == read.storage_meta
        finally:
            first.close()
            second.close()

    # --- whole or absent

    def test_nothing_before_finish(self, tmp_path: Path) -> None:
        """The checkpoint exists once `finish` returns, and not a step earlier."""
        place = self.make_place(tmp_path, "a")
        self.assert_absent(place)
        step = _Save(self.make_writer(place), _state(1))
        for call in (step.set_up, step.plan_all, step.write):
            call()
            self.assert_absent(place)
        step.finish()
        self.assert_holds(_state(1), place)
        step.writer.settle()
        self.assert_holds(_state(1), place)

    def test_the_old_one_until_finish(self, tmp_path: Path) -> None:
        """While it is being replaced, the earlier checkpoint is there and whole."""
        place = self.make_place(tmp_path, "a")
        self.save(_state(1), place)
        step = _Save(self.make_writer(place, overwrite=True), _state(2))
        for call in (step.set_up, step.plan_all, step.write):
            call()
            self.assert_holds(_state(1), place)
        step.finish()
        self.assert_holds(_state(2), place)
        step.writer.settle()
        self.assert_holds(_state(2), place)

    @pytest.mark.parametrize("until", ["set_up", "plan", "write"])
    def test_abort_leaves_nothing(self, tmp_path: Path, until: str) -> None:
        """After an error nothing is there, and the next save works."""
        place = self.make_place(tmp_path, "a")
        step = _Save(self.make_writer(place), _state(1)).run(until)
        step.writer.abort()
        self.assert_absent(place)
        step.writer.abort()  # a second time does no harm
        self.save(_state(2), place)
        self.assert_holds(_state(2), place)

    @pytest.mark.parametrize("until", ["set_up", "plan", "write"])
    def test_abort_keeps_the_earlier_one(self, tmp_path: Path, until: str) -> None:
        """A failed overwrite changes nothing."""
        place = self.make_place(tmp_path, "a")
        self.save(_state(1), place)
        step = _Save(self.make_writer(place, overwrite=True), _state(2)).run(until)
        step.writer.abort()
        self.assert_holds(_state(1), place)

    def test_abort_before_anything(self, tmp_path: Path) -> None:
        """`abort` must not raise, whatever has happened so far."""
        place = self.make_place(tmp_path, "a")
        writer = self.make_writer(place)
        writer.abort()
        writer.abort(committing=True)
        self.assert_absent(place)

    def test_abort_after_finish_keeps_the_new_one(self, tmp_path: Path) -> None:
        """An error after the commit must not take the checkpoint away."""
        place = self.make_place(tmp_path, "a")
        step = _Save(self.make_writer(place), _state(1)).run("finish")
        step.writer.abort(committing=True)
        self.assert_holds(_state(1), place)

    @pytest.mark.parametrize("number", range(8))
    def test_items_that_cannot_be_had(self, tmp_path: Path, number: int) -> None:
        """An error from the planner, at any item, fails the save and leaves nothing."""
        place = self.make_place(tmp_path, "a")
        with pytest.raises(PlanError):
            save(
                _state(),
                storage_writer=self.make_writer(place),
                planner=_Failing(number),
                no_dist=True,
            )
        self.assert_absent(place)

    def test_existing_is_refused(self, tmp_path: Path) -> None:
        """Without `overwrite` the earlier checkpoint stays, and the save fails on every rank."""
        place = self.make_place(tmp_path, "a")
        self.save(_state(1), place)
        with pytest.raises(CheckpointExistsError):
            self.save(_state(2), place)
        found = self.save_ranks(2, lambda rank: {"r": np.zeros(2)}, place)
        assert all(isinstance(error, CheckpointExistsError) for error in found), found
        self.assert_holds(_state(1), place)

    def test_two_savers_of_one_place(self, tmp_path: Path) -> None:
        """Of two saves that both found the place free, one is committed and the other fails."""
        place = self.make_place(tmp_path, "a")
        one = _Save(self.make_writer(place), _state(1)).run("write")
        two = _Save(self.make_writer(place), _state(2)).run("write")
        one.finish()
        with pytest.raises(CheckpointExistsError):
            two.finish()
        two.writer.abort(committing=True)
        one.writer.settle()
        self.assert_holds(_state(1), place)

    def test_overwrite(self, tmp_path: Path) -> None:
        """Replaced whole: by other names, other shapes, and by fewer ranks."""
        place = self.make_place(tmp_path, "a")
        whole = np.arange(12.0)
        first = self.save_ranks(4, lambda rank: {"w": _rows(whole, rank, 4), "old": 1}, place)
        assert all(isinstance(r, SaveResult) for r in first), first
        second = self.save(_state(2), place, overwrite=True)
        assert second.save_id != first[0].save_id or not second.save_id
        self.assert_holds(_state(2), place)
        self.save({}, place, overwrite=True)
        self.assert_holds({}, place)

    def test_overwrite_of_nothing(self, tmp_path: Path) -> None:
        """`overwrite` does not need anything to be there."""
        place = self.make_place(tmp_path, "a")
        self.save(_state(), place, overwrite=True)
        self.assert_holds(_state(), place)

    def test_a_reader_whose_checkpoint_is_replaced(self, tmp_path: Path) -> None:
        """It reads the old one or says so; never a mixture."""
        place = self.make_place(tmp_path, "a")
        self.save({"a": np.zeros(4000), "b": np.zeros(4000)}, place)
        reader = self.make_reader(place)
        target = {"a": np.full(4000, 7.0), "b": np.full(4000, 7.0)}
        planner = DefaultLoadPlanner()
        try:
            planner.set_up_planner(target, reader.read_metadata(), Place())
            self.save({"a": np.ones(4000), "b": np.ones(4000)}, place, overwrite=True)
            plan = reader.prepare_local_plan(planner.create_local_plan())
            try:
                reader.read_data(plan, planner)
            except CheckpointError:
                return
            assert not target["a"].any()
            assert not target["b"].any()
        finally:
            reader.close()

    # --- reading

    def test_planners_are_told_of_every_region(self, tmp_path: Path) -> None:
        """Once for each, in the sink that it was put into, when all of it is there."""
        place = self.make_place(tmp_path, "a")
        whole = np.arange(60.0).reshape(6, 10)
        results = self.save_ranks(2, lambda r: {"w": _rows(whole, r, 2), "x": np.ones(2)}, place)
        assert all(isinstance(r, SaveResult) for r in results), results
        target = {"w": np.zeros((6, 10)), "x": np.zeros(2)}
        told: list[tuple[str, Any, bool]] = []
        sinks: dict[str, Sink] = {}

        class Telling(DefaultLoadPlanner):
            def resolve_tensor(self, read_item: ReadItem) -> Sink:
                return sinks.setdefault(read_item.dest_index.fqn, super().resolve_tensor(read_item))

            def commit_tensor(self, read_item: ReadItem, tensor: Sink) -> None:
                name, low = read_item.dest_index.fqn, read_item.dest_offsets
                at = tuple(slice(o, o + n) for o, n in zip(low, read_item.lengths, strict=True))
                want = whole if name == "w" else np.ones(2)
                filled = bool((target[name][at] == want[at]).all())
                told.append((name, low, filled and tensor is sinks[name]))

        self.load(target, place, planner=Telling())
        assert sorted(told) == [("w", (0, 0), True), ("w", (3, 0), True), ("x", (0,), True)]

    def test_missing(self, tmp_path: Path) -> None:
        """A place where nothing was saved."""
        place = self.make_place(tmp_path, "nothing")
        self.assert_absent(place)
        with pytest.raises(CheckpointNotFoundError):
            self.load({"a": 1}, place)
        found = self.load_ranks([{"a": 1}, {"a": 1}], place)
        assert all(isinstance(error, CheckpointNotFoundError) for error in found), found

    def test_partial_reads(self, tmp_path: Path) -> None:
        """Some names, and boxes of tensors that start and end anywhere."""
        place = self.make_place(tmp_path, "a")
        whole = np.random.default_rng(4).standard_normal((9, 10, 11))
        results = self.save_ranks(3, lambda r: {"w": _rows(whole, r, 3), "x": np.ones(2)}, place)
        assert all(isinstance(r, SaveResult) for r in results), results
        rng = np.random.default_rng(5)
        for _ in range(25):
            low = [int(rng.integers(0, n)) for n in whole.shape]
            high = [int(rng.integers(a + 1, n + 1)) for a, n in zip(low, whole.shape, strict=True)]
            index = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
            part = np.zeros(whole[index].shape)
            target = {"w": ShardedArray.from_local(part, low, whole.shape)}
            result = self.load(target, place, keys=["w"])
            assert np.array_equal(part, whole[index])
            assert result.nbytes == part.nbytes
            assert "x" in result.skipped

    def test_mismatch_changes_nothing(self, tmp_path: Path) -> None:
        """What does not fit is refused before anything is read."""
        place = self.make_place(tmp_path, "a")
        self.save(_state(), place)
        target = _blank(_state())
        target["model"]["w"] = np.full((2, 2), 5.0)
        before = _blank(target)
        with pytest.raises(CheckpointError):
            self.load(target, place)
        target["model"]["w"] = before["model"]["w"]
        _assert_same(target, before)

    def test_metadata(self, tmp_path: Path) -> None:
        """Names, shapes, dtypes, boxes and the nesting can be told without reading data."""
        place = self.make_place(tmp_path, "a")
        whole = np.zeros((6, 4), np.float32)
        results = self.save_ranks(2, lambda r: {"m": {"w": _rows(whole, r, 2)}, "s": 1}, place)
        assert all(isinstance(r, SaveResult) for r in results), results
        reader = self.make_reader(place)
        try:
            metadata = reader.read_metadata()
            assert set(metadata.state_dict_metadata) == {"m.w", "s"}
            found = metadata.state_dict_metadata["m.w"]
            assert isinstance(found, TensorStorageMetadata)
            assert found.size == (6, 4)
            assert found.properties.dtype == "float32"
            assert list(found.chunks) == [
                ChunkStorageMetadata((0, 0), (3, 4)),
                ChunkStorageMetadata((3, 0), (3, 4)),
            ]
            assert isinstance(metadata.state_dict_metadata["s"], BytesStorageMetadata)
            assert metadata.planner_data is not None
            assert set(metadata.planner_data.names) == {"m.w", "s"}
        finally:
            reader.close()

    def test_finish_returns_what_is_read_back(self, tmp_path: Path) -> None:
        """The metadata of the writer and that of the reader agree."""
        place = self.make_place(tmp_path, "a")
        step = _Save(self.make_writer(place), _state()).run()
        reader = self.make_reader(place)
        try:
            read = reader.read_metadata()
            assert dict(read.state_dict_metadata) == dict(step.final.state_dict_metadata)
            written, found = step.final.storage_data, read.storage_data
            if written is not None and found is not None:
                assert dict(found) == dict(written)
        finally:
            reader.close()

    def test_same_content(self, tmp_path: Path) -> None:
        """Never true of tensors that differ; a storage need not know."""
        place = self.make_place(tmp_path, "a")
        self.save({"a": np.zeros(9), "b": np.ones(9), "c": np.zeros(9)}, place)
        reader = self.make_reader(place)
        try:
            reader.read_metadata()
            assert not reader.same_content("a", "b")
            assert reader.same_content("a", "c") == reader.same_content("c", "a")
        finally:
            reader.close()

    # --- objects that are used again

    def test_a_writer_used_again(self, tmp_path: Path) -> None:
        """`reset` begins another save, here or elsewhere; also after a failure."""
        first, second = (self.make_place(tmp_path, name) for name in "ab")
        writer = self.make_writer(first)
        save(_state(1), storage_writer=writer, no_dist=True)
        save(_state(2), second, storage_writer=writer, no_dist=True)
        with pytest.raises(CheckpointError):
            save(
                {"x": object()}, self.make_place(tmp_path, "c"), storage_writer=writer, no_dist=True
            )
        save(_state(3), self.make_place(tmp_path, "d"), storage_writer=writer, no_dist=True)
        self.assert_holds(_state(1), first)
        self.assert_holds(_state(2), second)
        self.assert_absent(self.make_place(tmp_path, "c"))
        self.assert_holds(_state(3), self.make_place(tmp_path, "d"))

    def test_a_reader_used_again(self, tmp_path: Path) -> None:
        """`reset` begins another load; `close` may come twice."""
        first, second = (self.make_place(tmp_path, name) for name in "ab")
        self.save(_state(1), first)
        self.save(_state(2), second)
        reader = self.make_reader(first)
        for place, fill in ((None, 1), (second, 2), (first, 1)):
            target = _blank(_state())
            load(target, place, storage_reader=reader, no_dist=True)
            _assert_same(target, _state(fill))
        reader.close()
        reader.close()

    def test_whose_checkpoint_it_is(self, tmp_path: Path) -> None:
        """Both classes know their own ids, and say so without touching anything."""
        place = self.make_place(tmp_path, "a")
        assert self.make_writer(place).validate_checkpoint_id(place) is True
        assert self.make_reader(place).validate_checkpoint_id(place) is True
        self.assert_absent(place)
