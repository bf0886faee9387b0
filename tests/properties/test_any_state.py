"""Any state, saved by any 1 to 16 ranks, loads bit-equal on any other 1 to 16."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import PerRank, ShardedArray, ThreadRanks
from shardkeep.dtypes import TABLE
from shardkeep.values import same

# Durability is proven elsewhere; here fsync would only cost time.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

DTYPES = [row for row in TABLE.values() if row.numpy]

keys = st.one_of(
    st.text(max_size=4).filter(lambda s: s.isprintable()),
    st.sampled_from(["a", "b", "a.b", "w", "__metadata__", "__shardkeep__.x", "w@0,0", "8", "x/y"]),
    st.integers(-5, 10),  # and no booleans: Python itself cannot hold 1 and True in one dict
    st.tuples(st.integers(0, 2), st.text(max_size=1).filter(str.isprintable)),
)

plain = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=8),
        st.binary(max_size=8),
        st.complex_numbers(),
        st.builds(np.float32, st.floats(width=32)),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.frozensets(st.integers(), max_size=3),
    ),
    max_leaves=6,
)


@dataclass
class Tensor:
    """A tensor, and who holds which boxes of it when it is saved."""

    array: np.ndarray
    plain_on: tuple[int, ...] = ()
    held: dict[int, list[tuple[tuple[slice, ...], tuple[int, ...]]]] = field(default_factory=dict)


def cut(draw, box):
    """Cut a box in two, again and again: irregular tilings."""
    low, size = box
    dims = [d for d, n in enumerate(size) if n > 1]
    if not dims or draw(st.integers(0, 2)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, size[dim] - 1))
    left = tuple(at if d == dim else n for d, n in enumerate(size))
    right = tuple(n - at if d == dim else n for d, n in enumerate(size))
    moved = tuple(x + at if d == dim else x for d, x in enumerate(low))
    return cut(draw, (low, left)) + cut(draw, (moved, right))


def index_of(box):
    low, size = box
    return tuple(slice(a, a + n) for a, n in zip(low, size, strict=True))


@st.composite
def tensors(draw, world):
    row = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    seed = draw(st.integers(0, 2**32 - 1))
    count = int(np.prod(shape)) * row.itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if row.name == "bool":
        raw &= 1
    array = raw.view(row.to_numpy()).reshape(shape)
    everyone = range(world)
    if draw(st.booleans()) or not shape:
        some = draw(st.lists(st.sampled_from(everyone), min_size=1, unique=True))
        return Tensor(array, plain_on=tuple(some))
    tensor = Tensor(array)
    for box in cut(draw, ((0,) * len(shape), shape)):
        holders = draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=3, unique=True))
        replicas = tuple(sorted(holders)) if draw(st.booleans()) else ()
        for rank in holders:
            tensor.held.setdefault(rank, []).append((index_of(box), replicas))
    return tensor


def place(state, path, value):
    for key in path[:-1]:
        state = state.setdefault(key, {})
    state[path[-1]] = value


def layout(array: np.ndarray, how: int) -> np.ndarray:
    """The same elements in other memory: contiguous, Fortran order, or every second one."""
    if how == 1 and array.ndim:  # numpy makes a 0-d array 1-d here
        return np.asfortranarray(array)
    if how == 2 and array.ndim:
        spread = np.zeros([2 * n for n in array.shape], array.dtype)
        view = spread[tuple(slice(None, None, 2) for _ in array.shape)]
        view[...] = array
        return view
    return array.copy()


@st.composite
def cases(draw):
    world = draw(st.integers(1, 16))
    world_after = draw(st.one_of(st.just(world), st.integers(1, 16)))
    paths = draw(
        st.lists(
            st.lists(keys, min_size=1, max_size=3).map(tuple),
            min_size=0,
            max_size=6,
            unique_by=repr,
        )
    )
    leaves = []
    taken = set()
    for path in paths:
        idents = [tuple(map(repr, path[:n])) for n in range(1, len(path) + 1)]
        if idents[-1] in taken or any(i in {x[0] for x in leaves} for i in idents):
            continue
        kind = draw(st.sampled_from(["tensor", "tensor", "value", "per rank"]))
        if kind == "tensor":
            leaf = draw(tensors(world))
        elif kind == "per rank" and world == world_after:
            leaf = [draw(plain) for _ in range(world)]
        else:
            leaf = (draw(plain), tuple(draw(st.lists(st.integers(0, world - 1), min_size=1))))
        leaves.append((idents[-1], path, leaf))
        taken.update(idents)
    return world, world_after, [(path, leaf) for _, path, leaf in leaves]


def saved_state(leaves, rank, how):
    state = {}
    for path, leaf in leaves:
        if isinstance(leaf, list):
            place(state, path, PerRank(leaf[rank]))
        elif isinstance(leaf, tuple):
            value, holders = leaf
            if rank in holders:
                place(state, path, value)
        elif rank in leaf.plain_on:
            place(state, path, layout(leaf.array, how))
        elif rank in leaf.held:
            # One ShardedArray has one set of replicas: boxes held otherwise make no second name.
            boxes = leaf.held[rank]
            pairs = [(layout(leaf.array[b], how), tuple(s.start for s in b)) for b, _ in boxes]
            declared = {replicas for _, replicas in boxes}
            replicas = declared.pop() if len(declared) == 1 else ()
            dtype = leaf.array.dtype
            place(
                state,
                path,
                ShardedArray.from_shards(pairs, leaf.array.shape, dtype=dtype, replicas=replicas),
            )
    return state


def settle_declarations(leaves, world):
    """A box's holders must agree on what they declare; else none of them declares anything."""
    for _, leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.held:
            per_rank = {r: {reps for _, reps in boxes} for r, boxes in leaf.held.items()}
            uniform = all(len(reps) == 1 for reps in per_rank.values())
            groups = {next(iter(reps)) for reps in per_rank.values()} if uniform else {()}
            if not uniform or len(groups) != 1:
                for boxes in leaf.held.values():
                    boxes[:] = [(box, ()) for box, _ in boxes]


