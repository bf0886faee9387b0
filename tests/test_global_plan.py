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
from shardkeep.planner import Place, SavePlan, TensorWriteData, WriteItem, WriteItems
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


@st.composite
def sharing_worlds(draw):
    """Plain arrays and values that any ranks hold, in any order; some arrays are tied, and some
    ranks declare who else holds theirs."""
    world = draw(st.integers(1, 4))
    states = [{} for _ in range(world)]
    for rank in draw(st.permutations(range(world))):
        memory = [np.arange(3.0) for _ in range(2)]
        for name in draw(st.permutations(["a", "b", "c", "u", "v", "w"]))[
            draw(st.integers(0, 6)) :
        ]:
            mine = draw(st.integers(0, 3))
            array = memory[mine] if mine < 2 else np.arange(3.0)
            states[rank][name] = array if name < "d" else 7
    for name in "abc":
        holders = tuple(rank for rank in range(world) if name in states[rank])
        if draw(st.booleans()):
            for rank in holders[: draw(st.integers(0, world))]:
                states[rank][name] = ShardedArray.from_shards(
                    [(states[rank][name], (0,))], (3,), dtype="float64", replicas=holders
                )
    return states


@given(sharing_worlds(), st.booleans())
def test_ties_values_and_what_is_compared_are_what_ranks_hold(states, sent):
    """Against the plain rules; also where no two ranks send equal tables."""
    plans = local_plans(states)
    joined = join_plans(over_the_wire(plans) if sent else plans)
    held = {}
    for rank, plan in enumerate(plans):
        of = plan.items
        names = [of.tensors.names[row] for row in of.chunks.tensor]
        ties = [None if at < 0 else of.tensors.names[at] for at in of.tensors.alias_of]
        columns = (names, ties, of.chunks.source.tolist(), of.local.replicas.tolist())
        for name, tie, source, declared in zip(*columns, strict=True):
            held.setdefault(name, []).append((rank, source, tie, declared))
        for name, source in zip(of.value_names, of.value_source, strict=True):
            held.setdefault(name, []).append((rank, source, None, 0))

    assert list(joined.tensors.names) == sorted(name for name in held if name < "d")
    for row, name in enumerate(joined.tensors.names):
        tie, *others = {tie for _, _, tie, _ in held[name]}
        at = int(joined.tensors.alias_of[row])
        assert (joined.tensors.names[at] if at >= 0 else None) == (None if others else tie)

    assert list(joined.values.names) == sorted(name for name in held if name > "d")
    slots = dict.fromkeys(range(len(states)), 0)
    values = zip(joined.values.rank, joined.values.slot, joined.value_source, strict=True)
    for name, (rank, slot, source) in zip(joined.values.names, values, strict=True):
        assert (rank, source) == held[name][0][:2]
        assert slot == slots[int(rank)]
        slots[int(rank)] += 1

    compared = set()
    for name, holders in held.items():
        declared, *others = {declared for *_, declared in holders}
        if len(holders) > 1 and (others or not declared):
            full = bool(others) or name > "d"
            compared |= {(rank, name, source, full) for rank, source, *_ in holders}
    shared = joined.shared
    told = [shared.describe(item).partition(" ")[0] for item in shared.item.tolist()]
    columns = (shared.rank.tolist(), told, shared.source.tolist(), shared.in_full.tolist())
    assert sorted(zip(*columns, strict=True)) == sorted(compared)
    assert [item < shared.first_value for item in shared.item] == [name < "d" for name in told]
    assert len(set(shared.item.tolist())) == len(set(told))
    assert (shared.item >= 0).all()


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


def test_pieces_of_replicas_are_in_the_order_of_their_offsets():
    """Two boxes side by side, each cut from top to bottom."""
    whole = np.zeros((4, 4), np.int8)
    left, right = (ChunkStorageMetadata((0, low), (4, 2)) for low in (0, 2))
    with patch.object(replicas, "SPLIT_BYTES", 4):
        joined = join(*[{"a": part(whole, [left, right], (0, 1))}] * 2)
    assert [box.offsets for box in chunk_boxes(joined, "a")] == [(0, 0), (0, 2), (2, 0), (2, 2)]


def test_where_replicas_are_cut_the_others_are_still_dealt_out_by_their_bytes():
    both = {f"r{n}": np.zeros(8) for n in range(20)}
    both["cut"] = rows(np.zeros((2, 64), np.int8), 0, 2, (0, 1))
    with patch.object(replicas, "SPLIT_BYTES", 64):
        joined = join({**both, "mine": rows(np.zeros((640, 1), np.int8), 0, 640)}, both)
    assert len(chunk_boxes(joined, "cut")) == 2
    mine, other = loads(joined, 2)
    assert abs(mine - other) <= 64


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


