"""HyperParallel's checkpoints: every layout read bit for bit, the present one written."""

import contextlib
import dataclasses
import io
import itertools
import json
import os
import pickle
import pickletools
import shutil
import sys
import time
import tracemalloc
import types

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from foreign_files import DATA, arrays_of, leaves, outline_of, without_libraries, write
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.foreign.hostile_pickles import colliding_tuples

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.foreign.found import Part, Raw, StoredTensor
from shardkeep.foreign.layout import Outline
from shardkeep.foreign.tables import tables_of
from shardkeep.formats import hyper_parallel
from shardkeep.formats.hyper_parallel import finding

CASES = {
    "hyper_parallel_2026_03/single": "hyper_parallel_2026_03/expected_single",
    "hyper_parallel_2026_03/r2": "hyper_parallel_2026_03/expected_r2",
    "hyper_parallel_2026_03/r2_nocoll": "hyper_parallel_2026_03/expected_r2",
    "hyper_parallel_later/r2": "hyper_parallel_later/expected_r2",
    "hyper_parallel_later/r2_nocoll": "hyper_parallel_later/expected_r2",
}


def expected(case):
    return json.loads((DATA / CASES[case] / "expected.json").read_text())


@pytest.mark.parametrize("case", CASES)
def test_real_checkpoints_are_read_bit_for_bit(case):
    found = hyper_parallel.find(DATA / case)
    assert hyper_parallel.recognises(DATA / case)
    tables_of(found)
    got, want = arrays_of(found), expected(case)
    assert set(got) - {"np_arr"} == set(want["tensors"])
    for name, row in want["tensors"].items():
        tensor = found.state[name]
        assert (tensor.dtype, list(tensor.shape)) == (row["dtype"], row["shape"])
        array = np.load(DATA / CASES[case] / row["npy"])
        assert got[name].tobytes() == np.ascontiguousarray(array).tobytes()
    for name, text in want["objects"].items():
        assert repr(found.state[name]) == text


def test_ties_are_kept():
    state = hyper_parallel.find(DATA / "hyper_parallel_2026_03/single").state
    assert state["tied_a"] is state["tied_b"]


def test_real_checkpoints_are_read_without_any_library():
    code = """
from pathlib import Path
from foreign_files import arrays_of
from shardkeep.formats import hyper_parallel
import hashlib
print(json.dumps([{name: hashlib.sha256(a.tobytes()).hexdigest()
                   for name, a in arrays_of(hyper_parallel.find(Path(path))).items()}
                  for path in sys.argv[1:]]))
"""
    for case, got in zip(
        CASES, without_libraries(code, *(DATA / case for case in CASES)), strict=True
    ):
        want = {name: row["sha256"] for name, row in expected(case)["tensors"].items()}
        assert {name: got[name] for name in want} == want


def test_opened_and_loaded_like_ours():
    path = DATA / "hyper_parallel_later/r2"
    want = np.load(DATA / "hyper_parallel_later/expected_r2/col.weight.npy")
    with shardkeep.open(path) as checkpoint:
        assert np.array_equal(checkpoint["col.weight"][1:3, 4:7], want[1:3, 4:7])
        assert checkpoint["sched"].state_dict() == {"lr": 0.01, "milestones": [10, 20]}
    target = {"col.weight": np.zeros_like(want)}
    shardkeep.load(target, path, no_dist=True, strict=False)
    assert np.array_equal(target["col.weight"], want)


# --- what ranks hold under one name -------------------------------------------------------------


def copy(tmp_path, case="hyper_parallel_later/r2_nocoll"):
    root = tmp_path / "copy"
    shutil.copytree(DATA / case, root)
    return root


