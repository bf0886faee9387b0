"""Plans used again, and undeclared replicas compared: never a byte wrong for it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardkeep
from shardkeep import (
    ChunkStorageMetadata,
    MetadataIndex,
    PerRank,
    PlanError,
    ShardedArray,
    TensorProperties,
    ThreadRanks,
    UnsupportedValueError,
)
from shardkeep.adapters import torch_tensors
from shardkeep.arrays import HostSource
from shardkeep.collector import is_collector_paused
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.formats.native.layout import Limits
from shardkeep.groups import coordinator_for
from shardkeep.planner import (
    BytesWriteData,
    Place,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItems,
)
from shardkeep.values import encode_value

W = np.arange(6.0)


@pytest.fixture(autouse=True)
def no_plan_before():
    shardkeep.flush()
    yield
    shardkeep.flush()


class Saver:
    """Saves states one after the other, each into a place of its own, and reads them back."""

    def __init__(self, path):
        self.path = path
        self.count = 0

    def __call__(self, state, **options):
        self.count += 1
        self.at = self.path / str(self.count)
        result = shardkeep.save(state, self.at, **options)
        return bool(result.stats["plan_reused"])

    def stored(self):
        return shardkeep.open(self.at).state_dict()


@pytest.fixture
def saver(tmp_path):
    return Saver(tmp_path)


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return same(a.detach().clone().numpy(), b)  # of a copy: torch resizes no array's memory
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == np.asarray(b).tobytes()
    return a == b


# --- the same plan again --------------------------------------------------------------------------


def training_state():
    model = OrderedDict(w=torch.ones(4, 3), b=torch.zeros(3))
    return {
        "model": model,
        "optimizer": {"state": {0: {"m": torch.ones(4, 3)}, 1: {"m": torch.ones(3)}}, "lr": [0.1]},
        "mask": np.arange(5),
        "step": 1,
    }


def test_new_contents_need_no_new_plan(saver):
    state = training_state()
    assert not saver(state)
    for step in range(2, 5):
        state["step"] = step
        state["optimizer"]["lr"] = [0.1 / step, "text"]
        state["model"]["w"] += step
        state["mask"][:] = step
        assert saver(state)
        assert same(state, saver.stored())


def test_new_objects_of_the_same_form_need_no_new_plan(saver):
    assert not saver(training_state())
    state = training_state()
    state["model"]["w"] *= 7
    assert saver(state)
    assert same(state, saver.stored())
    assert saver(state)
    assert same(state, saver.stored())


def test_objects_that_make_their_state_anew(saver):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    reused = []
    for step in range(4):
        state["step"] = step
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        reused.append(saver(state))
        stored = saver.stored()
        assert same(dict(model.state_dict()), dict(stored["model"]))
        assert stored["step"] == step
    assert reused == [False, True, True, True]


def test_the_memory_holds_no_tensor(saver):
    state = {"w": torch.ones(1000), "n": np.ones(3)}
    saver(state)
    assert saver(state)
    tensor, array = weakref.ref(state["w"]), weakref.ref(state["n"])
    del state
    gc.collect()
    assert tensor() is None
    assert array() is None


# --- what makes a plan stale ----------------------------------------------------------------------


def as_tensor(value):
    if not isinstance(value, torch.Tensor):
        raise TypeError  # numpy's arrays would take the memory of a tensor as theirs
    return value


def swap_data(state):
    as_tensor(state["a"]).data = torch.arange(7.0)


def swap_dtype(state):
    tensor = as_tensor(state["a"])
    tensor.data = tensor.data.to(torch.float64)


def resize(state):
    state["a"].resize_(2, 2).fill_(5)


def replace(state):
    state["a"] = torch.arange(7)


def add(state):
    state["c"] = torch.ones(2)


def remove(state):
    del state["b"]


def reorder(state):
    state["a"] = state.pop("a")


def rename(state):
    state["d"] = state.pop("a")


def untie(state):
    as_tensor(state["tied"]).data = torch.full((3,), 9.0)


def untie_by_copy(state):
    state["tied"] = state["tied"].clone() + 1


def tie(state):
    state["a"] = state["b"]


def tie_in_place(state):
    as_tensor(state["a"]).data = as_tensor(state["b"]).data


def array_to_value(state):
    state["a"] = 3


def value_to_array(state):
    state["v"] = torch.ones(2)


def value_to_arrays(state):
    state["v"] = [torch.ones(2), torch.zeros(3)]


def value_to_dict(state):
    state["v"] = {"x": 1}


def numpy_in_place(state):
    state["n"].resize((9,), refcheck=False)
    state["n"][:] = 4


def numpy_dtype(state):
    state["n"].dtype = np.int32


def another_class(state):
    state["a"] = np.ones(3, np.float32)


CHANGES = [
    *(swap_data, swap_dtype, resize, replace, add, remove, reorder, rename, untie, untie_by_copy),
    *(
        tie,
        tie_in_place,
        array_to_value,
        value_to_array,
        value_to_arrays,
        value_to_dict,
        numpy_in_place,
    ),
    *(numpy_dtype, another_class),
]


def mixed_state():
    tied = torch.arange(3.0)
    return {
        "a": torch.arange(3.0),
        "b": torch.ones(3),
        "tied": tied,
        "other": tied.view(3),
        "n": np.arange(4),
        "v": [1, 2],
    }


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_state_is_stored_as_it_is(saver, change):
    state = mixed_state()
    assert not saver(state)
    assert saver(state)
    change(state)
    reused = saver(state)
    assert same(state, saver.stored())
    assert reused == (change is tie_in_place)  # stored twice then, and no byte is wrong
    assert saver(state)
    assert same(state, saver.stored())


@given(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=6), st.booleans())
def test_any_changes_in_any_order(tmp_path_factory, changes, alone):
    shardkeep.flush()
    saver = Saver(tmp_path_factory.mktemp("any"))
    states = {"x": mixed_state(), "y": [mixed_state(), {"deep": mixed_state()}]}
    saver(states)
    for change in changes:
        for state in (states["x"], states["y"][0], states["y"][1]["deep"])[: 1 if alone else 3]:
            try:
                change(state)
            except (KeyError, AttributeError, TypeError, ValueError, RuntimeError):
                continue
        saver(states)
        assert same(states, saver.stored())


def test_a_gradient_flag_that_changed_is_recorded(saver):
    state = {"w": torch.ones(3)}
    saver(state)
    state["w"].requires_grad_(True)
    assert not saver(state)
    assert shardkeep.open(saver.at)["w"].metadata.properties.requires_grad


def test_keys_that_python_calls_equal(saver):
    first, second = {1: torch.ones(2)}, {True: torch.zeros(2)}
    saver(first)
    assert not saver(second)
    assert type(next(iter(saver.stored()))) is bool
    assert not saver({1.0: torch.zeros(2)})
    assert type(next(iter(saver.stored()))) is float


@pytest.mark.parametrize("shape", [(0,), (3,)])
def test_another_object_where_the_last_one_was(saver, shape):
    for dtype in (torch.float32, torch.float64, torch.int8, torch.complex64, torch.bfloat16):
        state = {"w": torch.ones(shape, dtype=dtype)}
        saver(state)
        assert shardkeep.open(saver.at)["w"].dtype == str(dtype).removeprefix("torch.")
        del state


def test_an_empty_tensor_that_was_changed_in_place(saver):
    state = {"w": torch.ones(0)}
    saver(state)
    state["w"].data = torch.ones(2, 0, dtype=torch.int8)
    assert not saver(state)
    assert shardkeep.open(saver.at)["w"].shape == (2, 0)


def test_one_of_many_that_was_changed_in_place_is_found_when_it_is_reached(saver):
    """Arrays are asked some at a time, as they are written: what was written of the stale plan by
    then is given up."""
    state = {str(number): torch.full((3,), number) for number in range(700)}
    saver(state)
    last = state["699"]
    last.data = torch.arange(7.0)
    assert not saver(state)
    assert same(state, saver.stored())
    assert saver(state)


def test_a_saved_tensor_can_still_be_resized(saver):
    state = {"w": torch.ones(3)}
    saver(state)
    state["w"].resize_(100).fill_(2)
    saver(state)
    assert same(state, saver.stored())


def test_shard_fields_that_were_set_later(saver):
    tensor = torch.arange(4.0)
    state = {"w": tensor}
    saver(state)
    tensor.global_shape, tensor.global_offsets = (4,), [(0,), (2,)]
    tensor.local_offsets, tensor.local_sizes = [(0,), (2,)], [(2,), (2,)]
    assert not saver(state)
    assert same(torch.arange(4.0), saver.stored()["w"])


def test_a_value_that_cannot_be_stored_fails_again_and_nothing_is_lost(saver):
    state = {"w": torch.ones(2), "v": 1}
    saver(state)
    state["v"] = object()
    with pytest.raises(UnsupportedValueError, match="v"):
        saver(state)
    state["v"] = 2
    assert saver(state)
    assert saver.stored()["v"] == 2


def test_options_that_change_the_layout(saver):
    state = {"w": torch.ones(2)}
    saver(state)
    assert not saver(state, check_replicas="off")
    limits = Limits(payload=4)
    assert not saver(state, storage_writer=shardkeep.NativeWriter(limits=limits))
    assert saver(state, storage_writer=shardkeep.NativeWriter(limits=limits))


def test_flush_forgets(saver):
    state = {"w": torch.ones(2)}
    saver(state)
    assert coordinator_for().memory
    shardkeep.flush()
    assert not saver(state)


# --- many ranks -----------------------------------------------------------------------------------


def on_ranks(world, work):
    return ThreadRanks(world).run(work)


def test_few_bytes_travel_the_second_time(tmp_path):
    whole = np.arange(64.0).reshape(16, 4)

    def work(ranks):
        rank = ranks.rank
        state = {
            f"t{n}": ShardedArray.from_local(whole[rank * 4 : rank * 4 + 4], (rank * 4, 0), (16, 4))
            for n in range(200)
        } | {"same": W.copy(), "rng": PerRank(rank), "step": 1}
        out = []
        for step in range(3):
            state["step"] = step
            state["same"] += 1
            out.append(shardkeep.save(state, tmp_path / str(step), process_group=ranks).stats)
        return out

    for first, second, third in on_ranks(4, work):
        assert [s["plan_reused"] for s in (first, second, third)] == [0, 1, 1]
        assert second["plan_sent"] + second["plan_received"] < 256
        assert first["plan_sent"] > 4096
    found = shardkeep.open(tmp_path / "2")
    assert found["step"] == 2
    assert same(W + 3, found["same"][...])
    assert same(whole, found["t199"][...])


def test_few_bytes_travel_where_nothing_is_shared(tmp_path):
    def work(ranks):
        state = {f"t{n}": PerRank(np.full(3, n)) for n in range(50)}
        saves = (shardkeep.save(state, tmp_path / p, process_group=ranks).stats for p in "ab")
        return [stats["plan_sent"] + stats["plan_received"] for stats in saves]

    for first, second in on_ranks(2, work):
        assert first > 1024
        assert second < 64


def test_one_rank_that_changed_makes_all_plan_anew(tmp_path):
    def work(ranks):
        state = {"mine": PerRank(np.ones(3)), "same": W.copy()}
        out = []
        for step in range(3):
            if step == 1 and ranks.rank == 1:
                state["mine"] = PerRank(np.ones(5))
            out.append(shardkeep.save(state, tmp_path / str(step), process_group=ranks).stats)
        return [stats["plan_reused"] for stats in out]

    assert on_ranks(3, work) == [[0, 0, 1]] * 3
    found = shardkeep.open(tmp_path / "2")
    assert [found[f"mine.{rank}"].shape for rank in range(3)] == [(3,), (5,), (3,)]


def test_an_array_that_one_rank_changed_in_place_is_found_while_writing(tmp_path):
    def work(ranks):
        mine = torch.full((3,), float(ranks.rank))
        state = {"mine": PerRank(mine)}
        out = []
        for step in range(3):
            if step == 1 and ranks.rank == 2:
                mine.data = torch.full((4,), 7.0)
            out.append(shardkeep.save(state, tmp_path / str(step), process_group=ranks).stats)
        return [stats["plan_reused"] for stats in out]

    assert on_ranks(3, work) == [[0, 0, 1]] * 3
    found = shardkeep.open(tmp_path / "2")
    assert same(torch.full((4,), 7.0), found["mine.2"][...])
    assert not shardkeep.gc(tmp_path / "1").removed
    assert shardkeep.verify(tmp_path / "1").ok


def test_a_shared_array_changed_in_place_on_all_ranks(tmp_path):
    def work(ranks):
        shared = torch.ones(3)
        state = {"shared": shared, "alike": torch.zeros(3)}
        shardkeep.save(state, tmp_path / "0", process_group=ranks)
        shared.data = torch.full((5,), 2.0)
        return shardkeep.save(state, tmp_path / "1", process_group=ranks).stats["plan_reused"]

    assert on_ranks(2, work) == [0, 0]
    found = shardkeep.open(tmp_path / "1")
    assert same(torch.full((5,), 2.0), found["shared"][...])
    assert same(torch.zeros(3), found["alike"][...])


def test_arrays_that_are_known_are_looked_at_without_collections(monkeypatch):
    """Each would look at all that the program holds, while the caller waits."""
    state = {"a": torch.zeros(2), "b": torch.zeros(3)}
    first, again = DefaultSavePlanner(), DefaultSavePlanner()
    first.set_up_planner(state)
    items = WriteItems.of(first.create_local_plan().items)
    first.take_trace(state)
    assert again.recognise(state, Place(), first.look)
    assert again.is_trusting
    seen = {}
    for name in ("glances", "host_addresses"):
        ask = getattr(torch_tensors.ADAPTER, name)

        def asked(*columns, name=name, ask=ask):
            seen[name] = is_collector_paused()
            return ask(*columns)

        monkeypatch.setattr(torch_tensors.ADAPTER, name, asked)
    rows = np.arange(len(items.chunks))
    again.check_sources(items, rows)
    assert again.addresses(items, rows).all()
    assert seen == {"glances": True, "host_addresses": True}
    assert not is_collector_paused()


def test_what_is_kept_of_tensors_alike_is_kept_once():
    """Else a hundred thousand small tensors keep 26 MB more from one save to the next."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({**{str(n): torch.zeros(2) for n in range(9)}, "other": torch.zeros(3)})
    planner.create_local_plan()
    look = planner.look
    assert len(look.glances) == 10
    assert len({id(glance) for glance in look.glances}) == len(look.forms) == 2


