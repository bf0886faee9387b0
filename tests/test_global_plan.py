"""The global plan of simulated ranks, through the wire, against brute force."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep import PerRank, replicas
from shardkeep.columns import Boxes
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.errors import PlanError
from shardkeep.global_plan import join_plans, sort_keys
from shardkeep.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from shardkeep.planner import Place, SavePlan, TensorWriteData, WriteItem
from shardkeep.sharding import ShardedArray
from shardkeep.tables import TensorTable
from shardkeep.wire import (
    PlanDecoder,
    decode_final_plan,
    encode_final_plan,
    encode_local_plan,
)


def cut(draw, offsets, sizes, depth):
    """Split a box at a random place in a random dimension, and both halves again."""
    wide = [dim for dim, size in enumerate(sizes) if size > 1]
    if depth == 0 or not wide or not draw(st.booleans()):
        return [ChunkStorageMetadata(offsets, sizes)]
    dim = draw(st.sampled_from(wide))
    at = draw(st.integers(1, sizes[dim] - 1))
    low, high = list(sizes), list(sizes)
    low[dim], high[dim] = at, sizes[dim] - at
    moved = list(offsets)
    moved[dim] += at
    return cut(draw, offsets, low, depth - 1) + cut(draw, moved, high, depth - 1)


def where(box):
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def part(whole, boxes, replicas=()):
    """What a rank holds that has these boxes of a tensor."""
    shards = [(np.array(whole[where(box)]), box.offsets) for box in boxes]
    return ShardedArray.from_shards(shards, whole.shape, dtype=str(whole.dtype), replicas=replicas)


def rows(whole, low, high, replicas=()):
    """Rows [low, high) of a tensor."""
    box = ChunkStorageMetadata((low,) + (0,) * (whole.ndim - 1), (high - low, *whole.shape[1:]))
    return part(whole, [box], replicas)


def local_plans(states):
    out = []
    for rank, state in enumerate(states):
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, place=Place(rank, len(states)))
        out.append(planner.create_local_plan())
    return out


def over_the_wire(plans):
    decoder = PlanDecoder()
    return [decoder.decode(encode_local_plan(plan)) for plan in plans]


def join(*states):
    return join_plans(over_the_wire(local_plans(states)))


def loads(joined, world):
    return np.bincount(joined.chunks.rank, joined.chunks.nbytes(joined.tensors), world)


def chunk_boxes(joined, name):
    row = joined.tensors.row_of[name]
    return [joined.chunks.boxes[at] for at in np.flatnonzero(joined.chunks.tensor == row)]


# --- any cut, any holders -------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def worlds(draw):
    """Tensors, and the state of each rank: every box is held by one set of ranks or another."""
    world = draw(st.integers(1, 5))
    states = [{} for _ in range(world)]
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        name = f"t{number}"
        shape = draw(shapes)
        dtype = draw(st.sampled_from(["float32", "int8"]))
        size = int(np.prod(shape))
        whole = tensors[name] = np.arange(size).reshape(shape).astype(dtype)
        team = [draw(st.integers(0, world - 1)) for _ in range(world)]
        boxes = {t: [] for t in set(team)}
        for box in cut(draw, [0] * len(shape), list(shape), 4):
            boxes[draw(st.sampled_from(sorted(boxes)))].append(box)
        for t, held in boxes.items():
            members = [rank for rank in range(world) if team[rank] == t]
            declared = members if len(members) > 1 and draw(st.booleans()) else ()
            for rank in members:
                states[rank][name] = part(whole, held, declared)
    for state in states:
        state["step"] = 3
    return tensors, states


@given(worlds(), st.sampled_from([8, 8 << 20]))
def test_every_element_is_written_once_by_a_holder(world, split_bytes):
    tensors, states = world
    plans = local_plans(states)
    with patch.object(replicas, "SPLIT_BYTES", split_bytes):
        joined = join_plans(over_the_wire(plans))
    assert list(joined.tensors.names) == sorted(tensors)
    painted = {name: np.zeros(whole.shape, int) for name, whole in tensors.items()}
    order = []
    for at in range(len(joined.chunks)):
        name = joined.tensors.names[joined.chunks.tensor[at]]
        box = joined.chunks.boxes[at]
        painted[name][where(box)] += 1
        holder = plans[joined.chunks.rank[at]].items
        piece = holder[int(joined.chunks.source[at])]
        held = piece.data.chunk
        assert piece.index.fqn == name
        assert all(a >= b for a, b in zip(box.offsets, held.offsets, strict=True))
        ends = zip(box.offsets, box.sizes, held.offsets, held.sizes, strict=True)
        assert all(a + n <= b + m for a, n, b, m in ends)
        order.append((name, box.offsets))
    assert all((paint == 1).all() for paint in painted.values())
    assert order == sorted(order)
    assert list(joined.values.names) == ["step"]


@given(worlds())
def test_plans_come_through_the_wire(world):
    _, states = world
    plans = local_plans(states)
    for plan, told in zip(plans, over_the_wire(plans), strict=True):
        assert list(told.items) == list(plan.items)
        assert told.items.chunks.source.tolist() == plan.items.chunks.source.tolist()
        assert told.planner_data.root == plan.planner_data.root
        for column in ("tensor_leaf", "value_leaf", "replicas"):
            mine, theirs = getattr(plan.items.local, column), getattr(told.items.local, column)
            assert np.array_equal(mine, theirs), column
    planner = DefaultSavePlanner()
    final, _ = planner.create_global_plan(plans)
    for mine, plan, renamed in zip(plans, final, planner.renamed, strict=True):
        told, shared = decode_final_plan(encode_final_plan(plan, renamed, b"x"), mine)
        assert shared == b"x"
        assert list(told.items) == list(plan.items)
        assert told.items.chunks.source.tolist() == plan.items.chunks.source.tolist()
        assert told.items.value_source == plan.items.value_source


@given(st.integers(1, 6), st.lists(st.integers(1, 200), min_size=1, max_size=30), st.booleans())
def test_replicas_are_dealt_out_evenly(world, sizes, declared):
    everyone = tuple(range(world)) if declared else ()
    arrays = {f"t{n}": np.full(size, n, np.int8) for n, size in enumerate(sizes)}
    state = {name: rows(a, 0, len(a), everyone) for name, a in arrays.items()}
    loaded = loads(join(*[state] * world), world)
    assert loaded.sum() == sum(sizes)
    assert loaded.max() <= loaded.mean() + max(sizes)


def test_replicas_make_up_for_what_ranks_hold_alone():
    small, large = np.zeros((8, 4), np.int8), np.zeros((100, 4), np.int8)
    state = {f"r{n}": rows(small, 0, 8, (0, 1)) for n in range(20)}
    joined = join({**state, "mine": rows(large, 0, 100)}, state)
    mine, other = loads(joined, 2)
    assert mine + other == 400 + 20 * 32
    assert abs(mine - other) <= 32


def test_large_declared_replicas_are_split_and_undeclared_are_not():
    whole = np.zeros((6, 4), np.float32)
    with patch.object(replicas, "SPLIT_BYTES", 32):
        joined = join(*[{"a": rows(whole, 0, 6, (0, 1, 2)), "b": whole}] * 3)
    assert [box.sizes for box in chunk_boxes(joined, "a")] == [(2, 4)] * 3
    assert chunk_boxes(joined, "b") == [ChunkStorageMetadata((0, 0), (6, 4))]
    of_a = joined.chunks.rank[joined.chunks.tensor == 0]
    assert sorted(of_a.tolist()) == [0, 1, 2]


def test_nothing_at_all():
    joined = join({}, {}, {})
    assert len(joined.chunks) == len(joined.tensors) == len(joined.values) == 0


def test_plans_of_another_planner_have_no_columns():
    def item(low):
        box = ChunkStorageMetadata((low,), (2,))
        data = TensorWriteData(box, TensorProperties("int8"), (4,))
        return WriteItem(MetadataIndex("x", (low,), 0), data)

    joined = join_plans(over_the_wire([SavePlan([item(0)]), SavePlan([item(2)])]))
    assert joined.tensors.names == ["x"]
    assert joined.chunks.rank.tolist() == [0, 1]


# --- what does not make whole tensors -------------------------------------------------------------

W = np.arange(24.0).reshape(6, 4)


def test_overlap():
    with pytest.raises(PlanError, match=r"layer\.w.*\(rank [01]\) overlaps .*\(rank [01]\)"):
        join({"layer": {"w": rows(W, 0, 4)}}, {"layer": {"w": rows(W, 3, 6)}})


def test_gap():
    with pytest.raises(PlanError, match=r"w: no rank holds offsets \(2, 0\) sizes \(1, 4\)"):
        join({"w": rows(W, 0, 2)}, {"w": rows(W, 3, 6)})


def test_an_overlap_that_makes_up_for_a_gap():
    with pytest.raises(PlanError, match="do not make whole tensors"):
        join({"w": rows(W, 0, 3)}, {"w": rows(W, 1, 4)})


def test_box_outside_its_tensor():
    def item(low, size):
        box = ChunkStorageMetadata((low,), (size,))
        return WriteItem(
            MetadataIndex("x", (low,), 0), TensorWriteData(box, TensorProperties("int8"), (4,))
        )

    other = TensorWriteData(ChunkStorageMetadata((0,), (9,)), TensorProperties("int8"), (9,))
    plans = [
        SavePlan([item(0, 4), WriteItem(MetadataIndex("y", (0,), 0), other)]),
        SavePlan([item(5, 2)]),
    ]
    with pytest.raises(PlanError, match=r"x: .*\(rank 1\) reaches out of shape \(4,\)") as caught:
        join_plans(plans)
    assert "y:" not in str(caught.value)
    assert "more" not in str(caught.value)


@pytest.mark.parametrize("other", [W.astype("f4"), W[:5]])
def test_different_tensors_under_one_name(other):
    with pytest.raises(PlanError, match=r"w: shape .* on rank 0, shape .* on rank 2"):
        join({"w": rows(W, 0, 3)}, {"w": rows(W, 3, 6)}, {"w": rows(other, 0, 3)})


def test_one_box_in_different_replica_sets_is_compared():
    """FSDP over each of several tensor parallel ranks, of what is not cut among those."""
    joined = join(
        {"w": rows(W, 0, 6, (0, 1))},
        {"w": rows(W, 0, 6, (0, 1))},
        {"w": rows(W, 0, 6, (2, 3))},
        {"w": rows(W, 0, 6, (2, 3))},
    )
    assert joined.shared.rank.tolist() == [0, 1, 2, 3]


def test_declared_beside_undeclared_is_compared():
    joined = join({"w": rows(W, 0, 6, (0, 1))}, {"w": W})
    assert joined.shared.rank.tolist() == [0, 1]


def test_declared_replicas_are_believed():
    joined = join({"w": rows(W, 0, 6, (0, 1))}, {"w": rows(W + 1, 0, 6, (0, 1))})
    assert len(joined.chunks) == 1


def yielding(array):
    return replace(rows(array, 0, len(array)), yields=True)


def test_what_yields_gives_way_to_what_does_not():
    joined = join({"w": yielding(W)}, {"w": W + 1}, {"w": yielding(W + 2), "v": yielding(W)})
    assert list(zip(joined.chunks.tensor.tolist(), joined.chunks.rank.tolist(), strict=True)) == [
        (0, 2),
        (1, 1),
    ]
    assert len(joined.shared.rank) == 0


def test_what_all_holders_would_yield_is_compared():
    joined = join({"w": yielding(W)}, {"v": W}, {"w": yielding(W + 1)})
    assert joined.shared.rank.tolist() == [0, 2]


def test_values_per_rank_are_all_kept():
    joined = join({"seed": PerRank(1)}, {"seed": PerRank(2)})
    assert list(joined.values.names) == ["seed.0", "seed.1"]
    assert joined.values.rank.tolist() == [0, 1]


def test_long_errors_are_cut():
    mine = {f"w{n}": rows(W, 0, 3) for n in range(20)}
    with pytest.raises(PlanError, match=r"\.\.\. and 12 more"):
        join(mine, {})


# --- names ----------------------------------------------------------------------------------------


def test_names_that_collide_on_one_rank_are_bracketed():
    joined = join({"a": {"b": W}, "a.b": W + 1})
    assert sorted(joined.tensors.names) == ['["a.b"]', "a.b"]
    assert joined.renamed == [{}]


def test_names_that_collide_only_in_the_union_are_renamed():
    states = {"a": {"b": W}}, {"x": 1, "a.b": W + 1}
    plans = local_plans(states)
    planner = DefaultSavePlanner()
    final, metadata = planner.create_global_plan(over_the_wire(plans))
    assert planner.renamed == [{}, {1: '["a.b"]'}]
    assert set(metadata.state_dict_metadata) == {'["a.b"]', "a.b", "x"}
    told, _ = decode_final_plan(encode_final_plan(final[1], planner.renamed[1]), plans[1])
    assert [item.index.fqn for item in told.items] == ['["a.b"]', "x"]


def test_containers_of_different_kinds():
    with pytest.raises(PlanError, match="a is a dict on rank 0 and a list on rank 2"):
        join({"a": {"b": W}}, {"a": {"b": W}}, {"a": [W]})


def test_lists_of_different_lengths():
    with pytest.raises(PlanError, match="a has 1 entries on rank 0 and 2 on rank 2"):
        join({"a": [W]}, {"a": [W]}, {"a": [W, W]})


def test_an_array_on_one_rank_and_a_value_on_another():
    with pytest.raises(PlanError, match="a is an array on rank 0 and a plain value on rank 1"):
        join({"a": W}, {"a": 3})


def test_ranks_may_hold_different_names():
    joined = join({"a": W, "c": W + 1}, {"b": W})
    assert joined.tensors.names == ["a", "b", "c"]
    assert joined.chunks.rank.tolist() == [0, 1, 0]


# --- ties -----------------------------------------------------------------------------------------


def test_a_tie_on_every_rank_is_stored_once():
    one, two = W.copy(), W.copy()
    joined = join({"a": one, "b": one}, {"a": two, "b": two})
    assert joined.tensors.alias_of.tolist() == [-1, 0]
    assert joined.chunks.tensor.tolist() == [0]


def test_a_tie_on_some_ranks_is_no_tie():
    one = W.copy()
    joined = join({"a": one, "b": one}, {"a": W.copy(), "b": W.copy()})
    assert joined.tensors.alias_of.tolist() == [-1, -1]
    assert joined.chunks.tensor.tolist() == [0, 1]


def test_ties_to_different_tensors_are_no_tie():
    one, two = W.copy(), W.copy()
    joined = join({"a": one, "b": W.copy(), "c": one}, {"a": W.copy(), "b": two, "c": two})
    assert joined.tensors.alias_of.tolist() == [-1, -1, -1]


# --- the order of chunks


@pytest.mark.parametrize("shape", [(4, 8), (1 << 31, 1 << 30)])
@given(st.lists(st.tuples(*(st.sampled_from(of) for of in ((0, 1, 2), (0, 1, 3), (0, 1, 5))))))
def test_chunks_are_sorted_by_tensor_and_offset(shape, chunks):
    """Also where all elements are too many for one number to say which of which tensor."""
    tensors = TensorTable.of(["a", "b", "c"], [TensorProperties("uint8")] * 3, [shape] * 3)
    offsets = np.array([at for _, *at in chunks], np.int64).reshape(-1)
    boxes = Boxes(2 * np.arange(len(chunks) + 1), offsets, np.ones_like(offsets))
    tensor = np.array([number for number, _, _ in chunks], np.int64)
    keys = sort_keys(tensors, tensor, boxes)
    for one, key in zip(chunks, keys.tolist(), strict=True):
        assert (keys < key).tolist() == [other < one for other in chunks]
        assert (keys == key).tolist() == [other == one for other in chunks]


def test_a_box_outside_of_its_tensor_is_sorted_with_it():
    tensors = TensorTable.of(["a", "b"], [TensorProperties("uint8")] * 2, [(4,)] * 2)
    boxes = Boxes(np.arange(4), np.array([9, 0, 3]), np.ones(3, np.int64))
    assert sort_keys(tensors, np.array([0, 1, 0]), boxes).tolist() == [3, 4, 3]