def test_what_differs_between_ranks_is_kept_by_rank(tmp_path):
    root = copy(tmp_path)
    path = root / "_rank1_.bytes"
    data = path.read_bytes()
    assert data[:5] == pickle.dumps(3, protocol=4)
    path.write_bytes(pickle.dumps(9, protocol=4) + data[5:])
    tensors = root / "_rank1_.safetensors"
    data = bytearray(tensors.read_bytes())
    with safetensors.safe_open(tensors, "np") as file:
        step = file.get_tensor("plain.step")
    start = data.rindex(step.tobytes())
    data[start] ^= 1
    tensors.write_bytes(data)
    found = hyper_parallel.find(root)
    assert found.state["epoch"] == {"rank0": 3, "rank1": 9}
    got = arrays_of(found)
    assert got["plain.step.rank0"].view(np.int64) == step
    assert got["plain.step.rank1"].view(np.int64) != step


def test_a_value_whose_pickle_is_damaged_does_not_become_bytes(tmp_path):
    root = copy(tmp_path, "hyper_parallel_later/r2")
    path = root / "_rank0_.bytes"
    data = path.read_bytes()
    assert data[:5] == pickle.dumps(3, protocol=4)
    path.write_bytes(data[:2] + b"\x0b" + data[3:])
    with pytest.raises(FormatError, match="epoch"):
        hyper_parallel.find(root)


def test_large_copies_that_differ_in_some_rows_only_are_told_apart(tmp_path):
    one = np.zeros((64, 8192), np.float32)
    other = one.copy()
    other[7:10] = 1  # neither at the ends nor in the middle
    (tmp_path / "file").write_bytes(one.tobytes() + other.tobytes())
    looks = {
        finding._look(tmp_path, Part((0, 0), one.shape, Raw("file", start)), one.nbytes)
        for start in (0, one.nbytes)
    }
    assert len(looks) == 2


def test_a_rank_that_is_missing_is_named(tmp_path):
    root = copy(tmp_path)
    (root / "0.metadata").unlink()
    with pytest.raises(CorruptionError, match="rank 0 is missing"):
        hyper_parallel.find(root)
    (root / "1.metadata").rename(root / "0.metadata")
    tracemalloc.start()
    (root / "9999999.metadata").write_bytes((root / "0.metadata").read_bytes())
    with pytest.raises(CorruptionError, match="rank 1 is missing"):
        hyper_parallel.find(root)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    (root / "9999999.metadata").unlink()
    found = hyper_parallel.find(root)
    with pytest.raises(CorruptionError, match=r"row\.weight"):
        tables_of(found)


# --- metadata made to harm ------------------------------------------------------------------------

MODULE = "hyper_parallel.core.distributed_checkpoint.metadata"
STORAGE = "hyper_parallel.core.distributed_checkpoint.storage"
FIELDS = {
    "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "version"),
    "MetadataIndex": ("fqn", "offset", "index"),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "TensorProperties": ("dtype", "requires_grad", "memory_format"),
    "TensorStorageMetadata": ("properties", "size", "chunks"),
    "BytesStorageMetadata": (),
    "StorageInfo": ("relative_path", "offset", "length", "tensor_key"),
}


@pytest.fixture
def library(monkeypatch):
    """Classes as HyperParallel has them, for Python's own pickle."""
    made = types.SimpleNamespace()
    for name in (
        "hyper_parallel",
        "hyper_parallel.core",
        MODULE.rpartition(".")[0],
        MODULE,
        STORAGE,
    ):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, fields in FIELDS.items():
        module = STORAGE if name == "StorageInfo" else MODULE
        cls = dataclasses.make_dataclass(name, fields, frozen=True)
        cls.__module__ = module
        monkeypatch.setattr(sys.modules[module], name, cls, raising=False)
        setattr(made, name, cls)
    return made