def test_a_plan_that_failed_leaves_nothing_of_it_behind(tmp_path):
    """A rank that recognised its arrays takes part in a plan that fails; then all is as before."""

    def work(ranks):
        state = {"a": torch.full((8,), 1.0)}
        state |= {n: torch.full((8,), float(i)).requires_grad_() for i, n in enumerate("bcd", 2)}
        options = {"process_group": ranks, "check_replicas": "off"}
        shardkeep.save(state, tmp_path / "1", **options)
        kept = state["a"].data
        if ranks.rank == 0:
            state["a"].data = torch.empty(0)
        if ranks.rank == 1:
            state["e"] = torch.zeros(1)
        with pytest.raises(PlanError, match="a: shape"):
            shardkeep.save(state, tmp_path / "2", **options)
        if ranks.rank == 0:
            state["a"].data = kept
        if ranks.rank == 1:
            del state["e"]
        for number in (3, 4):
            shardkeep.save(state, tmp_path / str(number), **options)

    on_ranks(2, work)
    for number in (1, 3, 4):
        found = shardkeep.open(tmp_path / str(number))
        assert [float(found[name][...][0]) for name in "abcd"] == [1, 2, 3, 4]


def test_a_rank_that_never_proposes_does_not_spoil_the_plans_of_others(tmp_path):
    def work(ranks):
        state = {"a": torch.ones(4), "b": torch.ones(4) * 2}
        if ranks.rank == 1:
            state["extra"] = {1.5: 0}
        for number in range(4):
            if number == 2:
                state["a"].data = torch.ones(8)
            shardkeep.save(state, tmp_path / str(number), process_group=ranks)

    on_ranks(2, work)
    assert shardkeep.open(tmp_path / "3")["a"].shape == (8,)
    assert shardkeep.open(tmp_path / "3")["b"].shape == (4,)


