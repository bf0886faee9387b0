"""Specs against torch.chunk and painted arrays; messages that name the right shards."""

import itertools
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardkeep.errors import PlanError
from shardkeep.metadata import ChunkStorageMetadata, TensorProperties
from shardkeep.sharding import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    LocalShard,
    MeshShardingSpec,
    Replicate,
    Shard,
    ShardedArray,
    ShardedTensorMetadata,
    ShardMetadata,
    check_shards,
    validate_non_overlapping,
)

F32 = TensorProperties("float32")


def paint(size, boxes):
    """How often each element is covered."""
    count = np.zeros(size, np.int64)
    for box in boxes:
        ends = np.add(box.offsets, box.sizes)
        assert all(end <= extent for end, extent in zip(ends, size, strict=True))
        count[tuple(map(slice, box.offsets, ends))] += 1
    return count


# --- ShardMetadata ---


def test_shard_is_plain_hashable_and_picklable():
    shard = ShardMetadata(torch.Size([0, 4]), [np.int64(2), 4], torch.device("cpu"))
    assert shard == ShardMetadata((0, 4), (2, 4), "cpu")
    assert hash(shard) == hash(ShardMetadata((0, 4), (2, 4), "cpu"))
    assert type(shard.shard_offsets) is tuple
    assert type(shard.shard_sizes[0]) is int
    assert shard.box == ChunkStorageMetadata((0, 4), (2, 4))
    assert pickle.loads(pickle.dumps(shard)) == shard
    assert ShardMetadata((0,), (1,)).placement is None
    assert shard != ShardMetadata((0, 4), (2, 4))


@pytest.mark.parametrize(
    ("placement", "rank"),
    [
        ("rank:0/cuda:0", 0),
        ("rank:12", 12),
        ("rank:3/cpu", 3),
        ("cuda:0", None),
        ("rank:", None),
        ("rank:1x", None),
        ("worker0/cpu", None),
        (None, None),
    ],
)
def test_rank_is_read_from_the_placement(placement, rank):
    assert ShardMetadata((0,), (1,), placement).rank == rank


def test_torch_remote_device_is_understood():
    from torch.distributed.remote_device import _remote_device

    shard = ShardMetadata((0,), (1,), _remote_device("rank:2/cuda:1"))
    assert (shard.placement, shard.rank) == ("rank:2/cuda:1", 2)


@pytest.mark.parametrize(("offsets", "sizes"), [((0,), (1, 2)), ((-1,), (2,)), ((0,), (-2,))])
def test_impossible_shards_are_refused(offsets, sizes):
    with pytest.raises(ValueError, match="box"):
        ShardMetadata(offsets, sizes)


# --- checks ---


def shards_of(*boxes):
    return [ShardMetadata(o, s, f"rank:{i}/cpu") for i, (o, s) in enumerate(boxes)]


def test_a_tiling_passes():
    shards = shards_of(((0, 0), (2, 4)), ((2, 0), (2, 1)), ((2, 1), (2, 3)))
    check_shards(shards, (4, 4))
    validate_non_overlapping(shards)
    ShardedTensorMetadata(shards, torch.Size([4, 4]), F32).check()


def test_overlap_names_both_shards_and_what_they_share():
    shards = shards_of(((0, 0), (2, 4)), ((3, 0), (1, 4)), ((1, 2), (2, 2)))
    wanted = (
        r"shard 0 \(offsets \(0, 0\) sizes \(2, 4\) on rank:0/cpu\) and "
        r"shard 2 \(offsets \(1, 2\) sizes \(2, 2\) on rank:2/cpu\) overlap: "
        r"both hold offsets \(1, 2\) sizes \(1, 2\)"
    )
    for check in (
        lambda: check_shards(shards, (4, 4)),
        lambda: validate_non_overlapping(shards),
        lambda: EnumerableShardingSpec(shards),
        lambda: ShardedTensorMetadata(shards, (4, 4), F32).check(),
    ):
        with pytest.raises(PlanError, match=wanted):
            check()


def test_a_shard_without_placement_is_named_without_one():
    shards = [ShardMetadata((0,), (2,)), ShardMetadata((1,), (2,))]
    with pytest.raises(PlanError, match=r"shard 0 \(offsets \(0,\) sizes \(2,\)\) and shard 1"):
        check_shards(shards, (3,))


