"""Files laid out for Hugging Face: read by safetensors and by us, and as transformers cuts them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hf_files import elements, write_out
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from shardkeep.dtypes import lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.layout import Outline, OutTensor
from shardkeep.formats.huggingface import find, lay_out
from shardkeep.formats.huggingface.shards import parse_size


def outline_of(arrays, values=(), **more):
    tensors = {
        name: array
        if isinstance(array, OutTensor)
        else OutTensor(name, array.dtype.name, array.shape)
        for name, array in arrays.items()
    }
    return Outline({}, tensors, dict(values), **more)


DTYPES = ["bool", "uint8", "int16", "float32", "float64", "int64", "complex64", "bfloat16"]
arrays = st.dictionaries(
    st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    max_size=8,
)


@given(specs=arrays, limit=st.integers(1, 400))
def test_any_layout_is_read_by_safetensors_and_by_us(tmp_path_factory, specs, limit):
    root = tmp_path_factory.mktemp("out")
    rng = np.random.default_rng(0)
    made = {
        name: rng.integers(0, 2, shape).astype(lookup(dtype).to_numpy())
        for name, (dtype, shape) in specs.items()
    }
    files = lay_out(outline_of(made), max_shard_size=limit)
    write_out(files, root, lambda tensor: made[tensor.name])
    read = {}
    for path in sorted(root.glob("*.safetensors")):
        part = load_file(path)
        assert not read.keys() & part.keys()
        read |= part
        payload = sum(array.nbytes for array in part.values())
        assert payload <= limit or len(part) == 1 or payload == max(a.nbytes for a in part.values())
    found = find(root)
    assert read.keys() == found.state.keys() == made.keys()
    for name, array in made.items():
        for got in (read[name], elements(found, found.state[name])):
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert got.tobytes() == array.tobytes()
    if len(files) > 1:
        index = json.loads((root / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in made.values())
        assert index["weight_map"].keys() == made.keys()


def test_as_transformers_cuts_and_names(tmp_path):
    made = {f"t{i}": np.full(100, i, np.float32) for i in range(5)}
    files = lay_out(outline_of(made), max_shard_size=900)
    assert [file.name for file in files] == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    write_out(files, tmp_path, lambda tensor: made[tensor.name])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 2000},
        "weight_map": {f"t{i}": f"model-0000{1 + i // 2}-of-00003.safetensors" for i in range(5)},
    }
    with safe_open(tmp_path / files[0].name, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_sizes():
    assert parse_size("1.5 kB") == 1500
    assert parse_size("2MiB") == 2 << 20
    assert parse_size("10") == 10
    with pytest.raises(ValueError, match="max_shard_size"):
        parse_size("9" * 400)
    for bad in ("", "five", "-1GB", 0, -3, True, "0GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            parse_size(bad)


def test_of_ties_the_first_is_stored(tmp_path):
    shared = OutTensor("embed", "float32", (2, 3))
    other = OutTensor("z", "int64", ())
    outline = outline_of({"embed": shared, "z": other, "head": shared, "a": shared})
    files = lay_out(outline)
    data = {"embed": np.ones((2, 3), np.float32), "z": np.array(5)}
    write_out(files, tmp_path, lambda tensor: data[tensor.name])
    assert load_file(tmp_path / "model.safetensors").keys() == {"embed", "z"}
    state = find(tmp_path).state
    assert state["head"] is state["embed"] is state["a"]


def test_what_has_no_place_is_refused_by_name():
    with pytest.raises(UnsupportedValueError, match="plain values: step"):
        lay_out(outline_of({}, {"step": 3}))
    assert len(lay_out(outline_of({}, {"step": 3}), values="drop")) == 1
    for dtype in ("complex128", "complex32", "int4", "float8_e3m4"):
        with pytest.raises(UnsupportedValueError, match=rf"{dtype}.*: w\."):
            lay_out(outline_of({"w": OutTensor("w", dtype, (2,))}))
    with pytest.raises(UnsupportedValueError, match="__metadata__"):
        lay_out(outline_of({"__metadata__": OutTensor("x", "int8", (2,))}))
    shared = OutTensor("w", "int8", (2,))
    for name in ("format", "DCP_SHARDING_INFO"):
        assert len(lay_out(outline_of({name: shared}))) == 1
        with pytest.raises(UnsupportedValueError, match=rf"tied.*{name}"):
            lay_out(outline_of({"w": shared, name: shared}))
    with pytest.raises(ValueError, match="stem"):
        lay_out(outline_of({}), stem="../x")
    with pytest.raises(ValueError, match="values"):
        lay_out(outline_of({}), values="keep")


def test_two_in_a_byte(tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch

    made = {"w": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    outline = outline_of({"w": OutTensor("w", "float4_e2m1fn_x2", (2, 3))})
    write_out(lay_out(outline), tmp_path, lambda tensor: made["w"])
    (got,) = load_torch(tmp_path / "model.safetensors").values()
    assert (got.dtype, got.shape) == (torch.float4_e2m1fn_x2, (2, 3))
    assert find(tmp_path).state["w"].shape == (2, 3)


def test_what_is_beside_the_state_becomes_text(tmp_path):
    outline = outline_of({}, user_metadata={"run": "x", "loss": 0.5, "total_size": 3})
    write_out(lay_out(outline, single_file=True), tmp_path / "f.safetensors", None)
    with safe_open(tmp_path / "f.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "run": "x", "loss": "0.5"}


def test_what_is_beside_the_state_makes_no_tie(tmp_path, caplog):
    """A tensor called as a text beside the state had that text's key as its other name."""
    made = {"w": np.arange(2.0), "3": np.arange(3.0)}
    tensors = {name: OutTensor(name, "float64", array.shape) for name, array in made.items()}
    outline = outline_of(tensors, user_metadata={"best": "w", "step": 3, "run": "x"})
    write_out(lay_out(outline), tmp_path, lambda tensor: made[tensor.name])
    found = find(tmp_path)
    assert set(found.state) == {"w", "3"}
    assert found.user_metadata["run"] == "x"
    assert "'best' is left out" in caplog.text
    assert "'step' is left out" in caplog.text


def test_what_is_beside_the_state_under_the_name_of_a_tie_is_left_out_and_told(tmp_path, caplog):
    tensor, array = OutTensor("w", "float64", (2,)), np.arange(2.0)
    outline = outline_of({"w": tensor, "tied": tensor}, user_metadata={"tied": "x", "run": "y"})
    write_out(lay_out(outline), tmp_path, lambda tensor: array)
    found = find(tmp_path)
    assert set(found.state) == {"w", "tied"}
    assert found.user_metadata["run"] == "y"
    assert "'tied' is left out: a tensor is called tied" in caplog.text
