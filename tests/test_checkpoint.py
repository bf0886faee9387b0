"""Opened checkpoints: slicing like numpy, names and paths, and what a read costs."""

from __future__ import annotations

import os
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import ShardedArray, ThreadRanks


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])


@pytest.fixture(scope="module")
def cube(tmp_path_factory):
    """A 3-d tensor in irregular pieces on three ranks."""
    path = tmp_path_factory.mktemp("cube")
    array = np.arange(6 * 7 * 8, dtype=np.int32).reshape(6, 7, 8)
    boxes = [
        [((0, 0, 0), (3, 7, 3)), ((3, 0, 0), (3, 2, 8))],
        [((0, 0, 3), (3, 7, 5))],
        [((3, 2, 0), (3, 5, 8))],
    ]

    def state(rank):
        pairs = [
            (array[tuple(slice(o, o + n) for o, n in zip(low, size, strict=True))], low)
            for low, size in boxes[rank]
        ]
        return {"x": ShardedArray.from_shards(pairs, array.shape)}

    ThreadRanks(3).run(lambda c: shardkeep.save(state(c.rank), path, process_group=c))
    return array, shardkeep.open(path)["x"]


indices = st.one_of(
    st.integers(-6, 5),
    st.slices(6),
    st.just(slice(None, None, -1)),
    st.lists(st.integers(-6, 5), max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(first=indices, second=st.slices(7), third=st.one_of(st.slices(8), st.integers(-8, 7)))
def test_indexing_is_numpys(cube, first, second, third):
    array, view = cube
    for index in [first, (first, second), (..., third), (slice(None), second, third), ...]:
        expected = array[index]
        assert np.array_equal(view[index], expected)
        assert view[index].shape == expected.shape


def test_an_index_that_cannot_be_says_so(cube):
    _, view = cube
    wide = np.zeros((2, 2), int)
    for bad in [6, -7, (0, 0, 0, 0), "x", None, (..., ...), 1.5, True, ([0], [1]), ([0], 1), wide]:
        with pytest.raises(IndexError):
            view[bad]


def test_views_know_themselves(cube):
    array, view = cube
    assert (view.shape, view.dtype, view.ndim, len(view)) == (array.shape, "int32", 3, 6)
    assert view.nbytes == array.nbytes
    assert len(view.metadata.chunks) == 4
    assert np.array_equal(np.asarray(view), array)
    assert np.array_equal(view.torch((slice(1, 3), 2)).numpy(), array[1:3, 2])
    assert "int32" in repr(view)


def test_names_paths_and_sub_views(tmp_path):
    state = {
        "model": {"layers": [{"w": np.ones(2)}, {"w": np.zeros(2)}], 7: {"b": np.ones(1)}},
        "optim": OrderedDict(lr=0.5, betas=(0.9, 0.99)),
        "step": 3,
    }
    shardkeep.save(state, tmp_path)
    with shardkeep.open(tmp_path) as ckpt:
        assert list(ckpt) == [
            "model.layers.0.w",
            "model.layers.1.w",
            "model.7.b",
            "optim.lr",
            "optim.betas",
            "step",
        ]
        assert len(ckpt) == 6
        assert ckpt.find("model.*.w") == ["model.layers.0.w", "model.layers.1.w"]
        assert ckpt["step"] == 3
        assert ckpt["optim.betas"] == (0.9, 0.99)
        assert list(ckpt["model"]) == ["layers", 7]
        assert ckpt["model"]["layers"][0]["w"][0] == 1
        assert ckpt["model", 7, "b"][0] == 1
        assert ckpt["model.layers"][1]["w"][0] == 0
        assert "model" in ckpt
        assert "nothing" not in ckpt
        assert ckpt["optim"].state_dict() == {"lr": 0.5, "betas": (0.9, 0.99)}
        assert type(ckpt["optim"].state_dict()) is OrderedDict
        for missing in ["x", ("model", "7"), ("step", 1), ("model", 7, "q")]:
            with pytest.raises(KeyError):
                ckpt[missing]
        with pytest.raises(ValueError, match="as_"):
            ckpt.state_dict(as_="jax2")


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs /proc/self/io")
def test_ten_rows_of_a_large_tensor_cost_little(tmp_path):
    rows = np.zeros((1 << 16, 1024), np.float32)
    rows[:] = np.arange(1 << 16, dtype=np.float32)[:, None]
    shardkeep.save({"emb": rows}, tmp_path)
    before = bytes_read()
    view = shardkeep.open(tmp_path)["emb"]
    opened = bytes_read()
    got = view[40_000:40_010]
    assert np.array_equal(got, rows[40_000:40_010])
    assert bytes_read() - opened < 512 << 10
    assert opened - before < 256 << 10


def test_many_files_need_few_descriptors(tmp_path):
    import resource

    array = np.arange(200.0)
    ThreadRanks(100).run(
        lambda c: shardkeep.save(
            {
                "x": ShardedArray.from_local(
                    array[2 * c.rank : 2 * c.rank + 2], (2 * c.rank,), (200,)
                )
            },
            tmp_path,
            process_group=c,
        )
    )
    open_now = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 16, hard))
    loaded = np.zeros(200)
    try:
        with shardkeep.open(tmp_path) as ckpt:
            assert np.array_equal(ckpt["x"][...], array)
        shardkeep.load({"x": loaded}, tmp_path)
        assert shardkeep.verify(tmp_path).ok
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert np.array_equal(loaded, array)
    assert len(os.listdir("/proc/self/fd")) <= open_now + 1