def test_gap_names_the_first_uncovered_box():
    shards = shards_of(((0, 0), (2, 4)), ((2, 0), (2, 3)))
    with pytest.raises(PlanError, match=r"no shard covers offsets \(2, 3\) sizes \(2, 1\)"):
        check_shards(shards, (4, 4))
    validate_non_overlapping(shards)
    with pytest.raises(PlanError, match=r"no shard covers offsets \(0, 0\) sizes \(4, 4\)"):
        check_shards([], (4, 4))
    with pytest.raises(PlanError, match=r"no shard covers offsets \(\) sizes \(\)"):
        check_shards([], ())


def test_an_overlap_that_makes_up_for_a_gap_is_found():
    with pytest.raises(PlanError, match="overlap"):
        check_shards(shards_of(((0,), (3,)), ((2,), (2,)), ((5,), (1,))), (6,))


def test_outside_and_wrong_dimensions_name_the_shard():
    with pytest.raises(PlanError, match=r"shard 1 .*rank:1/cpu\) reaches outside .*\(4,\)"):
        check_shards(shards_of(((0,), (2,)), ((2,), (3,))), (4,))
    with pytest.raises(PlanError, match=r"shard 1 .* has 2 dimensions, .* has 1"):
        check_shards(shards_of(((0,), (2,)), ((2, 0), (3, 1))), (4,))
    with pytest.raises(PlanError, match=r"shard 1 .* has 2 dimensions, the first shard has 1"):
        validate_non_overlapping(shards_of(((0,), (2,)), ((2, 0), (3, 1))))


def test_empty_shards_and_tensors_disturb_nothing():
    check_shards(shards_of(((0,), (4,)), ((2,), (0,)), ((4,), (0,)), ((4,), (0,))), (4,))
    check_shards([], (3, 0))
    check_shards(shards_of(((0, 0), (3, 0)), ((0, 0), (3, 0))), (3, 0))
    with pytest.raises(PlanError, match="outside"):
        check_shards(shards_of(((0,), (4,)), ((5,), (0,))), (4,))


def test_scalars():
    check_shards(shards_of(((), ())), ())
    with pytest.raises(PlanError, match="overlap"):
        validate_non_overlapping(shards_of(((), ()), ((), ())))


@st.composite
def some_shards(draw):
    size = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    shards = []
    for index in range(draw(st.integers(0, 5))):
        offsets = [draw(st.integers(0, extent)) for extent in size]
        sizes = [draw(st.integers(0, e - o)) for e, o in zip(size, offsets, strict=True)]
        shards.append(ShardMetadata(offsets, sizes, f"rank:{index}"))
    return size, shards


@given(some_shards())
def test_checks_agree_with_painting(case):
    size, shards = case
    count = paint(size, [s.box for s in shards])
    if (count > 1).any():
        with pytest.raises(PlanError, match="overlap") as caught:
            validate_non_overlapping(shards)
        with pytest.raises(PlanError, match="overlap"):
            check_shards(shards, size)
        named = [s for s in shards if s.placement + ")" in str(caught.value)]
        assert len(named) == 2
        assert (paint(size, [s.box for s in named]) == 2).any()
    elif (count == 0).any():
        validate_non_overlapping(shards)
        first = tuple(map(int, np.argwhere(count == 0)[0]))
        with pytest.raises(PlanError) as caught:
            check_shards(shards, size)
        assert f"no shard covers offsets {first} sizes" in str(caught.value)
    else:
        validate_non_overlapping(shards)
        check_shards(shards, size)


def test_many_shards_are_checked_quickly():
    shards = [ShardMetadata((i, 0), (1, 8), f"rank:{i}") for i in range(20_000)]
    check_shards(shards, (20_000, 8))


def test_metadata_is_hashable_picklable_and_keeps_tuples():
    metadata = ShardedTensorMetadata(shards_of(((0,), (4,))), [4], F32)
    assert type(metadata.shards_metadata) is tuple
    assert metadata.size == (4,)
    assert pickle.loads(pickle.dumps(metadata)) == metadata
    assert hash(metadata) == hash(pickle.loads(pickle.dumps(metadata)))
    with pytest.raises(ValueError, match="negative"):
        ShardedTensorMetadata((), (-1,), F32)


