"""numpy arrays: every dtype, every memory layout, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import shardkeep
from shardkeep import UnsupportedValueError
from shardkeep.dtypes import TABLE


@pytest.mark.parametrize("row", [r for r in TABLE.values() if r.numpy], ids=lambda r: r.name)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, row):
    raw = np.arange(12 * row.itemsize, dtype=np.uint8)
    if row.name == "bool":
        raw &= 1
    array = raw.view(row.to_numpy()).reshape(3, 4)
    shardkeep.save({"x": array, "t": array.T}, tmp_path)
    target = {"x": np.zeros((3, 4), array.dtype), "t": np.zeros((4, 3), array.dtype)}
    shardkeep.load(target, tmp_path)
    assert target["x"].tobytes() == array.tobytes()
    assert target["t"].tobytes() == np.ascontiguousarray(array.T).tobytes()
    assert shardkeep.open(tmp_path)["x"][...].dtype == array.dtype


@pytest.mark.parametrize("kind", [">f4", ">i8", ">c16", ">c8", ">u2"])
def test_big_endian_is_swapped_on_save_and_on_load(tmp_path, kind):
    array = np.arange(6).astype(kind).reshape(2, 3)
    shardkeep.save({"x": array}, tmp_path)
    opened = shardkeep.open(tmp_path)["x"][...]
    assert opened.dtype.byteorder in "=|"
    assert np.array_equal(opened, array)
    target = np.zeros((2, 3), kind)
    shardkeep.load({"x": target}, tmp_path)
    assert np.array_equal(target, array)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_negative_strides_and_subclasses(tmp_path):
    array = np.arange(12.0).reshape(3, 4)
    state = {"r": array[::-1, ::-2], "m": np.matrix(array), "f": np.asfortranarray(array)}
    shardkeep.save(state, tmp_path)
    out = shardkeep.open(tmp_path).state_dict()
    for key, value in state.items():
        assert np.array_equal(out[key], value)
    target = np.zeros((3, 2))[::-1, ::-1]
    shardkeep.load({"r": target}, tmp_path, keys=["r"])
    assert np.array_equal(target, state["r"])


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array(["text"]),
        np.zeros(2, np.longdouble),
        np.zeros(2, [("a", "i4")]),
        np.zeros(2, "datetime64[s]"),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=["object", "text", "longdouble", "structured", "datetime", "masked"],
)
def test_what_cannot_be_stored_is_refused_by_path(tmp_path, array):
    with pytest.raises(UnsupportedValueError, match=r"deep\.x"):
        shardkeep.save({"deep": {"x": array}}, tmp_path)
