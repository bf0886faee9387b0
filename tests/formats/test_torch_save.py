"""Files of torch.save, read without torch and written for it; torch itself is the oracle."""

from __future__ import annotations

import collections
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.foreign.hostile_pickles import call, glob, p4, u
from tests.foreign.layouts import elements_of, outline_of, write

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.foreign.layout import Outline
from shardkeep.formats import torch_save

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32", "float4_e2m1fn_x2",
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def tensor_of(dtype: str, shape, seed=0) -> torch.Tensor:
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    count = int(np.prod(shape, dtype=int)) * size
    raw = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return torch.from_numpy(raw).view(kind).reshape(shape) if count else torch.zeros(shape).to(kind)


def assert_same(found, state, root):
    """What was found is the state, bit for bit."""
    if isinstance(state, torch.Tensor):
        assert found.dtype == str(state.dtype).removeprefix("torch.")
        assert found.shape == tuple(state.shape)
        assert found.requires_grad == state.requires_grad
        assert elements_of(found, root).tobytes() == bits(state)
    elif isinstance(state, (dict, list, tuple)) and not isinstance(state, torch.Size):
        assert type(found) is type(state)
        pairs = found.items() if isinstance(state, dict) else enumerate(found)
        assert len(found) == len(state)
        for key, item in pairs:
            assert_same(item, state[key], root)
    else:
        assert found == state
        assert type(found).__name__ == type(state).__name__


def every_kind() -> dict:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        **{dtype: tensor_of(dtype, (3, 5), at) for at, dtype in enumerate(DTYPES)},
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(base.clone()),
        "base": base,
        "rows": base[1:3],
        "columns": base[:, 2:4],
        "turned": base.T,
        "every other": base[::2, ::3],
        "expanded": base[:1].expand(5, 6),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "nested": {"list": [1, {"x": base[0]}, (base[1], "y")], 3: -7},
        "plain": {
            "int": 10**40, "float": 1e-300, "none": None, "bool": True, "bytes": b"\0\xff",
            "bytearray": bytearray(b"ab"), "complex": 1 - 2j, "set": {1, 2}, "size": base.shape,
            "dtype": torch.bfloat16, "device": torch.device("cuda:1"), "text": "é" * 300,
            "tuple": (1, (2, "x")),
        },
        "ordered": collections.OrderedDict(b=1, a=base[2]),
        "counter": collections.Counter("abca"),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_every_kind_of_tensor_and_value_is_read(tmp_path, zipped):
    path = tmp_path / "state.pt"
    state = every_kind()
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    assert torch_save.recognises(path)
    found = torch_save.find(path)
    assert found.system == "torch.save"
    assert_same(found.state, state, path)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_every_protocol_is_known_by_its_content(tmp_path, zipped, protocol):
    path = tmp_path / "state"
    state = every_kind()
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert torch_save.recognises(path)
    assert_same(torch_save.find(path).state, state, path)


def test_files_load_into_targets_like_checkpoints_of_ours(tmp_path):
    path = tmp_path / "state.pt"
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    torch.save({"model": model.state_dict(), "step": 7}, path)
    target = {
        "model": torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).state_dict(),
        "step": 0,
    }
    shardkeep.load(target, path)
    assert target["step"] == 7
    for key, tensor in model.state_dict().items():
        assert torch.equal(target["model"][key], tensor)
    opened = shardkeep.open(path)
    np.testing.assert_array_equal(
        opened["model.0.weight"][1:2], model[0].weight[1:2].detach().numpy()
    )


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
def test_ties_and_views_are_known(tmp_path, zipped):
    path = tmp_path / "state.pt"
    w = torch.randn(4, 4)
    torch.save(
        {"a": w, "b": w, "same": w[:], "view": w[1:]}, path, _use_new_zipfile_serialization=zipped
    )
    state = torch_save.find(path).state
    assert state["a"] is state["b"] is state["same"]
    assert state["view"] is not state["a"]


