"""Box arithmetic against brute force: sets of elements and painted arrays."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardkeep import boxes
from shardkeep.boxes import FEW_SLABS, Gap, Outside, Overlap, tiling_fault
from shardkeep.columns import Boxes, starts
from shardkeep.metadata import ChunkStorageMetadata

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def cells(box):
    """The elements of a box."""
    return {tuple(np.add(box.offsets, at)) for at in np.ndindex(*box.sizes)}


def where(box):
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def matrices(shape, listed):
    form = (len(listed), len(shape))
    return (
        np.array([b.offsets for b in listed], np.int64).reshape(form),
        np.array([b.sizes for b in listed], np.int64).reshape(form),
    )


@st.composite
def box_in(draw, shape):
    offsets = [draw(st.integers(0, extent)) for extent in shape]
    sizes = [draw(st.integers(0, e - o)) for e, o in zip(shape, offsets, strict=True)]
    return ChunkStorageMetadata(offsets, sizes)


@st.composite
def empty_box_in(draw, shape):
    box = draw(box_in(shape))
    dim = draw(st.integers(0, len(shape) - 1))
    return ChunkStorageMetadata(box.offsets, [s * (d != dim) for d, s in enumerate(box.sizes)])


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


@st.composite
def tilings(draw, shape=None):
    if shape is None:
        shape = draw(shapes)
    tiling = cut(draw, [0] * len(shape), list(shape), 5)
    if shape:
        tiling += draw(st.lists(empty_box_in(shape), max_size=2))
    return shape, draw(st.permutations(tiling))


@st.composite
def perturbed(draw):
    """A tiling with one box dropped, doubled, moved, resized or added."""
    shape, tiling = draw(tilings())
    tiling = list(tiling)
    at = draw(st.integers(0, len(tiling) - 1))
    box = tiling[at]
    how = draw(st.sampled_from(["drop", "double", "move", "resize", "add"]))
    nudge = draw(st.lists(st.integers(-1, 1), min_size=len(shape), max_size=len(shape)))
    if how == "drop":
        del tiling[at]
    elif how == "double":
        tiling.append(box)
    elif how == "add":
        tiling.append(draw(box_in(shape)))
    else:
        offsets, sizes = list(box.offsets), list(box.sizes)
        changed = offsets if how == "move" else sizes
        changed[:] = [max(0, x + n) for x, n in zip(changed, nudge, strict=True)]
        tiling[at] = ChunkStorageMetadata(offsets, sizes)
    return shape, tiling


@st.composite
def loose(draw):
    """Boxes anywhere."""
    shape = draw(shapes)
    return shape, draw(st.lists(box_in(shape), max_size=5))


any_boxes = st.one_of(tilings(), perturbed(), loose())


# --- small ones ---


@given(shapes)
def test_volume_strides_and_whole(shape):
    assert boxes.volume(shape) == math.prod(shape)
    assert boxes.whole(shape) == ChunkStorageMetadata((0,) * len(shape), shape)
    if 0 not in shape:
        array = np.zeros(shape, np.int8)
        assert boxes.strides(shape) == np.zeros(shape, np.int8).strides
        assert array.size == boxes.volume(shape)


def test_volume_is_exact_beyond_64_bits():
    assert boxes.volume((2**40, 2**40)) == 2**80


@given(st.data(), shapes)
def test_overlap_is_the_set_of_shared_elements(data, shape):
    a, b = data.draw(box_in(shape)), data.draw(box_in(shape))
    shared = boxes.overlap(a, b)
    assert shared == boxes.overlap(b, a)
    assert shared is None or boxes.volume(shared.sizes)
    assert (set() if shared is None else cells(shared)) == cells(a) & cells(b)


def check_flat_range(shape, start, stop):
    """In order, each contiguous, and as few as can be."""
    found = boxes.flat_range_boxes(shape, start, stop)
    flat = np.arange(math.prod(shape)).reshape(shape)
    pieces = []
    for offsets, sizes in found:
        box = ChunkStorageMetadata(offsets, sizes)
        piece = flat[where(box)].ravel()
        assert piece.size == boxes.volume(sizes) > 0
        assert (np.diff(piece) == 1).all()
        pieces.append(piece)
    joined = np.concatenate(pieces) if pieces else np.zeros(0, int)
    assert np.array_equal(joined, np.arange(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert not any(joins(*pair) for pair in pairwise(found))


@given(st.data(), shapes)
def test_flat_ranges_become_contiguous_boxes_in_order(data, shape):
    start = data.draw(st.integers(0, math.prod(shape)))
    check_flat_range(shape, start, data.draw(st.integers(start, math.prod(shape))))


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (1, 4), (2, 3, 2), (3, 1, 3), (2, 2, 2, 2)])
def test_every_flat_range_of_small_shapes(shape):
    size = math.prod(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            check_flat_range(shape, start, stop)


def joins(one, other):
    """Whether two boxes, one after the other, make one."""
    apart = [dim for dim in range(len(one[0])) if one[0][dim] != other[0][dim]]
    unlike = [dim for dim in range(len(one[0])) if one[1][dim] != other[1][dim]]
    return len(apart) == 1 and set(unlike) <= set(apart)


# --- tiling ---


def test_faults_are_named():
    def fault(shape, *pairs):
        return tiling_fault(shape, *matrices(shape, [ChunkStorageMetadata(*p) for p in pairs]))

    assert fault((4,), ((0,), (2,)), ((2,), (2,))) is None
    assert fault((4,), ((0,), (2,)), ((2,), (3,))) == Outside(1)
    assert fault((4,), ((0,), (3,)), ((2,), (2,))) == Overlap(0, 1)
    assert fault((4,), ((0,), (1,)), ((3,), (1,))) == Gap(ChunkStorageMetadata((1,), (2,)))
    assert fault((2, 4), ((0, 0), (2, 3))) == Gap(ChunkStorageMetadata((0, 3), (2, 1)))
    assert fault((2, 4)) == Gap(ChunkStorageMetadata((0, 0), (2, 4)))
    assert fault(()) == Gap(ChunkStorageMetadata((), ()))
    assert fault((), ((), ())) is None
    assert fault((), ((), ()), ((), ())) == Overlap(0, 1)
    assert fault((0, 3)) is None
    # An empty box covers nothing, and does not cut what is named.
    assert fault((4,), ((1,), (0,))) == Gap(ChunkStorageMetadata((0,), (4,)))


@given(any_boxes)
def test_tiling_fault_agrees_with_painting(case):
    shape, listed = case
    fault = tiling_fault(shape, *matrices(shape, listed))
    outside = [
        row
        for row, box in enumerate(listed)
        if any(o + s > e for o, s, e in zip(box.offsets, box.sizes, shape, strict=True))
    ]
    if outside:
        assert fault == Outside(outside[0])
        return
    count = np.zeros(shape, np.int64)
    for box in listed:
        count[where(box)] += 1
    if (count == 1).all():
        assert fault is None
    elif isinstance(fault, Gap):
        assert 0 not in fault.box.sizes
        assert (count[where(fault.box)] == 0).all()
        assert fault.box.offsets == tuple(np.argwhere(count == 0)[0])
    else:
        assert isinstance(fault, Overlap)
        assert fault.first != fault.second
        assert cells(listed[fault.first]) & cells(listed[fault.second])


@given(tilings())
def test_every_tiling_made_by_cutting_is_one(case):
    shape, listed = case
    assert tiling_fault(shape, *matrices(shape, listed)) is None


def columns(cases):
    """Shapes and boxes of many tensors as `tiled` takes them."""
    shape_start = starts(np.array([len(shape) for shape, _ in cases], np.int64))
    flat = np.array([extent for shape, _ in cases for extent in shape], np.int64)
    tensor = np.repeat(np.arange(len(cases)), [len(listed) for _, listed in cases])
    return shape_start, flat, tensor, Boxes.of([box for _, listed in cases for box in listed])


@given(st.lists(any_boxes, max_size=8), st.integers(0, 2**64 - 1))
def test_tiled_agrees_with_tiling_fault(cases, seed):
    found = boxes.tiled(*columns(cases), seed)
    wanted = [tiling_fault(shape, *matrices(shape, listed)) is None for shape, listed in cases]
    assert found.tolist() == wanted


@pytest.mark.parametrize("seed", range(8))
def test_tiled_is_not_fooled_by_equal_volumes(seed):
    def box(*pair):
        return ChunkStorageMetadata(*pair)

    cases = [
        ((4,), [box((0,), (2,)), box((0,), (2,))]),
        ((4, 4), [box((0, 0), (2, 4)), box((1, 0), (2, 4))]),
        # Every row and every column has the right count, but not every element.
        ((2, 2), [box((0, 0), (1, 1)), box((0, 0), (1, 1)), box((1, 1), (1, 1))]),
        ((2, 2), [box((0, 0), (1, 1)), box((1, 1), (1, 1))] * 2),
        # One too many is the mirror image of the one that is missing.
        ((2, 2), [box(at, (1, 1)) for at in ((0, 0), (0, 1), (0, 1), (1, 1))]),
        ((2, 2), [box((0, 0), (1, 2)), box((1, 0), (1, 2))]),
    ]
    found = boxes.tiled(*columns(cases), seed)
    assert found.tolist() == [False, False, False, False, False, True]


def test_weights_are_those_of_splitmix64():
    """As published, for the seed 1234567."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    step, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    states = [(1234567 + (n + 1) * step) & mask for n in range(len(published))]
    high, low = boxes._random_pair(np.array(states, np.uint64))
    assert high.tolist() == [number >> 33 for number in published]
    assert low.tolist() == [number & (2**31 - 1) for number in published]