@st.composite
def wanted(draw, shape):
    if draw(st.booleans()) or not shape:
        return None
    boxes = cut(draw, ((0,) * len(shape), shape))
    return draw(st.lists(st.sampled_from(boxes), max_size=3, unique=True))


@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_any_state_on_any_ranks(data):
    world, world_after, leaves = data.draw(cases())
    settle_declarations(leaves, world)
    how = data.draw(st.integers(0, 2))
    event(f"{world} -> {world_after} ranks")
    path = tempfile.mkdtemp(dir=MEMORY)
    try:
        results = ThreadRanks(world).run(
            lambda c: shardkeep.save(saved_state(leaves, c.rank, how), path, process_group=c)
        )
        assert len({r.digest for r in results}) == 1

        shapes = [
            data.draw(
                st.lists(wanted(leaf.array.shape), min_size=world_after, max_size=world_after)
            )
            if isinstance(leaf, Tensor)
            else None
            for _, leaf in leaves
        ]
        targets = [target_state(leaves, shapes, rank) for rank in range(world_after)]
        ThreadRanks(world_after).run(
            lambda c: shardkeep.load(targets[c.rank], path, process_group=c)
        )
        for rank, target in enumerate(targets):
            check_target(leaves, shapes, rank, target)
        assert shardkeep.verify(path).ok
        check_opened(leaves, shardkeep.open(path), world)
    finally:
        shutil.rmtree(path)


def target_state(leaves, shapes, rank):
    state = {}
    for (path, leaf), want in zip(leaves, shapes, strict=True):
        if isinstance(leaf, list):
            place(state, path, PerRank(None))
        elif isinstance(leaf, tuple):
            place(state, path, None)
        elif want[rank] is None:
            place(state, path, np.zeros(leaf.array.shape, leaf.array.dtype))
        else:
            pairs = [(np.zeros(size, leaf.array.dtype), low) for low, size in want[rank]]
            place(
                state,
                path,
                ShardedArray.from_shards(pairs, leaf.array.shape, dtype=leaf.array.dtype),
            )
    return state


def fetch(state, path):
    for key in path:
        state = state[key]
    return state


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def check_target(leaves, shapes, rank, target):
    for (path, leaf), want in zip(leaves, shapes, strict=True):
        got = fetch(target, path)
        if isinstance(leaf, list):
            assert same(got.value, leaf[rank])
        elif isinstance(leaf, tuple):
            assert same(got, leaf[0])
        elif want[rank] is None:
            assert bits(got) == bits(leaf.array)
        else:
            for shard, box in zip(got.local_shards, want[rank], strict=True):
                assert bits(shard.array) == bits(leaf.array[index_of(box)])


def check_opened(leaves, ckpt, world):
    state = ckpt.state_dict()
    for path, leaf in leaves:
        got = fetch(state, path)
        if isinstance(leaf, list):
            assert all(same(got[rank], leaf[rank]) for rank in range(world))
        elif isinstance(leaf, tuple):
            assert same(got, leaf[0])
        else:
            assert got.dtype == leaf.array.dtype
            assert got.shape == leaf.array.shape
            assert bits(got) == bits(leaf.array)