# --- ChunkShardingSpec, EnumerableShardingSpec ---


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 12), st.integers(-3, 2))
def test_chunk_spec_cuts_as_torch_does(size, parts, dim):
    spec = ChunkShardingSpec(dim, [f"rank:{i}/cpu" for i in range(parts)])
    if not -len(size) <= dim < len(size):
        with pytest.raises(ValueError, match="cannot shard dimension"):
            spec.build_metadata(size, F32)
        return
    metadata = spec.build_metadata(size, F32)
    metadata.check()
    assert [s.placement for s in metadata.shards_metadata] == list(spec.placements)
    whole = torch.arange(math.prod(size)).reshape(size)
    pieces = whole.chunk(parts, dim)
    for index, shard in enumerate(metadata.shards_metadata):
        ours = whole[tuple(map(slice, shard.shard_offsets, np.add(*_pair(shard))))]
        if index < len(pieces):
            assert torch.equal(ours, pieces[index])
        else:
            assert shard.shard_sizes[dim] == 0
        assert tuple(ours.shape) == shard.shard_sizes


def _pair(shard):
    return shard.shard_offsets, shard.shard_sizes


def test_chunk_spec_agrees_with_torch_spec():
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as TorchProperties
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchSpec

    placements = [f"rank:{i}/cpu" for i in range(4)]
    for rows in (1, 4, 6, 9, 16):
        theirs = TorchSpec(0, placements).build_metadata(torch.Size([rows, 3]), TorchProperties())
        ours = ChunkShardingSpec(0, placements).build_metadata((rows, 3), F32)
        for a, b in zip(theirs.shards_metadata, ours.shards_metadata, strict=True):
            assert tuple(a.shard_sizes) == b.shard_sizes
            assert str(a.placement) == b.placement
            if math.prod(b.shard_sizes):
                assert tuple(a.shard_offsets) == b.shard_offsets


def test_chunk_spec_refuses_nothing_to_place_on():
    with pytest.raises(ValueError, match="at least one placement"):
        ChunkShardingSpec(0, ())
    with pytest.raises(ValueError, match="cannot shard dimension 0"):
        ChunkShardingSpec(0, ("rank:0",)).build_metadata((), F32)


def test_enumerable_spec_checks_twice():
    spec = EnumerableShardingSpec(shards_of(((0,), (2,)), ((2,), (3,))))
    metadata = spec.build_metadata((5,), F32)
    assert metadata.shards_metadata == spec.shards
    with pytest.raises(PlanError, match=r"no shard covers offsets \(5,\) sizes \(1,\)"):
        spec.build_metadata((6,), F32)
    with pytest.raises(PlanError, match="outside"):
        spec.build_metadata((4,), F32)
    with pytest.raises(PlanError, match="has 1 dimensions"):
        spec.build_metadata((5, 1), F32)
    with pytest.raises(PlanError, match="dimensions"):
        EnumerableShardingSpec(shards_of(((0,), (2,)), ((2, 0), (3, 1))))


# --- MeshShardingSpec ---


@st.composite
def mesh_cases(draw):
    size = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    options = [st.just(Replicate())]
    if size:
        options.append(st.integers(-len(size), len(size) - 1).map(Shard))
    placements = tuple(draw(st.one_of(options)) for _ in mesh)
    count = math.prod(mesh)
    ranks = draw(st.none() | st.permutations(range(count)).map(lambda r: tuple(7 * x for x in r)))
    return size, MeshShardingSpec(mesh, placements, ranks)


@given(mesh_cases())
def test_mesh_covers_every_element_once_per_replica(case):
    size, spec = case
    coordinates = list(itertools.product(*map(range, spec.mesh_shape)))
    repeats = math.prod(
        n for n, p in zip(spec.mesh_shape, spec.placements, strict=True) if p == Replicate()
    )
    boxes = {c: spec.boxes_of(c, size) for c in coordinates}
    assert (paint(size, boxes.values()) == repeats).all()

    order = list(range(len(coordinates))) if spec.ranks is None else list(spec.ranks)
    assert [spec.rank_at(c) for c in coordinates] == order
    for coordinate in coordinates:
        group = spec.replicas_of(coordinate)
        assert len(group) == repeats
        assert group == tuple(sorted(group))
        assert spec.rank_at(coordinate) in group
        for other in coordinates:
            if spec.rank_at(other) in group:
                assert boxes[other] == boxes[coordinate]
                assert spec.replicas_of(other) == group

    metadata = spec.build_metadata(size, F32)
    metadata.check()
    found = {s.box: s.rank for s in metadata.shards_metadata}
    assert len(found) == len(metadata.shards_metadata)
    assert set(found) == set(boxes.values())
    for box, rank in found.items():
        assert rank == next(spec.rank_at(c) for c in coordinates if boxes[c] == box)