def test_numpy_arrays_and_scalars_in_a_file(tmp_path):
    path = tmp_path / "state.pt"
    torch.save(
        {"a": np.arange(6).reshape(2, 3).T, "s": np.float32(1.5), "b": np.zeros(2, ">f8")}, path
    )
    state = torch_save.find(path).state
    np.testing.assert_array_equal(state["a"], np.arange(6).reshape(2, 3).T)
    assert type(state["s"]) is np.float32
    assert shardkeep.open(path)["a"][1, 0] == 1


def test_attributes_of_tensors_and_dicts_are_left_out(tmp_path):
    path = tmp_path / "state.pt"
    p = torch.nn.Parameter(torch.ones(2))
    p.tensor_model_parallel = True
    p.partition_dim = 0
    t = torch.zeros(2)
    t.note = "x"
    torch.save({"p": p, "t": t, "d": torch.nn.Linear(1, 1).state_dict()}, path)
    state = torch_save.find(path).state
    assert state["p"].requires_grad
    assert state["t"].shape == (2,)
    assert type(state["d"]) is collections.OrderedDict


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_program_of_torchscript_is_named(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "program.pt"))
    with pytest.raises(FormatError, match="TorchScript"):
        shardkeep.open(tmp_path / "program.pt")


class OfAnAccelerator:
    """Pickled as torch pickles a tensor that numpy has to carry."""

    def __init__(self, tensor, stored):
        self.given = stored.numpy(), tensor.dtype, "cpu", False

    def __reduce_ex__(self, protocol):
        return torch._utils._rebuild_device_tensor_from_numpy, self.given


def test_tensors_of_accelerators_have_their_types(tmp_path):
    path = tmp_path / "state.pt"
    floats = torch.randn(3, 5)
    state = {"f": floats, "b": floats.bfloat16(), "i": torch.arange(3)}
    stored = {name: tensor.float() if name == "b" else tensor for name, tensor in state.items()}
    torch.save({n: OfAnAccelerator(state[n], stored[n]) for n in state}, path)
    with shardkeep.open(path) as found:
        for name, tensor in found.state_dict(as_="torch").items():
            assert tensor.dtype == state[name].dtype
            assert torch.equal(tensor, state[name])