def test_weights_are_others_for_every_seed_and_dimension():
    square = Boxes.of([ChunkStorageMetadata((0, 2), (2, 4)), ChunkStorageMetadata((2, 0), (4, 2))])
    seen = {
        tuple(measure) for seed in (0, 1, 2**40, 2**61) for measure in boxes._measures(square, seed)
    }
    assert len({number for pair in seen for number in pair}) == 16


def test_tiled_finds_one_box_astray_among_many():
    count = 200_000
    offsets = np.arange(count, dtype=np.int64)
    listed = Boxes(np.arange(count + 1), offsets.copy(), np.ones(count, np.int64))
    arguments = (np.array([0, 1]), np.array([count]), np.zeros(count, np.int64))
    assert boxes.tiled(*arguments, listed, 1).all()
    listed.offsets[777] += 1
    assert not boxes.tiled(*arguments, listed, 1).any()


def test_tiled_with_huge_coordinates():
    half = 2**61
    cases = [
        ((2**62,), [ChunkStorageMetadata((0,), (half,)), ChunkStorageMetadata((half,), (half,))]),
        (
            (2**62,),
            [ChunkStorageMetadata((0,), (half,)), ChunkStorageMetadata((half - 1,), (half,))],
        ),
    ]
    assert boxes.tiled(*columns(cases), 3).tolist() == [True, False]