def test_torch_may_swap_what_was_saved(saver):
    state = {"w": torch.ones(3)}
    saver(state)
    torch.utils.swap_tensors(state["w"], torch.zeros(5))
    saver(state)
    assert same(torch.zeros(5), saver.stored()["w"])


def test_memory_formats_are_told_apart(saver):
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    turned = torch.randn(2, 3, 5, 4).transpose(2, 3)
    for state in ({"x": last, "y": turned}, {"y": turned, "x": last}):
        saver(state)
        found = shardkeep.open(saver.at)
        assert found["x"].metadata.properties.memory_format == "channels_last"
        assert found["y"].metadata.properties.memory_format == "contiguous_format"


def test_tensors_that_are_not_contiguous_among_many_need_no_new_plan(saver):
    """They are looked at some at a time as they are written, and are what they were."""
    state = {str(number): torch.full((3,), number) for number in range(600)}
    state["300"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert not saver(state)
    assert saver(state)
    assert same(state, saver.stored())


class DerivedWriter(shardkeep.NativeWriter):
    planned = 0

    def prepare_global_plan(self, plans, metadata):
        self.planned += 1
        return super().prepare_global_plan(plans, metadata)


def test_a_derived_writer_is_always_asked(saver):
    writer = DerivedWriter()
    for count in (1, 2):
        saver({"w": W}, storage_writer=writer)
        assert writer.planned == count


class DerivedPlanner(shardkeep.DefaultSavePlanner):
    planned = 0

    def create_local_plan(self):
        self.planned += 1
        return super().create_local_plan()


def test_a_derived_planner_is_always_asked(saver):
    planner = DerivedPlanner()
    for count in (1, 2):
        assert not saver({"w": W}, planner=planner)
        assert planner.planned == count


class AnotherPlanner(SavePlanner):
    """Lists its items, as one may that was written without ours."""

    def __init__(self):
        self.inner = shardkeep.DefaultSavePlanner()

    def set_up_planner(self, state_dict, storage_meta=None, place=None):
        self.inner.set_up_planner(state_dict, storage_meta, place)

    def create_local_plan(self):
        return SavePlan(list(self.inner.create_local_plan().items))

    def create_global_plan(self, all_plans):
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        return new_plan

    def resolve_data(self, write_item):
        return self.inner.resolve_data(write_item)


@pytest.mark.parametrize("world", [1, 2])
def test_plans_of_another_planner_beside_ours(tmp_path, world):
    def work(ranks):
        state = {"a": {"b": W + 1, "c": 2}, "d": W * 2, "e": 3, "f": PerRank(W + ranks.rank)}
        for number, planner in enumerate([None, AnotherPlanner(), AnotherPlanner(), None, None]):
            options = {"planner": planner, "process_group": ranks}
            stats = shardkeep.save(state, tmp_path / str(number), **options).stats
            assert stats["plan_reused"] == (number == 4)

    on_ranks(world, work)
    for number in range(5):
        found = shardkeep.open(tmp_path / str(number))
        assert same(W + 1, found["a.b"][...])
        assert same(W * 2, found["d"][...])
        assert (found["a.c"], found["e"]) == (2, 3)
        for rank in range(world):
            assert same(W + rank, found[f"f.{rank}"][...])


class OfNoPlainType(int):
    pass


def test_a_planner_pickles_nothing_unless_it_is_told_to(saver):
    with pytest.raises(UnsupportedValueError, match="allow_pickle=True"):
        saver({"v": OfNoPlainType(3)}, planner=shardkeep.DefaultSavePlanner())


def test_a_planner_that_is_used_again_has_nothing_of_the_save_before(saver):
    """Recognised, and planned anew: neither a value, nor that one of them was a pickle."""
    planner = shardkeep.DefaultSavePlanner(allow_pickle=True)
    state = {"w": W, "v": None, "x": 1}

    def requires(v):
        state["v"] = v
        saver(state, planner=planner)
        assert shardkeep.open(saver.at, allow_pickle=True)["v"] == v
        return json.loads((saver.at / "checkpoint.json").read_bytes())["requires"]

    pickled = OfNoPlainType(3)
    assert requires(pickled) == ["pickle"]
    assert requires(5) == []
    assert requires(pickled) == ["pickle"]
    shardkeep.flush()
    assert requires(6) == []


def test_a_planner_with_data_and_sources_of_its_own_is_asked_for_them(saver):
    class Sevens(shardkeep.DefaultSavePlanner):
        def resolve_data(self, write_item):
            found = super().resolve_data(write_item)
            return found if isinstance(found, bytes) else self.seven(found)

        def sources(self, items, rows):
            return [self.seven(one) for one in super().sources(items, rows)]

        def seven(self, source):
            return type(source)(np.full_like(source.array, 7))

    saver({"w": np.arange(5, dtype=np.uint8)}, planner=Sevens())
    assert saver.stored()["w"].tolist() == [7] * 5


# --- plans that are lists -------------------------------------------------------------------------


def box_item(name, low, index, size=(4,), dtype="float64"):
    """Two elements of a tensor."""
    box = ChunkStorageMetadata((low,), (2,))
    data = TensorWriteData(box, TensorProperties(dtype), size)
    return WriteItem(MetadataIndex(name, (low,), index), data)


def value_item(name, index):
    return WriteItem(MetadataIndex(name, None, index), BytesWriteData())


class Listing(shardkeep.DefaultSavePlanner):
    """Lists items, and has the elements of each by its number."""

    def __init__(self, items, joined=None, finished=None):
        super().__init__()
        self.items, self.joined, self.finished = items, joined, finished

    def create_local_plan(self):
        super().create_local_plan()
        return SavePlan(self.items)

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        if self.joined is not None:
            plans = [SavePlan(self.joined(list(plan.items))) for plan in plans]
        return plans, metadata

    def finish_plan(self, new_plan):
        if self.finished is not None:
            new_plan = dataclasses.replace(new_plan, items=self.finished(list(new_plan.items)))
        return new_plan

    def resolve_data(self, write_item):
        number = write_item.index.index
        if isinstance(write_item.data, BytesWriteData):
            return encode_value(number, where="v", allow_pickle=False).data
        return HostSource(np.full(2, number, np.float64))


def save_listed(path, world, items, **options):
    def work(ranks):
        mine = items if ranks.rank == world - 1 else []
        shardkeep.save({}, path, planner=Listing(mine, **options), process_group=ranks)

    on_ranks(world, work)
    return shardkeep.open(path).state_dict()


@pytest.mark.parametrize("world", [1, 2])
def test_listed_items_are_known_by_their_numbers(tmp_path, world):
    """Whichever these are, of tensors and of values apart; an item that is listed again is one."""
    items = [box_item("a", 2, 5), box_item("a", 0, 1 << 40), box_item("b", 0, 0, (2,))]
    items += [value_item("v", 5), value_item("w", 1 << 40), box_item("a", 2, 5)]
    found = save_listed(tmp_path, world, items)
    assert found["a"].tolist() == [1 << 40, 1 << 40, 5, 5]
    assert found["b"].tolist() == [0, 0]
    assert (found["v"], found["w"]) == (5, 1 << 40)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("items", "text"),
    [
        ([box_item("a", 0, 0), box_item("a", 2, None)], r"a offset \(2,\): .* index None"),
        ([box_item("a", 0, 0), box_item("a", 2, -1)], r"a offset \(2,\): .* index -1"),
        ([value_item("v", None)], "v: .* index None"),
        ([box_item("a", 0, 0, (2,)), box_item("b", 0, 0, (2,))], "a .* and b .* index 0"),
        ([box_item("a", 0, 3), box_item("a", 2, 3)], r"a .*\(0,\).* and a .*\(2,\).* index 3"),
        ([value_item("v", 1), value_item("w", 1)], "v and w .* index 1"),
        (
            [box_item("a", 0, 0, (2,)), box_item("a", 0, 1, (2,))],
            r"a offsets \(0,\) sizes \(2,\) .* index 0 and .* index 1",
        ),
        ([box_item("a", 0, 0), box_item("a", 2, 1, (5,))], r"a: shape \(4,\) .* shape \(5,\)"),
        ([box_item("a", 0, 0), box_item("a", 2, 1, dtype="float32")], "a: .*float64.*float32"),
    ],
)
def test_listed_items_that_could_be_others_are_refused(tmp_path, world, items, text):
    with pytest.raises(PlanError, match=text):
        save_listed(tmp_path, world, items)
    assert not (tmp_path / "checkpoint.json").exists()