@given(mesh_cases())
def test_mesh_cuts_as_repeated_torch_chunks(case):
    size, spec = case
    whole = np.arange(math.prod(size)).reshape(size)
    for coordinate in itertools.product(*map(range, spec.mesh_shape)):
        part = torch.from_numpy(whole)
        for at, extent, placement in zip(coordinate, spec.mesh_shape, spec.placements, strict=True):
            if isinstance(placement, Shard):
                pieces = part.chunk(extent, placement.dim)
                if at < len(pieces):
                    part = pieces[at]
                else:
                    part = part.narrow(placement.dim, 0, 0)
        box = spec.boxes_of(coordinate, size)
        assert box.sizes == tuple(part.shape)
        ours = whole[tuple(map(slice, box.offsets, np.add(box.offsets, box.sizes)))]
        assert np.array_equal(ours, part.numpy())


def test_mesh_example():
    spec = MeshShardingSpec((2, 2, 2), (Replicate(), Shard(0), Shard(-1)), range(10, 18))
    assert spec.boxes_of((1, 0, 1), (3, 4)) == ChunkStorageMetadata((0, 2), (2, 2))
    assert spec.rank_at((1, 0, 1)) == 15
    assert spec.replicas_of((1, 0, 1)) == (11, 15)
    assert [s.rank for s in spec.build_metadata((3, 4), F32).shards_metadata] == [10, 11, 12, 13]
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 0), (Shard(0), Shard(0))), "cannot have the shape"),
        (((2, 2), (Shard(0),)), "needs 2 placements, found 1"),
        (((2,), (Shard(0),), (0, 0)), "2 different ranks"),
        (((2,), (Shard(0),), (0,)), "2 different ranks"),
        (((2,), (Shard(0),), (-1, 0)), "2 different ranks"),
    ],
)
def test_impossible_meshes_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MeshShardingSpec(*arguments)


def test_mesh_misuse_is_refused():
    with pytest.raises(TypeError, match=r"Shard\(dim\) or Replicate\(\), found 0"):
        MeshShardingSpec((2,), (0,))
    spec = MeshShardingSpec((2, 3), (Shard(1), Replicate()))
    for bad in ((2, 0), (0, -1), (0,), (0, 0, 0)):
        with pytest.raises(ValueError, match="has no place"):
            spec.boxes_of(bad, (4, 4))
        with pytest.raises(ValueError, match="has no place"):
            spec.rank_at(bad)
        with pytest.raises(ValueError, match="has no place"):
            spec.replicas_of(bad)
    with pytest.raises(ValueError, match="cannot shard dimension 1"):
        spec.boxes_of((0, 0), (4,))


# --- LocalShard, ShardedArray ---


def test_local_shard_must_fill_its_box():
    LocalShard(torch.zeros(2, 3), ShardMetadata((0, 0), (2, 3)))
    with pytest.raises(ValueError, match=r"shape \(3, 2\) .* sizes \(2, 3\)"):
        LocalShard(np.zeros((3, 2)), ShardMetadata((0, 0), (2, 3)))


def test_from_local():
    array = torch.zeros(2, 3, dtype=torch.bfloat16)
    held = ShardedArray.from_local(array, [4, 0], torch.Size([8, 3]), replicas=[3, 1, 3])
    assert held.local_shards[0].array is array
    assert held.local_shards[0].metadata == ShardMetadata((4, 0), (2, 3))
    assert (held.shape, held.dtype, held.ndim) == ((8, 3), "bfloat16", 2)
    assert held.replicas == (1, 3)
    assert held.metadata.shards_metadata == (ShardMetadata((4, 0), (2, 3)),)
    scalar = ShardedArray.from_local(np.float32(3.0), (), ())
    assert (scalar.shape, scalar.dtype, scalar.ndim, scalar.replicas) == ((), "float32", 0, ())
    empty = ShardedArray.from_local(np.zeros((0, 3)), (8, 0), (8, 3))
    assert empty.dtype == "float64"