def good(lib, **changes):
    """Parts of a small checkpoint, each of which may be replaced."""
    part = {
        "dtype": "torch.float32", "size": (4, 3), "version": "1.0", "planner": {},
        "chunks": [lib.ChunkStorageMetadata((0, 0), (4, 3))], "file": "_rank0_.safetensors",
        "key": "w", "offset": (0, 0), "name": "w", "vfile": "_rank0_.bytes", "at": 0, "length": 4,
    } | changes  # fmt: skip
    tensor = lib.TensorStorageMetadata(
        lib.TensorProperties(part["dtype"], False, None), part["size"], part["chunks"]
    )
    return lib.Metadata(
        {part["name"]: tensor, "step": lib.BytesStorageMetadata()},
        part["planner"],
        {
            lib.MetadataIndex(part["name"], part["offset"], 0): lib.StorageInfo(
                part["file"], 0, -1, part["key"]
            ),
            lib.MetadataIndex("step", (), None): lib.StorageInfo(
                part["vfile"], part["at"], part["length"], None
            ),
        },
        part["version"],
    )


def put(tmp_path, metadata):
    from safetensors.numpy import save_file

    root = tmp_path / "made"
    root.mkdir()
    save_file({"w": np.arange(12, dtype=np.float32).reshape(4, 3)}, root / "_rank0_.safetensors")
    (root / "_rank0_.bytes").write_bytes(b"\x80\x04K\x07."[:4] + b".")
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata, protocol=4)
    (root / ".metadata").write_bytes(data)
    return root


def test_the_checkpoint_that_is_changed_below_is_good(library, tmp_path):
    found = hyper_parallel.find(put(tmp_path, good(library, length=5)))
    assert found.state["step"] == 7
    assert arrays_of(found)["w"].view(np.float32)[3, 2] == 11


HUGE = 2**62
BAD = {
    "another dtype": {"dtype": "torch.float64"},
    "an unknown dtype": {"dtype": "torch.float33"},
    "no dtype": {"dtype": 7},
    "another shape": {"size": (4, 4)},
    "a negative shape": {"size": (-4, 3)},
    "a huge shape": {"size": (HUGE, HUGE)},
    "a shape of texts": {"size": ("4", "3")},
    "no shape": {"size": None},
    "chunks that are none": {"chunks": 3},
    "chunks of other things": {"chunks": [(0, 0)]},
    "no chunks": {"chunks": []},
    "a file above": {"file": "../_rank0_.safetensors"},
    "a file elsewhere": {"file": "/etc/passwd"},
    "a file that is missing": {"file": "_rank7_.safetensors"},
    "a file that is none": {"file": 3},
    "the metadata as a file": {"file": ".metadata"},
    "a file of values as one of tensors": {"file": "_rank0_.bytes"},
    "a key that is missing": {"key": "v"},
    "a key that is none": {"key": 3},
    "an offset of another box": {"offset": (1, 0)},
    "a name that is none": {"name": 3},
    "a name that is endless": {"name": "x" * 5000},
    "a value past the end": {"length": 10**15},
    "a value before the start": {"at": -1},
    "a value above": {"vfile": "../_rank0_.bytes"},
    "a version to come": {"version": "9.0"},
    "a version that is none": {"version": 3},
    "a path through a tensor": {"planner": {"w": ("a",), "step": ("a", "b")}},
    "two things at one path": {"planner": {"w": ("a",), "step": ("a",)}},
    "a list with too many holes": {"planner": {"w": ("a", 10**9), "step": ("b",)}},
    "a path too deep": {"planner": {"w": ("a",) * 100}},
    "a path far too deep": {"planner": {"w": ("a",) * 10_000}},
    "a state that is a list": {"planner": {"w": (0,), "step": (1,)}},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD.keys())
def test_metadata_that_lies_is_refused(library, tmp_path, changes):
    root = put(tmp_path, good(library, **{"length": 5, **changes}))
    with pytest.raises((FormatError, CorruptionError, UnsafeCheckpointError)):
        tables_of(hyper_parallel.find(root))


