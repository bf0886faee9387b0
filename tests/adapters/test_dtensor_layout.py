"""Placement arithmetic against torch's own cutting of a real tensor, and against its gathering."""

from __future__ import annotations

import itertools
import math

import dtensor_cases
import pytest
import torch
import torch.distributed.tensor as dt
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from shardkeep.adapters.dtensor_layout import (
    StridedShard,
    in_shard_order,
    local_boxes,
    local_shape,
)
from shardkeep.arrays import region
from shardkeep.sharding import Replicate, Shard


def torch_placement(placement):
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return dt.Shard(placement.dim) if isinstance(placement, Shard) else dt.Replicate()


def assembled(whole, mesh_shape, coordinate, placements, order=None):
    """The local tensor, put together from the boxes; what no box fills stays -1."""
    where = (tuple(whole.shape), mesh_shape, coordinate, placements, order)
    local = torch.full(local_shape(*where), -1, dtype=whole.dtype)
    for box, here in local_boxes(*where):
        assert 0 not in box.sizes
        place = local[region(here.offsets, here.sizes)]
        assert (place == -1).all()
        place.copy_(whole[region(box.offsets, box.sizes)])
    return local


def coordinates(mesh_shape):
    return itertools.product(*map(range, mesh_shape))


@st.composite
def layouts(draw, even=False):
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    ndim = draw(st.integers(1, 3))
    dims = st.integers(0, ndim - 1)
    placement = st.one_of(
        st.builds(Shard, dims),
        st.builds(StridedShard, dims, st.integers(1, 6)),
        st.just(Replicate()),
    )
    placements = tuple(draw(placement) for _ in mesh_shape)
    if even:
        unit = math.prod(mesh_shape) * math.prod(
            p.split_factor for p in placements if isinstance(p, StridedShard)
        )
        shape = tuple(unit * draw(st.integers(1, 2)) if d == 0 else 2 for d in range(ndim))
        placements = tuple(
            Replicate() if not isinstance(p, Replicate) and p.dim else p for p in placements
        )
    else:
        shape = tuple(draw(st.integers(0, 17)) for _ in range(ndim))
    return shape, mesh_shape, placements


@given(layouts())
def test_boxes_are_what_torch_cuts(layout):
    shape, mesh_shape, placements = layout
    whole = torch.arange(math.prod(shape)).reshape(shape)
    theirs = tuple(map(torch_placement, placements))
    for coordinate in coordinates(mesh_shape):
        expected = dtensor_cases.cut(whole, mesh_shape, coordinate, theirs)
        assert torch.equal(assembled(whole, mesh_shape, coordinate, placements), expected)


@given(layouts())
def test_boxes_of_all_ranks_tile_the_tensor(layout):
    shape, mesh_shape, placements = layout
    ordered = in_shard_order(mesh_shape, placements)
    for cuts, order in [(placements, None), *([ordered] if ordered else [])]:
        count = torch.zeros(shape, dtype=torch.int64)
        for coordinate in coordinates(mesh_shape):
            for box, _ in local_boxes(shape, mesh_shape, coordinate, cuts, order):
                count[region(box.offsets, box.sizes)] += 1
        copies = math.prod(
            n for n, p in zip(mesh_shape, placements, strict=True) if isinstance(p, Replicate)
        )
        assert (count == copies).all()


class _Sizes:
    def __init__(self, sizes):
        self.sizes = sizes

    def size(self, dim):
        return self.sizes[dim]


@given(layouts())
def test_shard_order_is_the_one_torch_finds(layout):
    _, mesh_shape, placements = layout
    theirs = DTensorSpec._maybe_convert_StridedShard_to_shard_order(
        tuple(map(torch_placement, placements)), _Sizes(mesh_shape)
    )
    ours = in_shard_order(mesh_shape, placements)
    if all(not isinstance(p, StridedShard) for p in placements):
        return  # torch counts from the left without looking, with the same result
    assert (theirs is None) == (ours is None)
    if ours is None:
        return
    plain, order = ours
    by_dim = {
        entry.tensor_dim: [axis for axis in order if plain[axis].dim == entry.tensor_dim]
        for entry in theirs
    }
    assert by_dim == {entry.tensor_dim: list(entry.mesh_dims) for entry in theirs}
    assert sorted(order) == sorted(itertools.chain.from_iterable(by_dim.values()))


@given(layouts(even=True))
def test_both_readings_of_strided_shards_agree_where_parts_are_even(layout):
    shape, mesh_shape, placements = layout
    ordered = in_shard_order(mesh_shape, placements)
    if ordered is None:
        return
    plain, order = ordered
    for coordinate in coordinates(mesh_shape):
        assert local_boxes(shape, mesh_shape, coordinate, plain, order) == local_boxes(
            shape, mesh_shape, coordinate, placements
        )


def test_holes_become_several_boxes():
    found = local_boxes((8, 3), (2,), (0,), (StridedShard(0, 2),))
    assert [(box.offsets, box.sizes, here.offsets) for box, here in found] == [
        ((0, 0), (2, 3), (0, 0)),
        ((4, 0), (2, 3), (2, 0)),
    ]


def test_runs_that_touch_are_one_box():
    assert len(local_boxes((8,), (1,), (0,), (StridedShard(0, 4),))) == 1
    assert len(local_boxes((8,), (2, 2), (1, 1), (StridedShard(0, 2), Shard(0)))) == 1


def test_uneven_tensor_parallel_parts_under_fsdp():
    """Seen on real processes: rows 0-3 and 4-6, each cut in three; torch reports 6 for (2, 0)."""
    plain, order = in_shard_order((3, 2), (StridedShard(0, 2), Shard(0)))
    held = {
        at: [
            (box.offsets[0], box.sizes[0]) for box, _ in local_boxes((7,), (3, 2), at, plain, order)
        ]
        for at in coordinates((3, 2))
    }
    assert held == {
        (0, 0): [(0, 2)],
        (0, 1): [(4, 1)],
        (1, 0): [(2, 2)],
        (1, 1): [(5, 1)],
        (2, 0): [],
        (2, 1): [(6, 1)],
    }


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((2,), (StridedShard(0, 3),)),
        ((2, 2), (StridedShard(0, 3), Shard(0))),
        ((2, 2), (Shard(0), StridedShard(0, 2))),
    ],
)
def test_no_order_stands_behind_other_strided_shards(mesh_shape, placements):
    assert in_shard_order(mesh_shape, placements) is None
