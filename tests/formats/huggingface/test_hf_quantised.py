"""Quantised weights, worked out: against torch's own reader and plain arithmetic."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hf_files import elements
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardkeep.dtypes import lookup
from shardkeep.errors import FormatError
from shardkeep.formats.huggingface import find
from shardkeep.stores.reading import ReadFile

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def fp8_case(rng, shape, block=(128, 128)):
    """Every code but those that are not numbers, and scales of all sizes."""
    codes = rng.integers(0, 256, shape, np.uint8)
    codes[(codes & 127) == 127] = 3
    counts = [-(-n // step) for n, step in zip(shape[-2:], block, strict=True)]
    scales = np.exp2(rng.uniform(-12, 12, (*shape[:-2], *counts))).astype(np.float32)
    weight = codes.view(ml_dtypes.float8_e4m3fn)
    big = np.repeat(np.repeat(scales, block[0], axis=-2), block[1], axis=-1)
    return weight, scales, weight.astype(np.float32) * big[..., : shape[-2], : shape[-1]]


def fp4_case(rng, lead, groups):
    blocks = rng.integers(0, 256, (*lead, groups, 16), np.uint8)
    scales = rng.integers(0, 256, (*lead, groups), np.uint8)
    pairs = np.stack([FP4[blocks & 15], FP4[blocks >> 4]], axis=-1).reshape(*lead, groups, 32)
    with np.errstate(all="ignore"):
        values = np.ldexp(pairs, scales.astype(np.int32)[..., None] - 127)
    return blocks, scales, values.reshape(*lead, groups * 32)


def write(root, tensors, config=None):
    save_file(tensors, root / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    if config is not None:
        (root / "config.json").write_text(json.dumps({"quantization_config": config}))


def box(found, name, offsets, sizes):
    """A box, read as such."""
    tensor = found.state[name]
    made = tensor.parts[0].place.read(offsets, sizes)
    assert made.dtype == lookup(tensor.dtype).bits()
    assert made.flags.c_contiguous
    return made.view(lookup(tensor.dtype).to_numpy())


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
def test_blocks_of_fp8(tmp_path, target):
    rng = np.random.default_rng(1)
    weight, scales, values = fp8_case(rng, (300, 260))
    plain = np.arange(4, dtype=np.float32)
    tensors = {"l.weight": weight, "l.weight_scale_inv": scales, "norm": plain}
    write(tmp_path, tensors)
    assert set(find(tmp_path).state) == set(tensors)
    found = find(tmp_path, dequantise=target)
    assert set(found.state) == {"l.weight", "norm"}
    assert found.state["l.weight"].dtype == target
    got = elements(found, found.state["l.weight"])
    with np.errstate(all="ignore"):
        expected = values.astype(lookup(target).to_numpy())
    assert got.tobytes() == expected.tobytes()


def test_as_torch_reads_them(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    rng = np.random.default_rng(2)
    weight, scales, _ = fp8_case(rng, (200, 384))
    blocks, exponents, _ = fp4_case(rng, (2, 6), 3)
    exponents = np.clip(exponents, 20, 230)  # torch multiplies in bfloat16
    write(
        tmp_path,
        {
            "l.weight": weight,
            "l.weight_scale_inv": scales,
            "e_blocks": blocks,
            "e_scales": exponents,
        },
    )
    target = {"l.weight": torch.zeros(200, 384), "e_blocks": torch.zeros(2, 6, 96)}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=torch.float32)
    dcp.load(target, storage_reader=reader, no_dist=True)
    found = find(tmp_path, dequantise="float32")
    assert set(found.state) == {"l.weight", "e"}
    assert np.array_equal(elements(found, found.state["l.weight"]), target["l.weight"].numpy())
    # transformers keeps these the other way round. Of torch's, only as many columns are filled as
    # there are groups: its plan takes the stored shape for the real one.
    theirs = target["e_blocks"].transpose(1, 2).numpy()
    assert np.array_equal(elements(found, found.state["e"])[:, :3], theirs[:, :3])
    assert not theirs[:, 3:].any()


SHAPES = {"two": (150, 140), "three": (2, 33, 70)}


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    root = tmp_path_factory.mktemp("cases")
    rng = np.random.default_rng(3)
    tensors, values = {}, {}
    for name, shape in SHAPES.items():
        weight, scales, made = fp8_case(rng, shape, (32, 16))
        tensors |= {name: weight, f"{name}_scale_inv": scales}
        values[name] = made
    for name, lead in {"flat": (), "rows": (7,), "experts": (3, 5)}.items():
        blocks, exponents, made = fp4_case(rng, lead, 4)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        values[name] = made.swapaxes(-1, -2) if len(lead) == 2 else made
    write(root, tensors, {"weight_block_size": [32, 16]})
    return find(root, dequantise="bfloat16"), values


@given(data=st.data())
def test_any_box_is_what_the_whole_has_there(cases, data):
    found, values = cases
    name = data.draw(st.sampled_from(sorted(values)))
    shape = values[name].shape
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(shape, offsets, strict=True))
    region = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
    with np.errstate(all="ignore"):
        expected = values[name][region].astype(ml_dtypes.bfloat16)
    assert box(found, name, offsets, sizes).tobytes() == expected.tobytes()


def test_some_rows_cost_some_rows(tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    weight, scales, values = fp8_case(rng, (1024, 1024))
    write(tmp_path, {"w": weight, "w_scale_inv": scales})
    found = find(tmp_path, dequantise="float32")
    read = []
    plain = ReadFile.read_into
    monkeypatch.setattr(
        ReadFile, "read_into", lambda self, out, at: read.append(len(out)) or plain(self, out, at)
    )
    got = box(found, "w", (500, 0), (10, 1024))
    assert np.array_equal(got, values[500:510])
    assert sum(read) <= 10 * 1024 + scales.nbytes


BAD = {
    "scales too small": {"w": (256, 256), "w_scale_inv": (1, 2)},
    "scales of another kind": {"w": (256, 256), "w_scale_inv": ("int32", 2, 2)},
    "one dimension": {"w": (256,), "w_scale_inv": (2,)},
    "not sixteen bytes": {"x_blocks": ("uint8", 2, 4, 15), "x_scales": ("uint8", 2, 4)},
    "other groups": {"x_blocks": ("uint8", 2, 4, 16), "x_scales": ("uint8", 2, 5)},
    "exponents of another type": {"x_blocks": ("uint8", 2, 4, 16), "x_scales": ("float32", 2, 4)},
    "both": {"x": ("uint8", 2), "x_blocks": ("uint8", 4, 16), "x_scales": ("uint8", 4)},
    "nothing in it": {"w": (0, 256), "w_scale_inv": (0, 2)},
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(tmp_path, name):
    tensors = {}
    for key, (*spec,) in BAD[name].items():
        dtype = "float32" if key != "w" else ml_dtypes.float8_e4m3fn
        if isinstance(spec[0], str):
            dtype, *spec = spec
        tensors[key] = np.zeros(spec, dtype)
    write(tmp_path, tensors)
    find(tmp_path)
    with pytest.raises(FormatError):
        find(tmp_path, dequantise="bfloat16")
    with pytest.raises(ValueError, match="dequantise"):
        find(tmp_path, dequantise="int8")