def test_values_that_share_bytes_are_refused(library, tmp_path):
    metadata = good(library, length=5)
    for number, file in enumerate(("_rank0_.bytes", "./_rank0_.bytes", ".//_rank0_.bytes")):
        metadata.state_dict_metadata[f"v{number}"] = library.BytesStorageMetadata()
        index = library.MetadataIndex(f"v{number}", (), None)
        metadata.storage_data[index] = library.StorageInfo(file, 0, 5, None)
    with pytest.raises(CorruptionError, match=r"_rank0_\.bytes has 5 bytes, and values"):
        hyper_parallel.find(put(tmp_path, metadata))


def test_metadata_of_any_length_is_not_read(library, tmp_path):
    root = put(tmp_path, good(library, length=5))
    os.truncate(root / ".metadata", 1 << 40)
    with pytest.raises(FormatError, match=r"\.metadata has 1099511627776 bytes"):
        hyper_parallel.find(root)


def test_boxes_that_overlap_or_leave_gaps_are_refused(library, tmp_path):
    chunk = library.ChunkStorageMetadata
    for number, chunks in enumerate(
        (
            [chunk((0, 0), (4, 3)), chunk((2, 0), (4, 3))],
            [chunk((1, 0), (4, 3))],
            [chunk((0,), (4,))],
            [chunk((0, 0), (4, 3, 1))],
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(CheckpointError):
            tables_of(hyper_parallel.find(put(folder, good(library, chunks=chunks, length=5))))


def test_boxes_whose_places_collide_are_not_looked_for_for_ever(library, tmp_path):
    # Such products of them as a shape may have: zeros and ones, and one large number.
    fronts = (tuple(map(int, f"{at:031b}")) for at in itertools.count())
    places = colliding_tuples(8000, fronts, low=0, high=2**60)
    assert len(set(map(hash, places))) == 1
    size = (1,) * 32
    metadata = good(library, length=5, size=size)
    chunks = [library.ChunkStorageMetadata(at, size) for at in places]
    metadata.state_dict_metadata["w"].chunks[:] = chunks
    stored = library.StorageInfo("_rank0_.safetensors", 0, -1, "w")
    metadata.storage_data.update(
        {library.MetadataIndex("w", at, number): stored for number, at in enumerate(places)}
    )
    root = put(tmp_path, metadata)
    safetensors.numpy.save_file({"w": np.ones(size, np.float32)}, root / "_rank0_.safetensors")
    begun = time.thread_time()
    found = hyper_parallel.find(root).state["w"]
    assert time.thread_time() - begun < 3
    assert [part.offsets for part in found.parts] == places


def test_paths_that_are_none_leave_names_as_they_are(library, tmp_path):
    planner = {"w": "w", "step": ("a", "b")}
    found = hyper_parallel.find(put(tmp_path, good(library, planner=planner, length=5)))
    assert found.state["a"] == {"b": 7}
    assert arrays_of(found)["w"].shape == (4, 3)


def test_a_folder_without_metadata(tmp_path):
    with pytest.raises(FormatError, match="no metadata of HyperParallel"):
        hyper_parallel.find(tmp_path)


def test_bytes_that_look_like_a_pickle_of_no_protocol_stay_bytes(library, tmp_path):
    root = put(tmp_path, good(library, length=4))
    (root / "_rank0_.bytes").write_bytes(b"\x80\xff\xff.")
    assert hyper_parallel.find(root).state["step"] == b"\x80\xff\xff."


@pytest.mark.parametrize("holds", [[1, 2], {"w": 3}, {1: torch.ones(2)}], ids=repr)
def test_files_of_torch_that_hold_other_things(library, tmp_path, holds):
    root = put(tmp_path, good(library, length=5))
    torch.save(holds, root / "_rank0_.safetensors")
    with pytest.raises(FormatError, match="by name"):
        hyper_parallel.find(root)


@pytest.fixture
def of_ranks(library, tmp_path):
    """Metadata of two ranks, each with a file of its own."""
    root = put(tmp_path, b"")
    (root / ".metadata").unlink()

    def make(rank, **changes):
        file = f"_rank{rank}_.safetensors"
        metadata = good(library, **{"length": 5, "file": file, **changes})
        (root / f"{rank}.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
        array = np.arange(12, dtype=np.float32).reshape(4, 3)
        safetensors.numpy.save_file({"w": array + rank}, root / file)
        return root

    return make


def test_ranks_that_tell_of_another_tensor(of_ranks):
    of_ranks(0)
    with pytest.raises(FormatError, match="and on another rank"):
        hyper_parallel.find(of_ranks(1, dtype="torch.int32"))


def test_a_tensor_that_is_a_value_on_another_rank(library, of_ranks):
    of_ranks(1)
    root, metadata = of_ranks(0), good(library, length=5)
    metadata.state_dict_metadata["step"] = metadata.state_dict_metadata["w"]
    place = library.StorageInfo("_rank0_.safetensors", 0, -1, "w")
    metadata.storage_data[library.MetadataIndex("step", (0, 0), 0)] = place
    (root / "0.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(FormatError, match="step is a tensor on one rank and a value on another"):
        hyper_parallel.find(root)


def test_copies_of_boxes_that_differ_are_not_chosen_from(library, of_ranks):
    """Of one tensor, all of them are kept by rank; boxes of several cannot be told apart."""
    root = of_ranks(0)
    assert set(hyper_parallel.find(of_ranks(1)).state["w"]) == {"rank0", "rank1"}
    chunk = library.ChunkStorageMetadata
    for rank in range(2):
        chunks = [chunk((0, 0), (4, 3)), chunk((4 * rank + 4, 0), (4, 3))]
        metadata = good(
            library, length=5, size=(12, 3), chunks=chunks, file=f"_rank{rank}_.safetensors"
        )
        for box in chunks:
            metadata.storage_data[library.MetadataIndex("w", box.offsets, 0)] = library.StorageInfo(
                f"_rank{rank}_.safetensors", 0, -1, "w"
            )
        (root / f"{rank}.metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    with pytest.raises(CorruptionError, match="nothing says which is right"):
        hyper_parallel.find(root)


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["in full", "here and there"])
def test_copies_that_do_not_lie_row_by_row_are_compared_too(of_ranks, monkeypatch, limit):
    """As torch saves what was transposed; one of them may lie otherwise."""
    monkeypatch.setattr(finding, "_WHOLE", limit)
    of_ranks(0)
    root = of_ranks(1)
    plain = torch.arange(12.0).reshape(4, 3)
    strided = plain.t().contiguous().t()
    assert not strided.is_contiguous()
    for first, second, is_same in (
        (strided, strided, True),
        (strided, plain, True),
        (strided, strided + 1, False),
        (strided, plain + 1, False),
    ):
        for rank, tensor in enumerate((first, second)):
            torch.save({"w": tensor}, root / f"_rank{rank}_.safetensors")
        found = hyper_parallel.find(root)
        assert isinstance(found.state["w"], StoredTensor) is is_same
        got = arrays_of(found)["w" if is_same else "w.rank1"].view(np.float32)
        assert got.tolist() == second.tolist()


def test_copies_are_compared_in_one_way_however_they_lie(of_ranks, monkeypatch):
    """One is small enough to be read in full, and the other lies in something wide."""
    monkeypatch.setattr(finding, "_WHOLE", 4)
    monkeypatch.setattr(finding, "_SAMPLE", 4)
    of_ranks(0)
    root = of_ranks(1)
    narrow = torch.arange(120.0).reshape(4, 30)[:, :3]
    other = narrow.clone()
    other[0, 0] += 1
    for second, is_same in ((narrow.clone(), True), (other, False)):
        for rank, tensor in enumerate((narrow, second)):
            torch.save({"w": tensor}, root / f"_rank{rank}_.safetensors")
        assert isinstance(hyper_parallel.find(root).state["w"], StoredTensor) is is_same


class Harm:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\x80\x04.", b"not a pickle", pickle.dumps({"a": 1}), pickle.dumps(Harm()),
     b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.", b"\x80\x04" + b"]" * 100_000],
    ids=range(8),
)  # fmt: skip
def test_pickles_that_are_something_else_are_refused(tmp_path, data, capsys):
    with pytest.raises((FormatError, CorruptionError, UnsafeCheckpointError)):
        hyper_parallel.find(put(tmp_path, data))
    assert capsys.readouterr().out == ""


def test_values_that_would_run_code_are_refused_by_name(library, tmp_path, capsys):
    data = pickle.dumps(Harm())
    root = put(tmp_path, good(library, length=len(data)))
    (root / "_rank0_.bytes").write_bytes(data)
    with pytest.raises(UnsafeCheckpointError, match="step"):
        hyper_parallel.find(root)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("case", ["hyper_parallel_later/r2", "hyper_parallel_2026_03/r2"])
def test_cut_files_are_refused(tmp_path, case):
    root = copy(tmp_path, case)
    for name in (".metadata", "_rank0_.safetensors", "_rank1_.safetensors"):
        data = (root / name).read_bytes()
        for size in range(0, len(data), 97):
            (root / name).write_bytes(data[:size])
            with pytest.raises(CheckpointError):
                tables_of(hyper_parallel.find(root))
        (root / name).write_bytes(data)


def test_changed_bytes_never_give_another_error(tmp_path):
    root = copy(tmp_path, "hyper_parallel_later/r2")
    data = (root / ".metadata").read_bytes()
    for at in range(0, len(data), 31):
        (root / ".metadata").write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        with contextlib.suppress(CheckpointError):
            tables_of(hyper_parallel.find(root))


def test_links_out_of_the_checkpoint_are_not_followed(tmp_path):
    root = copy(tmp_path, "hyper_parallel_later/r2")
    (root / "_rank0_.safetensors").rename(tmp_path / "outside")
    (root / "_rank0_.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeCheckpointError, match="link"):
        hyper_parallel.find(root)


def test_others_are_not_recognised(tmp_path):
    assert not hyper_parallel.recognises(tmp_path)
    assert not hyper_parallel.recognises(tmp_path / "gone")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch")
    assert not hyper_parallel.recognises(tmp_path)
    assert not hyper_parallel.recognises(tmp_path / ".metadata")


# --- writing ------------------------------------------------------------------------------------

TYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
         "float16", "bfloat16", "float32", "float64", "complex64",
         "float8_e4m3fn", "float8_e5m2"]  # fmt: skip


@st.composite
def arrays(draw):
    kind = draw(st.sampled_from(TYPES))
    shape = draw(npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), np.uint8)
    data = data & 1 if kind == "bool" else data
    return data.copy().view(dtype).reshape(shape)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.lists(st.integers(), max_size=3), st.tuples(st.floats(allow_nan=False), st.text()),
)  # fmt: skip
KEYS = st.text("abc é/", min_size=1, max_size=4)
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        arrays() | VALUES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=3)
    ),
    max_size=4,
)