class Relisting(shardkeep.DefaultSavePlanner):
    """Gives the plan it inherits as a list."""

    def create_local_plan(self):
        return SavePlan(list(super().create_local_plan().items))


@pytest.mark.parametrize("world", [1, 2])
def test_a_list_of_the_plan_keeps_empty_tensors(tmp_path, world):
    """Also those that one rank alone has, and empty boxes of tensors that others hold."""
    shapes = {"none": (0,), "rows": (0, 3), "columns": (2, 0)}

    def work(ranks):
        state = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        state |= {f"of {ranks.rank}": np.zeros((0, 7), np.int8), "v": 5}
        low, held = (0, 2) if ranks.rank == world - 1 else (2, 0)
        state["part"] = ShardedArray.from_local(np.full((held, 2), 9.0), (low, 0), (2, 2))
        shardkeep.save(state, tmp_path, planner=Relisting(), process_group=ranks)

    on_ranks(world, work)
    found = shardkeep.open(tmp_path).state_dict()
    shapes |= {f"of {rank}": (0, 7) for rank in range(world)}
    assert {name: found[name].shape for name in shapes} == shapes
    assert found["rows"].dtype == np.float32
    assert found["of 0"].dtype == np.int8
    assert (found["v"], found["part"].tolist()) == (5, [[9.0, 9.0], [9.0, 9.0]])