@given(st.lists(any_boxes, max_size=6))
def test_linear_starts_are_ravelled_offsets(cases):
    found = boxes.linear_starts(*columns(cases)).tolist()
    for shape, listed in cases:
        for box in listed:
            at = found.pop(0)
            if all(o < e for o, e in zip(box.offsets, shape, strict=True)):
                assert at == (np.ravel_multi_index(box.offsets, shape) if shape else 0)
            elif 0 not in shape:
                strides = boxes.strides(shape)
                assert at == sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    assert not found


def groups_cut_apart(count):
    """Boxes that tile a tensor: each of some groups is cut along a dimension of its own, and only
    the last dimension tells the groups apart."""
    shape = (*[8] * count, count)
    listed = []
    for group in range(count):
        for cut in range(8):
            offsets, sizes = [0] * count + [group], [8] * count + [1]
            offsets[group], sizes[group] = cut, 1
            listed.append(ChunkStorageMetadata(tuple(offsets), tuple(sizes)))
    return shape, listed


@pytest.mark.parametrize("count", [2, 6, 20])
def test_faults_are_not_looked_for_for_ever(count):
    """There are 8 ** count slabs between the edges of these."""
    shape, listed = groups_cut_apart(count)
    assert tiling_fault(shape, *matrices(shape, listed), FEW_SLABS) is None
    assert boxes.tiled(*columns([(shape, listed)]), 12345)[0]
    assert isinstance(tiling_fault(shape, *matrices(shape, listed[:-1]), FEW_SLABS), Gap)
    assert not boxes.tiled(*columns([(shape, listed[:-1])]), 12345)[0]