@settings(max_examples=50)
@given(STATES, st.integers(1, 64))
def test_what_is_written_is_read_back(tmp_path_factory, state, max_nbytes):
    root = tmp_path_factory.mktemp("hp")
    outline, data = outline_of(state)
    write(hyper_parallel.lay_out(outline, max_nbytes=max_nbytes), data, root)
    assert hyper_parallel.recognises(root)
    found = hyper_parallel.find(root)
    tables_of(found)
    got, want = arrays_of(found), {}
    for path, leaf in leaves(state):
        name = ".".join(path)
        if isinstance(leaf, np.ndarray):
            want[name] = leaf
        else:
            value = found.state
            for key in path:
                value = value[key]
            assert type(value) is type(leaf)
            assert value == leaf
    assert set(got) == set(want)
    for name, array in want.items():
        assert (got[name].shape, got[name].tobytes()) == (array.shape, array.tobytes())


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_what_is_written_loads_as_hyper_parallel_loads(library, tmp_path, platform):
    """Its reader: unpickle, look up each box, read its key from the file, unpickle values."""
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    state = {"model": {"w": array, "b": array[0].astype(np.int64)}, "opt": {"lr": 0.1, "k": [1]}}
    outline, data = outline_of(state)
    write(hyper_parallel.lay_out(outline, platform=platform, max_nbytes=60), data, tmp_path)
    raw = (tmp_path / ".metadata").read_bytes()
    pickletools.dis(raw, out=io.StringIO())
    metadata = pickle.loads(raw)
    assert metadata.planner_data == {
        "model.w": ("model", "w"), "model.b": ("model", "b"), "opt.lr": ("opt", "lr"),
        "opt.k": ("opt", "k"),
    }  # fmt: skip
    got = {}
    for index, info in metadata.storage_data.items():
        path = tmp_path / info.relative_path
        if isinstance(metadata.state_dict_metadata[index.fqn], library.BytesStorageMetadata):
            value = path.read_bytes()[info.offset : info.offset + info.length]
            got[index.fqn] = pickle.loads(value)
            continue
        with safetensors.safe_open(path, "np") as file:
            got[index.fqn] = file.get_tensor(info.tensor_key)
            assert file.metadata() == ({"format": "ms"} if platform == "mindspore" else None)
    assert (got["opt.lr"], got["opt.k"]) == (0.1, [1])
    assert np.array_equal(got["model.w"], array)
    tensor = metadata.state_dict_metadata["model.b"]
    assert tensor.properties.dtype == ("torch.int64" if platform == "torch" else "Int64")
    assert (tensor.size, tensor.chunks[0].offsets, tensor.chunks[0].sizes) == ((6,), (0,), (6,))
    assert len(list(tmp_path.glob("_rank*_.safetensors"))) == 2