def listed(plan, structure=None):
    """The same plan, as somebody else's planner may make it."""
    return SavePlan(list(plan.items), structure)


def names_held(plan):
    at = plan.items.chunks.tensor.tolist()
    return [plan.items.tensors.names[row] for row in at] + list(plan.items.value_names)


@pytest.mark.parametrize("nested", [False, True])
def test_plans_that_are_lists_are_joined_by_their_names(nested):
    """Whatever nesting they come with, which says nothing of the order of their items."""
    state = {"v": 1, "a": {"b": W[:2], "c": 2}, "x": W, "y": 3}
    plans = local_plans([state, state])
    plans = [listed(plan, plan.planner_data if nested else None) for plan in plans]
    final, metadata = DefaultSavePlanner().create_global_plan(plans)
    stored = [(name, rank) for rank, plan in enumerate(final) for name in names_held(plan)]
    assert sorted(name for name, _ in stored) == ["a.b", "a.c", "v", "x", "y"]
    for plan in final:
        for item in plan.items:
            hints = {name: at for at, name in enumerate(["a.b", "x"])}
            hints |= {name: at for at, name in enumerate(["v", "a.c", "y"])}
            assert item.index.index == hints[item.index.fqn]
    assert metadata.state_dict_metadata["a.b"].size == (2, 4)
    assert len(join_plans(plans).shared.rank) == 0


@pytest.mark.parametrize("which", [0, 1])
def test_a_list_beside_columns(which):
    """Nothing is compared, nor believed to be a replica, that one of the ranks says nothing of."""
    plans = local_plans([{"w": yielding(W), "v": 1, "x": 2, "r": rows(W, 0, 6, (0, 1))}] * 2)
    plans[which] = listed(plans[which])
    joined = join_plans(over_the_wire(plans))
    assert joined.tensors.names == ["r", "w"]
    assert list(joined.values.names) == ["v", "x"]
    assert len(joined.chunks) == 2
    assert len(joined.shared.rank) == 0


def test_a_list_becomes_columns_and_is_itself_again():
    plan = local_plans([{"v": 1, "a": {"b": W[:2], "c": 2}, "x": W}])[0]
    columns = WriteItems.of(list(plan.items))
    assert list(columns) == list(plan.items)
    for item in plan.items:
        with pytest.raises(PlanError, match=f"{item.index.fqn}.* index None"):
            WriteItems.of([replace(item, index=replace(item.index, index=None))])


def test_metadata_of_the_plan_lists_the_chunks_of_every_tensor():
    states = [{"a": rows(W, 0, 2), "b": W, "c": rows(W, 3, 6)}, {"a": rows(W, 2, 6)}]
    states[1]["c"] = rows(W, 0, 3)
    _, metadata = DefaultSavePlanner().create_global_plan(local_plans(states))
    found = metadata.state_dict_metadata
    sizes = {name: [chunk.sizes for chunk in found[name].chunks] for name in "abc"}
    assert sizes == {"a": [(2, 4), (4, 4)], "b": [(6, 4)], "c": [(3, 4), (3, 4)]}


# --- what does not make whole tensors -------------------------------------------------------------

W = np.arange(24.0).reshape(6, 4)


def test_overlap():
    with pytest.raises(PlanError, match=r"layer\.w.*\(rank [01]\) overlaps .*\(rank [01]\)"):
        join({"layer": {"w": rows(W, 0, 4)}}, {"layer": {"w": rows(W, 3, 6)}})


@pytest.mark.parametrize("first", [0, 1])
def test_overlap_of_boxes_that_begin_together(first):
    whole, some = {"w": rows(W, 0, 6)}, {"w": rows(W, 0, 3)}
    with pytest.raises(PlanError, match=r"w: .* overlaps"):
        join(*((whole, some) if first else (some, whole)))


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
    assert len(joined.shared.rank) == 0


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


@pytest.mark.parametrize("shape", [(4, 8), (1 << 31, 1 << 30), (1 << 31, 1 << 31)])
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


def test_empty_tensors_are_sorted_between_their_neighbours():
    shapes = [(0,), (4,), (0, 3), (2,)]
    tensors = TensorTable.of(list("abcd"), [TensorProperties("uint8")] * 4, shapes)
    boxes = Boxes(np.array([0, 1, 2, 3, 5, 6]), np.array([0, 0, 3, 0, 0, 0]), np.ones(6, np.int64))
    keys = sort_keys(tensors, np.array([0, 1, 1, 2, 3]), boxes)
    assert (np.diff(keys) > 0).all()