class Sorting(shardkeep.DefaultSavePlanner):
    """Lists its plan by the numbers of items, the last first."""

    def create_local_plan(self):
        items = super().create_local_plan().items
        return SavePlan(sorted(items, key=lambda item: -item.index.index))


class Resolving(shardkeep.DefaultSavePlanner):
    """Looks at what it plans."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        for item in plan.items:
            data = self.resolve_data(item)
            assert isinstance(data, bytes) or data.part((0,) * len(item.data.size), item.data.size)
        return plan


class Returning(shardkeep.DefaultSavePlanner):
    """Writes what it planned itself, by its own items."""

    def create_local_plan(self):
        self.mine = super().create_local_plan()
        return self.mine

    def finish_plan(self, new_plan):
        return dataclasses.replace(new_plan, items=self.mine.items)


@pytest.mark.parametrize("kind", [Sorting, Resolving, Returning])
@pytest.mark.parametrize("save", [shardkeep.save, shardkeep.async_save])
def test_planners_see_empty_tensors_as_items(tmp_path, kind, save):
    """With a number and without elements, like any other item."""
    state = {"a": np.arange(6.0), "e": np.zeros((0, 3), np.float32), "v": 5}
    done = save(state, tmp_path, planner=kind())
    if save is shardkeep.async_save:
        done.result(60)
    found = shardkeep.open(tmp_path).state_dict()
    assert found["a"].tolist() == list(range(6))
    assert (found["e"].shape, found["e"].dtype, found["v"]) == ((0, 3), np.float32, 5)


def with_index(items, index):
    change = dataclasses.replace
    return [change(item, index=change(item.index, index=index)) for item in items]


def unnumbered(items):
    return with_index(items, None)


def renumbered(items):
    return with_index(items, 7)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("step", "change", "text"),
    [
        ("joined", unnumbered, "index None"),
        ("joined", renumbered, "index 7"),
        ("finished", unnumbered, "index None"),
    ],
)
@pytest.mark.parametrize("item", [box_item("a", 0, 0, (2,)), value_item("v", 0)])
def test_items_of_a_later_plan_are_those_that_were_listed(
    tmp_path, world, step, change, text, item
):
    with pytest.raises(PlanError, match=text):
        save_listed(tmp_path, world, [item], **{step: change})
    assert not (tmp_path / "checkpoint.json").exists()


# --- undeclared replicas --------------------------------------------------------------------------


def save_on(path, *states, repeat=1, **options):
    def work(ranks):
        for n in range(repeat):
            shardkeep.save(states[ranks.rank], path / str(n), process_group=ranks, **options)

    on_ranks(len(states), work)


def test_undeclared_replicas_that_differ(tmp_path):
    with pytest.raises(
        PlanError, match=r"(?s)tensors.*differ between ranks.*w offsets.*ranks 0, 1.*PerRank"
    ) as caught:
        save_on(tmp_path, {"w": W, "v": W}, {"w": W + 1, "v": W})
    assert "v offsets" not in str(caught.value)


def test_values_that_differ(tmp_path):
    with pytest.raises(PlanError, match=r"(?s)values.*seed on ranks 0, 1.*PerRank") as caught:
        save_on(tmp_path, {"seed": 1, "step": 3}, {"seed": 2, "step": 3})
    assert "step" not in str(caught.value)


def test_only_holders_are_compared(tmp_path):
    save_on(tmp_path, {"a": W, "b": 1}, {"a": W, "c": W}, {"c": W.copy(), "b": 1}, {})
    with pytest.raises(PlanError, match=r"c offsets \(0,\) sizes \(6,\) on ranks 1, 2"):
        save_on(tmp_path / "x", {"a": W, "b": 1}, {"a": W, "c": W}, {"c": W * 2, "b": 1}, {})


def test_replicas_that_begin_to_differ_later(tmp_path):
    def work(ranks):
        state = {"w": W.copy(), "step": 1, "other": np.ones(2)}
        shardkeep.save(state, tmp_path / "0", process_group=ranks)
        if ranks.rank == 1:
            state["w"][3] = 99
        with pytest.raises(PlanError, match=r"w offsets .* on ranks 0, 1, 2"):
            shardkeep.save(state, tmp_path / "1", process_group=ranks)
        state["w"][3] = 0
        state["step"] = 2 if ranks.rank == 2 else 1
        with pytest.raises(PlanError, match=r"step on ranks 0, 1, 2"):
            shardkeep.save(state, tmp_path / "2", process_group=ranks)
        state["step"] = 5
        return shardkeep.save(state, tmp_path / "3", process_group=ranks).stats["plan_reused"]

    assert on_ranks(3, work) == [1, 1, 1]
    assert shardkeep.open(tmp_path / "3")["step"] == 5
    assert not (tmp_path / "1" / "checkpoint.json").exists()


def test_replicas_need_not_be_compared(tmp_path):
    save_on(tmp_path, {"w": W}, {"w": W + 1}, check_replicas="off", repeat=2)
    with pytest.raises(PlanError, match="values"):
        save_on(tmp_path / "x", {"v": 1}, {"v": 2}, check_replicas="off")


def test_full_compares_every_element(tmp_path):
    large = np.zeros(1 << 20)
    other = large.copy()
    other[300_001] = 1
    save_on(tmp_path, {"w": large}, {"w": other})
    with pytest.raises(PlanError, match="w offsets"):
        save_on(tmp_path / "x", {"w": large}, {"w": other}, check_replicas="full")


@pytest.mark.parametrize("extra", [0, 1])
def test_up_to_a_mebibyte_every_element_is_compared_anyway(tmp_path, extra):
    one = np.zeros((1 << 20) + extra, np.uint8)
    other = one.copy()
    other[300_001] = 1
    with contextlib.nullcontext() if extra else pytest.raises(PlanError, match="w offsets"):
        save_on(tmp_path, {"w": one}, {"w": other})


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_a_sample_has_both_ends_and_the_middle(dtype):
    def digest(array):
        planner = shardkeep.DefaultSavePlanner()
        planner.set_up_planner({"w": array})
        planner.create_local_plan()
        return planner.digests([0], [], [False])

    count = (5 << 20) // np.dtype(dtype).itemsize + 7
    digests = [digest(np.zeros(count, dtype))]
    for at in (0, count // 2, count - 1, count // 4):
        array = np.zeros(count, dtype)
        array[at] = 1
        digests.append(digest(array))
    assert digests[4] == digests[0]
    assert len(set(map(tuple, digests))) == 4


class Twice:
    """One box, listed twice, with different contents."""

    global_shape: tuple
    global_offsets: list
    local_offsets: list
    local_sizes: list

    def __init__(self, array):
        self.array, self.global_shape, self.global_offsets = array, (4,), [(0,), (0,)]
        self.local_offsets, self.local_sizes = [(0,), (4,)], [(4,), (4,)]

    def local_tensor(self):
        return self.array


@pytest.mark.parametrize("world", [1, 2])
def test_copies_on_one_rank_are_compared_too(tmp_path, world):
    save_on(tmp_path, *({"t": Twice(np.tile(np.arange(4.0), 2))} for _ in range(world)))
    assert same(np.arange(4.0), shardkeep.open(tmp_path / "0")["t"][...])
    with pytest.raises(PlanError, match="t offsets"):
        save_on(tmp_path / "x", *({"t": Twice(np.arange(8.0))} for _ in range(world)))


@pytest.mark.parametrize("others", [[], [{}]])
def test_copies_of_no_other_rank_that_differ_are_said_to_be_of_one(tmp_path, others):
    text = r"(?s)twice on one rank.*t offsets.* on rank 0\n"
    with pytest.raises(PlanError, match=text) as caught:
        save_on(tmp_path, {"t": Twice(np.arange(8.0)), "v": 1}, *others)
    assert "differ between ranks" not in str(caught.value)


def test_a_process_that_holds_each_box_once_compares_nothing(saver):
    asked = []

    class Counting(shardkeep.DefaultSavePlanner):
        def digests(self, *args):
            asked.append(args)
            return super().digests(*args)

    saver({"w": W, "v": 1}, planner=Counting())
    assert asked == []


@given(st.data())
def test_any_sharing_is_compared_as_it_is(data):
    """Against the plain rule: an item is wrong when two of its holders differ."""
    from shardkeep.sharing import Share, Shared

    world = data.draw(st.integers(2, 5))
    items = data.draw(st.integers(1, 8))
    first_value = data.draw(st.integers(0, items))
    holders = [
        sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=2))) for _ in range(items)
    ]
    contents = {
        (rank, item): bytes([data.draw(st.integers(0, 1))]) * 16
        for item in range(items)
        for rank in holders[item]
    }
    rows = [(rank, item) for item in range(items) for rank in holders[item]]
    rank, item = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    shared = Shared.of(rank, item, item * 10, first_value, lambda number: f"item {number}.")
    shares = [Share.decode(message) for message in shared.messages(world)]
    digests = [
        [contents[rank, number // 10] for number in (*share.pieces, *share.values)]
        for rank, share in enumerate(shares)
    ]
    for share in shares:
        assert all(number // 10 < first_value for number in share.pieces)
        assert all(number // 10 >= first_value for number in share.values)
    folded = [share.fold(mine) for share, mine in zip(shares, digests, strict=True)]
    suspects = shared.suspects(folded)
    unfolded = [s.unfold(mine, suspects) for s, mine in zip(shares, digests, strict=True)]
    wrong = [i for i in range(items) if len({contents[r, i] for r in holders[i]}) > 1]
    tensors = [i for i in wrong if i < first_value]
    if not wrong:
        shared.check(suspects, unfolded)
        return
    with pytest.raises(PlanError) as caught:
        shared.check(suspects, unfolded)
    for number in range(items):
        assert (f"item {number}. on" in str(caught.value)) == (number in (tensors or wrong))