def test_lists_ints_and_ties(tmp_path):
    tied = np.ones(3, np.float32)
    outline, data = outline_of({"a": tied, "b": tied, "state": {0: {"m": np.zeros(2)}}, "e": {}})
    outline.state["list"] = [outline.tensors["a"], 5]
    write(hyper_parallel.lay_out(outline), data, tmp_path)
    state = hyper_parallel.find(tmp_path).state
    assert isinstance(state["state"]["0"]["m"], StoredTensor)
    assert isinstance(state["list"][0], StoredTensor)
    assert (state["list"][1], state["e"]) == (5, {})


@pytest.mark.parametrize(
    "state",
    [{"odd": np.zeros(2, np.complex128)}, {"odd": Harm()}, {"odd": {(1, 2): 3}},
     {"odd": {"x.y": 1, "x": {"y": 2}}}, {"odd": "\ud800"}, {"odd": {1: 5, "1": {"c": 6}}},
     {"odd": {1: {"x": 5}, "1": {"y": 6}}}],
    ids=range(7),
)  # fmt: skip
def test_what_it_cannot_hold_is_refused_by_name(state):
    with pytest.raises(UnsupportedValueError, match="odd"):
        hyper_parallel.lay_out(outline_of(state)[0])


@pytest.mark.parametrize("platform", ["torch", "mindspore"])
def test_types_that_a_platform_lacks(platform):
    state = {"odd": np.zeros(2, np.complex128 if platform == "mindspore" else ml_dtypes.int4)}
    with pytest.raises(UnsupportedValueError, match=f"odd .* which {platform} lacks"):
        hyper_parallel.lay_out(outline_of(state)[0], platform=platform)


def test_a_platform_or_a_state_of_another_kind():
    with pytest.raises(ValueError, match="platform must be"):
        hyper_parallel.lay_out(outline_of({})[0], platform="jax")
    with pytest.raises(UnsupportedValueError, match="not a list"):
        hyper_parallel.lay_out(Outline([], {}, {}))