def test_from_local_refuses_what_does_not_fit():
    array = np.zeros((2, 3), np.float32)
    with pytest.raises(PlanError, match="outside"):
        ShardedArray.from_local(array, (7, 0), (8, 3))
    with pytest.raises(PlanError, match="has 2 dimensions"):
        ShardedArray.from_local(array, (0, 0), (6,))
    with pytest.raises(ValueError, match="as many offsets as sizes"):
        ShardedArray.from_local(array, (0,), (8, 3))
    with pytest.raises(ValueError, match="negative"):
        ShardedArray.from_local(array, (-1, 0), (8, 3))
    with pytest.raises(ValueError, match="negative"):
        ShardedArray.from_local(array, (0, 0), (8, 3), replicas=(0, -1))
    with pytest.raises(TypeError, match="object"):
        ShardedArray.from_local(np.zeros(2, object), (0,), (2,))


def test_from_shards():
    pairs = [(np.zeros((2, 3), np.int8), (0, 0)), (np.zeros((1, 3), np.int8), (5, 0))]
    held = ShardedArray.from_shards(iter(pairs), (8, 3))
    assert [s.metadata.shard_offsets for s in held.local_shards] == [(0, 0), (5, 0)]
    assert held.dtype == "int8"
    assert ShardedArray.from_shards(pairs, (8, 3), dtype=torch.int8).dtype == "int8"

    nothing = ShardedArray.from_shards([], (8, 3), dtype=torch.float16, replicas=(2,))
    assert (nothing.local_shards, nothing.shape, nothing.dtype) == ((), (8, 3), "float16")
    assert nothing.replicas == (2,)
    assert nothing.metadata.tensor_properties == TensorProperties("float16")


def test_from_shards_refuses_contradictions():
    a, b = np.zeros((2, 3), np.int8), np.zeros((2, 3), np.int16)
    with pytest.raises(ValueError, match="dtype="):
        ShardedArray.from_shards([], (8, 3))
    with pytest.raises(PlanError, match=r"shard 1 .* has dtype int16, its tensor has int8"):
        ShardedArray.from_shards([(a, (0, 0)), (b, (2, 0))], (8, 3))
    with pytest.raises(PlanError, match=r"shard 0 .* has dtype int8, its tensor has int16"):
        ShardedArray.from_shards([(a, (0, 0))], (8, 3), dtype="int16")
    with pytest.raises(PlanError, match=r"shard 0 .* and shard 1 .* overlap"):
        ShardedArray.from_shards([(a, (0, 0)), (a, (1, 0))], (8, 3))
    with pytest.raises(PlanError, match="outside"):
        ShardedArray.from_shards([(a, (0, 0)), (a, (7, 0))], (8, 3))


def test_from_mesh():
    spec = MeshShardingSpec((2, 2), (Replicate(), Shard(0)))
    held = ShardedArray.from_mesh(torch.zeros(2, 3), spec, (1, 1), (4, 3))
    assert held.local_shards[0].metadata == ShardMetadata((2, 0), (2, 3), "rank:3")
    assert held.replicas == (1, 3)
    assert held.shape == (4, 3)
    alone = ShardedArray.from_mesh(np.zeros(2), MeshShardingSpec((2,), (Shard(0),)), (0,), (4,))
    assert alone.replicas == (0,)
    with pytest.raises(ValueError, match=r"shape \(3, 3\) .* offsets \(2, 0\) sizes \(2, 3\)"):
        ShardedArray.from_mesh(torch.zeros(3, 3), spec, (1, 1), (4, 3))


def test_full_metadata_may_list_the_shards_of_others():
    metadata = ChunkShardingSpec(0, ["rank:0", "rank:1"]).build_metadata((4,), F32)
    shard = LocalShard(np.zeros(2, np.float32), metadata.shards_metadata[1])
    held = ShardedArray([shard], metadata)
    assert held.local_shards == (shard,)
    stranger = LocalShard(np.zeros(1, np.float32), ShardMetadata((0,), (1,)))
    with pytest.raises(PlanError, match=r"shard 0 \(offsets \(0,\) sizes \(1,\)\) .*not listed"):
        ShardedArray([stranger], metadata)


def test_sharded_arrays_compare_by_identity():
    array = np.zeros(2)
    a, b = (ShardedArray.from_local(array, (0,), (4,)) for _ in range(2))
    assert a == a
    assert a != b
    assert len({a, b}) == 2


def test_module_needs_no_framework():
    code = "import sys, shardkeep.sharding; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