def test_reading_needs_no_torch(tmp_path):
    state = {"w": torch.randn(5, 3), "b": torch.randn(3).bfloat16(), "step": 3}
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    np.save(tmp_path / "w.npy", state["w"].numpy())
    np.save(tmp_path / "b.npy", state["b"].view(torch.uint16).numpy())
    code = f"""
import sys; sys.modules["torch"] = None
import numpy as np, shardkeep
from pathlib import Path
root = Path({str(tmp_path)!r})
for name in ("zip.pt", "old.pt"):
    with shardkeep.open(root / name) as found:
        state = found.state_dict(as_="numpy")
    assert np.array_equal(state["w"], np.load(root / "w.npy"))
    assert np.array_equal(state["b"].view(np.uint16), np.load(root / "b.npy"))
    assert state["step"] == 3, state
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- writing


def laid_out(state, path):
    outline, held = outline_of(state)
    write(torch_save.lay_out(outline), held, path)


def same_in_torch(loaded, state):
    if isinstance(state, torch.Tensor):
        assert (loaded.dtype, loaded.shape) == (state.dtype, state.shape)
        assert loaded.requires_grad == state.requires_grad
        assert bits(loaded) == bits(state)
    elif isinstance(state, (dict, list, tuple)):
        assert type(loaded) is type(state)
        keys = state if isinstance(state, dict) else range(len(state))
        assert len(loaded) == len(state)
        for key in keys:
            same_in_torch(loaded[key], state[key])
    else:
        assert loaded == state
        assert type(loaded) is type(state)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_written_files_load_with_weights_only(tmp_path):
    path = tmp_path / "state.pt"
    state = every_kind()
    laid_out(state, path)
    same_in_torch(torch.load(path, weights_only=True), state)
    same_in_torch(torch.load(path, weights_only=True, mmap=True), state)
    assert zipfile.ZipFile(path).testzip() is None
    assert_same(torch_save.find(path).state, state, path)


def test_written_ties_are_ties(tmp_path):
    w = torch.randn(3)
    laid_out({"a": w, "b": [w]}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    assert loaded["a"] is loaded["b"][0]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (frozenset([1]), "frozenset"),
        (Path("x"), "Path"),
        (np.float32(1), "numpy.float32"),
        (10**700, "integer"),
        ("\ud800", "Unicode"),
        (object(), "builtins.object"),
    ],
    ids=["frozenset", "path", "numpy", "long", "surrogate", "object"],
)
def test_what_weights_only_refuses_is_refused_by_its_path(value, text):
    with pytest.raises(UnsupportedValueError, match=r"run\.x") as caught:
        torch_save.lay_out(Outline({"run": {"x": value}}, {}, {}))
    assert text in str(caught.value)


tensors = st.builds(
    tensor_of,
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "uint16", "float8_e5m2", "complex64"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 9),
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=9), st.binary(max_size=9),
)  # fmt: skip
names = st.text("abc.é ", min_size=1, max_size=4) | st.integers(-3, 300)
trees = st.dictionaries(
    names,
    st.recursive(
        tensors | plain,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, max_size=3),
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=8,
    ),
    max_size=5,
)


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(trees, st.booleans())
def test_any_state_goes_from_torch_to_us_and_back(tmp_path, state, zipped):
    path, again = tmp_path / "a.pt", tmp_path / "b.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    assert_same(torch_save.find(path).state, state, path)
    laid_out(state, again)
    same_in_torch(torch.load(again, weights_only=True), state)


# --- damage


def archive(path, entries, **options):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        for name, data in entries.items():
            out.writestr(zipfile.ZipInfo(name), data, **options)
    return path


def members(path):
    with zipfile.ZipFile(path) as source:
        return {info.filename: source.read(info) for info in source.infolist()}


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}, path)
    return path


def refused(path, kind, match):
    with pytest.raises(kind, match=match):
        torch_save.find(path)


def test_nothing_and_other_files(tmp_path):
    path = tmp_path / "x.pt"
    for data in (b"", b"hello", b"PK", b"\x80\x02", bytes(500)):
        path.write_bytes(data)
        assert not torch_save.recognises(path)
        refused(path, CheckpointError, "x.pt")
    assert not torch_save.recognises(tmp_path)
    assert not torch_save.recognises(tmp_path / "absent")
    refused(tmp_path / "absent", CheckpointError, "absent")
    refused(tmp_path, CheckpointError, None)
    os.mkfifo(tmp_path / "pipe")
    assert not torch_save.recognises(tmp_path / "pipe")
    refused(tmp_path / "pipe", FormatError, "regular")


def test_cut_anywhere(good):
    data = good.read_bytes()
    for length in [*range(15, len(data), 97), len(data) - 1]:
        good.write_bytes(data[:length])
        refused(good, CheckpointError, "state.pt")
    good.write_bytes(data + b"x")
    refused(good, CorruptionError, "state.pt")


def test_other_zip_files(tmp_path):
    refused(archive(tmp_path / "x.pt", {"readme": b"hello"}), FormatError, "not one of torch.save")
    refused(
        archive(tmp_path / "x.pt", {"a/data.pkl": b"N.", "b/data.pkl": b"N."}),
        FormatError,
        "not one of",
    )
    refused(
        archive(tmp_path / "x.pt", {"a/data.pkl": b"N.", "a/constants.pkl": b""}),
        FormatError,
        "TorchScript",
    )


def test_compressed_entries(good):
    entries = members(good)
    archive(good, entries, compress_type=zipfile.ZIP_DEFLATED)
    refused(good, FormatError, "compressed")


def test_big_endian(good):
    archive(good, members(good) | {"state/byteorder": b"big"})
    refused(good, FormatError, "big-endian")


def test_a_storage_that_is_missing_or_of_another_length(good):
    entries = members(good)
    archive(good, {k: v for k, v in entries.items() if k != "state/data/1"})
    refused(good, CorruptionError, "storage 1")
    archive(good, entries | {"state/data/1": b"short"})
    refused(good, CorruptionError, "5 bytes, expected 12")


def test_a_changed_pickle(good):
    data = bytearray(good.read_bytes())
    data[data.index(b"_rebuild_tensor_v2") - 20] ^= 1
    good.write_bytes(data)
    refused(good, CorruptionError, "CRC-32")


def end64(data, at, form, *numbers):
    struct.pack_into(form, data, len(data) - 98 + at, *numbers)  # the large end record


def row(data, at, form, *numbers, name=b"state/data/0"):
    struct.pack_into(form, data, data.rindex(name) - 46 + at, *numbers)


def put(data, at, new):
    data[at : at + len(new)] = new


DAMAGE = {
    "directory outside": lambda d: end64(d, 48, "<Q", 1 << 40),
    "directory too long": lambda d: end64(d, 40, "<Q", 1 << 40),
    "end record outside": lambda d: struct.pack_into("<Q", d, len(d) - 34, 1 << 40),
    "too many entries": lambda d: end64(d, 24, "<QQ", 99, 99),
    "too few entries": lambda d: end64(d, 24, "<QQ", 2, 2),
    "several disks": lambda d: end64(d, 16, "<I", 1),
    "encrypted": lambda d: row(d, 8, "<H", 1),
    "longer than it is": lambda d: row(d, 20, "<II", 5000, 5000),
    "a gigabyte": lambda d: row(d, 20, "<II", 1 << 30, 1 << 30),
    "packed and unpacked differ": lambda d: row(d, 20, "<I", 3),
    "64 bits without an extra field": lambda d: row(d, 24, "<I", 0xFFFFFFFF),
    "elsewhere": lambda d: row(d, 42, "<I", 7),
    "inside another": lambda d: row(d, 42, "<I", 20, name=b"state/data/1"),
    "another name in front": lambda d: put(d, d.index(b"state/data/0"), b"other"),
    "a bad sign in front": lambda d: put(d, d.index(b"state/data/0") - 30 - 0, b"XX"),
    "no end": lambda d: put(d, len(d) - 22, b"XX"),
    "a bad sign in the directory": lambda d: put(d, d.rindex(b"state/data/0") - 46, b"XX"),
    "a name twice": lambda d: put(d, d.rindex(b"state/data/1"), b"state/data/0"),
    "a name that is no text": lambda d: put(d, d.rindex(b"state/data/1"), b"\xff"),
    "extra bytes in front too long": lambda d: put(d, d.index(b"state/data/0") - 2, b"\xff\xff"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_directories(good, name):
    data = bytearray(good.read_bytes())
    DAMAGE[name](data)
    good.write_bytes(data)
    refused(good, (CorruptionError, FormatError), "state.pt")


STORAGE = b"(" + u("storage") + glob("torch", "FloatStorage") + u("0") + u("cpu") + b"K\x04tQ"


@pytest.mark.parametrize(
    ("pickle", "kind", "match"),
    [
        (p4(call("os", "system", u("true"))), UnsafeCheckpointError, r"os\.system"),
        (p4(u("x") + b"Q"), UnsafeCheckpointError, "persistent id"),
        (p4(b"(" + u("module") + b"NNNNtQ"), UnsafeCheckpointError, "persistent id"),
        (p4(STORAGE), FormatError, "bare storage"),
        (p4(STORAGE.replace(b"\x01" + b"0", b"\x01" + b"9")), CorruptionError, "storage 9"),
        (p4(STORAGE.replace(b"K\x04", b"K\x05")), CorruptionError, "16 bytes, expected 20"),
        (p4(STORAGE.replace(b"K\x04", b"J\xff\xff\xff\xff")), FormatError, "described"),
        (p4(STORAGE.replace(b"\x0cFloatStorage", b"\x0cQInt8Storage")), FormatError, "quantised"),
        (p4(call("torch._utils", "_rebuild_sparse_tensor", b"N", b"N")), FormatError, "sparse"),
        (p4(call("torch._utils", "_rebuild_qtensor", b"N")), FormatError, "quantised"),
        (p4(call("torch._utils", "_rebuild_meta_tensor_no_storage", b"N")), FormatError, "meta"),
        (p4(call("torch._utils", "_rebuild_wrapper_subclass", b"N")), FormatError, "subclass"),
        (p4(glob("torch", "strided")), UnsafeCheckpointError, r"torch\.strided"),
        (p4(call("numpy._core.multiarray", "_reconstruct", glob("numpy", "ndarray"), b")", b"N")),
         FormatError, "without a state"),
        (b"\xff\xff", FormatError, "pickle"),
    ],
)  # fmt: skip
def test_hostile_and_odd_pickles_in_an_archive(tmp_path, pickle, kind, match):
    path = archive(tmp_path / "x.pt", {"a/data.pkl": pickle, "a/data/0": bytes(16)})
    refused(path, kind, match)


def test_modules_and_subclasses_are_refused_by_name(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(torch.nn.Linear(1, 1), path)
    refused(path, UnsafeCheckpointError, r"torch\.nn\.modules\.linear\.Linear")
    torch.save({"s": torch.eye(3).to_sparse()}, path)
    refused(path, FormatError, "sparse")


def old(tmp_path, state):
    path = tmp_path / "old.pt"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


def test_old_files_cut_or_damaged(tmp_path):
    path = old(tmp_path, {"w": torch.arange(6.0)})
    data = path.read_bytes()
    for length in range(15, len(data), 13):
        path.write_bytes(data[:length])
        refused(path, CheckpointError, "old.pt")
    for new, text in (
        (data.replace(b"M\xe9\x03", b"M\xe8\x03", 1), "version 1000"),
        (data.replace(b"little_endian", b"little_endiaN", 1), "big-endian"),
        (data[:-32] + b"\xff" * 8 + data[-24:], "length"),
        (data.replace(b"X\x05\x00\x00\x00", b"X\x04\x00\x00\x00", 1), ""),
    ):
        assert new != data
        path.write_bytes(new)
        refused(path, CheckpointError, text or None)


def test_old_files_that_are_longer_than_one_look(tmp_path):
    state = {f"name {at}": at for at in range(60_000)} | {"w": torch.arange(6.0)}
    path = old(tmp_path, state)
    assert path.stat().st_size > 1 << 20
    assert_same(torch_save.find(path).state, state, path)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.booleans())
def test_any_damage_gives_a_state_or_a_checkpoint_error(tmp_path, data, zipped):
    path = tmp_path / "x.pt"
    torch.save({"w": torch.arange(6.0), "n": [1, "x"]}, path, _use_new_zipfile_serialization=zipped)
    whole = bytearray(path.read_bytes())  # of varying length: addresses are in there
    places = st.integers(0, 10**6)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(places) % len(whole)] = data.draw(st.integers(0, 255))
    cut = data.draw(places) % len(whole) if data.draw(st.booleans()) else len(whole)
    path.write_bytes(whole[:cut])
    try:
        state = torch_save.find(path).state
    except CheckpointError:
        return
    for leaf in state.values() if isinstance(state, dict) else ():
        if hasattr(leaf, "parts"):
            elements_of(leaf, path)


def test_a_small_file_does_not_claim_to_be_a_large_state(tmp_path):
    """Every tensor may repeat elements, but not thousands of them."""
    few = torch.zeros(1000)
    state = {f"t{at}": few[at : at + 1].expand(1 << 24) for at in range(500)}
    torch.save(state, tmp_path / "large.pt")
    with pytest.raises(FormatError, match="far larger than the file"):
        shardkeep.open(tmp_path / "large.pt")
    torch.save({name: state[name] for name in ("t1", "t2")}, tmp_path / "few.pt")
    assert shardkeep.open(tmp_path / "few.pt")["t1"].shape == (1 << 24,)
    views = {str(at): few[at : at + 500] for at in range(500)}
    torch.save(views, tmp_path / "views.pt")
    assert len(shardkeep.open(tmp_path / "views.pt")) == 500
