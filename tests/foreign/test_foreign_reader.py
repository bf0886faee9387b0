"""What a parser found, loaded and opened like a checkpoint of ours."""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep.arrays import FlatSink, HostSink, PartSink
from shardkeep.dtypes import lookup
from shardkeep.foreign import detecting
from shardkeep.foreign.found import Found, Part, Raw, StoredTensor, whole
from shardkeep.foreign.reader import ForeignReader, _byte_sink
from shardkeep.sharding import ShardedArray

DTYPES = ["float32", "bfloat16", "int8", "bool", "complex64", "float64"]


def parser(found):
    """A format that finds this wherever it is asked."""
    module = types.ModuleType("shardkeep.formats.found_by_a_test")
    module.SYSTEM = "a test"
    module.recognises = lambda path: (path / "mine").exists()
    module.find = lambda path: Found("a test", path, found(path) if callable(found) else found)
    return module


@pytest.fixture
def known(monkeypatch):
    """Makes a state the content of directories that have a file `mine`."""

    def make(found):
        monkeypatch.setitem(sys.modules, "shardkeep.formats.found_by_a_test", parser(found))
        monkeypatch.setattr(detecting, "FORMATS", ("found_by_a_test",))

    return make


def stored(path: Path, name: str, array: np.ndarray, dtype: str, lead: int, cuts=1, order="C"):
    """Write an array in parts, at odd places; the tensor that tells where they lie."""
    parts = []
    data = bytearray(b"\xff" * lead)
    rows = array.shape[0] if array.ndim else 1
    edges = sorted({0, rows, *(rows * at // cuts for at in range(1, cuts))})
    for low, high in pairwise(edges):
        part = array[low:high] if array.ndim else array
        offsets = (low, *(0,) * (array.ndim - 1)) if array.ndim else ()
        strides = None
        if order == "F" and array.ndim > 1:
            strides = tuple(s // part.itemsize for s in np.asfortranarray(part).strides)
        parts.append(Part(offsets, part.shape, Raw(name, len(data), strides)))
        data += part.tobytes("F" if strides else "C") + b"\xee" * (lead % 3)
    (path / name).write_bytes(data)
    kept = tuple(part for part in parts if 0 not in part.sizes)
    return StoredTensor(dtype, array.shape, kept)


@st.composite
def arrays(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    raw = draw(st.binary(min_size=1, max_size=64))
    count = int(np.prod(shape, dtype=np.int64)) * lookup(dtype).itemsize
    data = (raw * (count // len(raw) + 1))[:count]
    if dtype == "bool":
        data = bytes(b & 1 for b in data)
    array = np.frombuffer(data, lookup(dtype).to_numpy()).reshape(shape)
    return dtype, array


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.tuples(arrays(), st.integers(0, 70), st.integers(1, 3), st.sampled_from("CF")),
        min_size=1,
        max_size=5,
    )
)
def test_opened_loaded_and_sliced_to_the_bit(tmp_path_factory, known, made):
    path = tmp_path_factory.mktemp("found")
    (path / "mine").touch()
    state = {
        f"t{at}": stored(path, f"file{at}", array, dtype, lead, cuts, order)
        for at, ((dtype, array), lead, cuts, order) in enumerate(made)
    }
    known({"model": state, "step": 7})
    with shardkeep.open(path) as ckpt:
        assert ckpt.system == "a test"
        assert ckpt.digest is None
        back = ckpt.state_dict()
        assert back["step"] == 7
        for at, ((dtype, array), *_) in enumerate(made):
            got = back["model"][f"t{at}"]
            assert got.dtype == lookup(dtype).to_numpy()
            assert got.shape == array.shape
            assert got.tobytes() == array.tobytes()
            if array.ndim and array.shape[0] > 1:
                part = ckpt[f"model.t{at}"][1 : array.shape[0]]
                assert part.tobytes() == np.ascontiguousarray(array[1:]).tobytes()
    target = {"model": {f"t{at}": np.zeros_like(a) for at, ((_, a), *_) in enumerate(made)}}
    # One that does not lie row-major.
    (_, first), *_ = made[0]
    target["model"]["t0"] = np.zeros_like(first).T.copy().T
    shardkeep.load(target, path)
    for at, ((_, array), *_) in enumerate(made):
        assert target["model"][f"t{at}"].tobytes() == array.tobytes()


def test_torch_targets_casts_and_parts(tmp_path, known):
    (tmp_path / "mine").touch()
    source = np.arange(60, dtype=np.float32).reshape(6, 10)
    known(
        {
            "w": stored(tmp_path, "w", source, "float32", 5, 2),
            "v": stored(tmp_path, "v", source, "float32", 3, 2, "F"),
        }
    )
    target = {"w": torch.zeros(6, 10), "v": torch.zeros(6, 10, dtype=torch.float64)}
    shardkeep.load(target, tmp_path, cast="widen")
    assert target["w"].numpy().tobytes() == source.tobytes()
    assert (target["v"].numpy() == source).all()
    for name in "wv":
        piece = np.zeros((3, 4), np.float32)
        shard = ShardedArray.from_local(piece, (2, 5), (6, 10))
        shardkeep.load({name: shard}, tmp_path, strict=False)
        assert (piece == source[2:5, 5:9]).all()


def test_more_than_one_unit(tmp_path, known):
    (tmp_path / "mine").touch()
    source = np.random.default_rng(0).integers(0, 2**16, (3000, 2500), np.uint16)
    typed = source.view(ml_dtypes.bfloat16)
    known(
        {
            "c": stored(tmp_path, "c", typed, "bfloat16", 13, 3),
            "f": stored(tmp_path, "f", typed, "bfloat16", 13, 2, "F"),
        }
    )
    target = {name: np.zeros_like(typed) for name in "cf"}
    result = shardkeep.load(target, tmp_path, memory_budget=16 << 20)
    assert all(target[name].tobytes() == source.tobytes() for name in "cf")
    assert result.nbytes == 2 * source.nbytes
    with shardkeep.open(tmp_path, memory_budget=8 << 20) as ckpt:
        assert (ckpt["f"][100:200, 7:9].view(np.uint16) == source[100:200, 7:9]).all()


def test_ties_and_values(tmp_path, known):
    (tmp_path / "mine").touch()
    source = np.arange(6, dtype=np.float32)
    one, copy = (stored(tmp_path, name, source, "float32", 1) for name in ("one", "copy"))
    other = stored(tmp_path, "other", source + 1, "float32", 1)
    known({"a": one, "b": one, "c": copy, "d": other, "list": [1, {"x": (2, np.arange(3))}]})
    shared = torch.zeros(6)
    shardkeep.load({"a": shared, "b": shared, "c": shared}, tmp_path, strict=False)
    assert (shared.numpy() == source).all()
    with pytest.raises(shardkeep.MismatchError, match="shares memory"):
        shardkeep.load({"a": shared, "d": shared}, tmp_path, strict=False)
    with shardkeep.open(tmp_path) as ckpt:
        back = ckpt.state_dict()
        assert back["list"][0] == 1
        assert back["list"][1]["x"][0] == 2
        assert back["list"][1]["x"][1].tolist() == [0, 1, 2]
        with pytest.raises(shardkeep.FormatError, match="no digests"):
            ckpt.verify()
    with pytest.raises(shardkeep.CorruptionError, match="pinned"):
        shardkeep.open(tmp_path, expect_digest="xxh3-128:00")


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (
            lambda: whole("float32", (4,), Raw("../x", 0)),
            shardkeep.UnsafeCheckpointError,
            "outside",
        ),
        (
            lambda: whole("float32", (4,), Raw("/etc/passwd", 0)),
            shardkeep.UnsafeCheckpointError,
            "outside",
        ),
        (lambda: whole("float32", (4,), Raw("w", 1 << 70)), shardkeep.FormatError, "no byte"),
        (lambda: whole("float32", (400,), Raw("w", 0)), shardkeep.CorruptionError, "bytes"),
        (
            lambda: whole("float32", (2, 200), Raw("w", 0, (1, 2))),
            shardkeep.CorruptionError,
            "bytes",
        ),
        (
            lambda: whole("float32", (1 << 40, 1 << 40), Raw("w", 0)),
            shardkeep.FormatError,
            "claims",
        ),
        (lambda: whole("float32", (4,), Raw("gone", 0)), shardkeep.StorageError, "gone"),
        (
            lambda: StoredTensor("float32", (4,), (Part((0,), (2,), Raw("w", 0)),)),
            shardkeep.CorruptionError,
            "nothing covers",
        ),
        (
            lambda: StoredTensor(
                "float32", (4,), (Part((0,), (3,), Raw("w", 0)), Part((2,), (2,), Raw("w", 0)))
            ),
            shardkeep.CorruptionError,
            "overlap",
        ),
        (
            lambda: StoredTensor("float32", (4,), (Part((2,), (3,), Raw("w", 0)),)),
            shardkeep.FormatError,
            "reaches out",
        ),
    ],
    ids=str.split("above absolute far long long-strided huge gone gap overlap outside"),
)
def test_parsers_that_lie(tmp_path, known, make, kind, text):
    (tmp_path / "mine").touch()
    (tmp_path / "w").write_bytes(bytes(100))
    known({"w": make()})
    with pytest.raises(kind, match=text), shardkeep.open(tmp_path) as ckpt:
        ckpt["w"][:1]


def test_a_link_that_leads_out(tmp_path, known):
    (tmp_path / "secret").write_bytes(bytes(100))
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "mine").touch()
    (path / "w").symlink_to(tmp_path / "secret")
    known({"w": whole("float32", (4,), Raw("w", 0))})
    with pytest.raises(shardkeep.FormatError, match="leads out"), shardkeep.open(path) as ckpt:
        ckpt["w"][:]


def test_what_is_no_checkpoint_is_told(tmp_path):
    with pytest.raises(shardkeep.CheckpointNotFoundError):
        shardkeep.open(tmp_path / "nothing")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(shardkeep.CheckpointNotFoundError, match=r"notes\.txt"):
        shardkeep.open(tmp_path)


def test_tensors_are_compared_by_all_their_bytes(tmp_path):
    base = torch.arange(6.0)
    state = {
        "a": base.reshape(2, 3),
        "same": base.reshape(2, 3).clone(),
        "other": base.reshape(2, 3) + 1,
        "shape": base.reshape(3, 2).clone(),
        "type": base.reshape(2, 3).to(torch.int32),
        "none": torch.zeros(0, 3),
        "nothing": torch.zeros(0, 3),
        "one": torch.tensor(1.0),
        "two": torch.tensor(1.0),
    }
    torch.save(state, tmp_path / "a.pt")
    reader = ForeignReader(tmp_path / "a.pt")
    try:
        reader.read_metadata()
        for first, second, equal in (
            ("a", "a", True),
            ("a", "same", True),
            ("a", "other", False),
            ("a", "shape", False),
            ("a", "type", False),
            ("none", "nothing", True),
            ("one", "two", True),
        ):
            assert reader.same_content(first, second) is equal, (first, second)
    finally:
        reader.close()


def test_a_checkpoint_that_is_gone_when_it_is_read(tmp_path):
    torch.save({"a": 1}, tmp_path / "a.pt")
    reader = ForeignReader(tmp_path / "a.pt")
    (tmp_path / "a.pt").unlink()
    with pytest.raises(shardkeep.CheckpointNotFoundError, match="any more"):
        reader.read_metadata()


def test_sinks_as_bytes_are_the_same_memory():
    """Whole, or a part; where it is no memory of the same type there is none."""
    kind, out = lookup("float32"), np.zeros((2, 3), np.uint32)
    part = PartSink(HostSink(out, kind), (1, 1))
    element = np.array([[[1, 2, 3, 4]]], np.uint8)
    _byte_sink(part, kind).put((0, 0, 0), element, lookup("uint8"))
    assert out[1, 1] == 0x04030201
    assert _byte_sink(PartSink(HostSink(out, kind), (0, 0)), lookup("int32")) is None
    flat = FlatSink(out.reshape(-1).view(np.uint8), (2, 3), kind)
    _byte_sink(flat, kind).put((0, 2, 0), element, lookup("uint8"))
    assert out[0, 2] == 0x04030201
