"""Hugging Face checkpoints as others write them, found and read; and files that lie."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
from hf_files import elements, entry, raw_file
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardkeep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
)
from shardkeep.formats.huggingface import find, recognises

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.array([True, False, True])
C = np.array(7, dtype=np.int64)


def same(found, name, array):
    got = elements(found, found.state[name])
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert got.tobytes() == array.tobytes()


# --- what others write


def test_single_file_and_directory(tmp_path):
    save_file({"a": A, "b": B, "c": C}, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        assert recognises(path)
        found = find(path)
        for name, array in {"a": A, "b": B, "c": C}.items():
            same(found, name, array)
        assert found.user_metadata["format"] == "pt"


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model", "adapter_model.fp16"])
def test_several_files_and_an_index(tmp_path, stem):
    names = [f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    save_file({"a": A, "b": B}, tmp_path / names[0])
    save_file({"c": C}, tmp_path / names[1])
    places = {"a": names[0], "b": names[0], "c": names[1]}
    index = {"metadata": {"total_size": 59}, "weight_map": places}
    (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    assert recognises(tmp_path)
    found = find(tmp_path)
    assert list(found.state) == ["a", "b", "c"]
    same(found, "a", A)
    same(found, "c", C)
    assert found.user_metadata["total_size"] == 59


def test_numbered_files_without_an_index_must_be_all(tmp_path):
    for number in (1, 2):
        save_file({f"x{number}": A}, tmp_path / f"model-0000{number}-of-00002.safetensors")
    assert list(find(tmp_path).state) == ["x1", "x2"]
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptionError, match="1 of the 2 files"):
        find(tmp_path)


def test_every_type(tmp_path):
    import torch
    from safetensors.torch import save_file as save_torch

    made = {
        str(dtype).removeprefix("torch."): torch.ones(4, 6).to(dtype)
        for dtype in (
            torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32,
            torch.int32, torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32,
            torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
            torch.float8_e8m0fnu,
        )
    }  # fmt: skip
    made["four"] = torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(torch.float4_e2m1fn_x2)
    save_torch(made, tmp_path / "model.safetensors")
    found = find(tmp_path)
    for name, tensor in made.items():
        stored = found.state[name]
        assert stored.dtype == str(tensor.dtype).removeprefix("torch.")
        assert stored.shape == tuple(tensor.shape)
        assert elements(found, stored).tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_the_hubs_cache_is_followed(tmp_path):
    blobs = tmp_path / "models--x--y" / "blobs"
    snapshot = tmp_path / "models--x--y" / "snapshots" / "abc" / "unet"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": A}, blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../../blobs/0123")
    assert recognises(snapshot)
    same(find(snapshot), "a", A)
    assert find(snapshot).state["a"].parts[0].place.file == "blobs/0123"
    same(find(snapshot / "model.safetensors"), "a", A)


def test_of_the_hubs_cache_only_blobs_are_followed(tmp_path):
    repository = tmp_path / "models--x--y"
    for name in ("blobs", "snapshots/abc", "other"):
        (repository / name).mkdir(parents=True)
    save_file({"a": A}, repository / "other" / "secret")
    (repository / "snapshots" / "abc" / "model.safetensors").symlink_to("../../other/secret")
    with pytest.raises(UnsafeCheckpointError, match="link"):
        find(repository / "snapshots" / "abc")


def test_what_the_format_is_called_is_no_name_of_a_tensor(tmp_path):
    save_file({"pt": A}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert list(find(tmp_path).state) == ["pt"]


def test_names_that_safetensors_dropped_are_tied_again(tmp_path):
    import torch
    from safetensors.torch import save_model

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(3, 4)
            self.head = torch.nn.Linear(4, 3, bias=False)
            self.head.weight = self.embed.weight

    save_model(Tied(), str(tmp_path / "model.safetensors"))
    state = find(tmp_path).state
    assert set(state) == {"embed.weight", "head.weight"}
    assert state["embed.weight"] is state["head.weight"]


def test_several_without_a_common_name_are_refused(tmp_path):
    save_file({"a": A}, tmp_path / "one.safetensors")
    same(find(tmp_path), "a", A)
    save_file({"a": A}, tmp_path / "two.safetensors")
    with pytest.raises(FormatError, match=r"several checkpoints.*one\.safetensors, two"):
        find(tmp_path)
    save_file({"b": B}, tmp_path / "model.safetensors")
    assert list(find(tmp_path).state) == ["b"]


def test_nothing_there(tmp_path):
    assert not recognises(tmp_path)
    assert not recognises(tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError):
        find(tmp_path / "none")
    with pytest.raises(FormatError, match=r"no \.safetensors"):
        find(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"PK\3\4")
    assert not recognises(tmp_path / "model.safetensors")


# --- files that lie

OF_A = entry("F32", [3, 4], 0, 48)
LIES = {
    "empty": b"",
    "short": b"\x08\0\0",
    "terabytes of header": (1 << 43).to_bytes(8, "little") + b"{}",
    "past 64 bits": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "header past the end": raw_file({}, length=400),
    "not JSON": raw_file({}, text=b"{nonsense}"),
    "not UTF-8": raw_file({}, text=b'{"\xff": 1}'),
    "a list": raw_file([1, 2]),
    "deep": raw_file({}, text=b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a key twice": raw_file({}, b"\0" * 48, text=b'{"a":' + json.dumps(OF_A).encode() + b',"a":1}'),
    "overlap": raw_file({"a": OF_A, "b": entry("F32", [3, 4], 40, 88)}, b"\0" * 88),
    "gap": raw_file({"a": OF_A, "b": entry("U8", [8], 56, 64)}, b"\0" * 64),
    "gap at the front": raw_file({"a": entry("U8", [8], 8, 16)}, b"\0" * 16),
    "bytes left over": raw_file({"a": OF_A}, b"\0" * 49),
    "cut": raw_file({"a": OF_A}, b"\0" * 47),
    "too long for its shape": raw_file({"a": entry("F32", [3], 0, 48)}, b"\0" * 48),
    "a product past 64 bits": raw_file({"a": entry("U8", [2**32, 2**32, 1], 0, 0)}),
    "wraps to its length": raw_file({"a": entry("U8", [2**62, 4, 3], 0, 0)}),
    "many dimensions": raw_file({"a": entry("U8", [1] * 5000, 0, 1)}, b"\0"),
    "an extent past 64 bits": raw_file({"a": entry("U8", [2**80, 0], 0, 0)}),
    "a negative extent": raw_file({"a": entry("U8", [-1, -8], 0, 8)}, b"\0" * 8),
    "a negative offset": raw_file({"a": entry("U8", [8], -8, 0)}, b"\0" * 8),
    "backwards": raw_file({"a": entry("U8", [8], 8, 0)}, b"\0" * 8),
    "a flag for a number": raw_file({"a": entry("U8", [True], 0, 1)}, b"\0"),
    "a fraction": raw_file({"a": entry("U8", [1.0], 0, 1)}, b"\0"),
    "no type": raw_file({"a": {"shape": [], "data_offsets": [0, 1]}}, b"\0"),
    "unknown type": raw_file({"a": entry("Q9", [1], 0, 1)}, b"\0"),
    "six bits": raw_file({"a": entry("F6_E2M3", [4], 0, 3)}, b"\0" * 3),
    "half a byte": raw_file({"a": entry("F4", [3], 0, 2)}, b"\0" * 2),
    "half a character": raw_file({"\ud800": entry("U8", [1], 0, 1)}, b"\0"),
    "metadata is a number": raw_file({"__metadata__": {"a": 1}}),
    "metadata is a list": raw_file({"__metadata__": ["a"]}),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused(tmp_path, name):
    path = tmp_path / "model.safetensors"
    path.write_bytes(LIES[name])
    recognises(path)
    recognises(tmp_path)
    with pytest.raises((FormatError, CorruptionError), match=r"model\.safetensors"):
        find(tmp_path)


def index_of(places, **more):
    return json.dumps({"weight_map": places, **more})


BAD_INDEXES = {
    "not JSON": ("{", FormatError),
    "a list": ("[]", FormatError),
    "no map": ("{}", FormatError),
    "empty": (index_of({}), FormatError),
    "not names": (index_of({"a": 3}), FormatError),
    "a key twice": ('{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}', FormatError),
    "missing file": (index_of({"a": "gone.safetensors"}), CorruptionError),
    "missing tensor": (index_of({"z": "x.safetensors"}), FormatError),
    "above": (index_of({"a": "../x.safetensors"}), UnsafeCheckpointError),
    "absolute": (index_of({"a": "/etc/passwd"}), UnsafeCheckpointError),
    "nul": (index_of({"a": "x\0.safetensors"}), UnsafeCheckpointError),
    "backslash": (index_of({"a": "..\\x.safetensors"}), UnsafeCheckpointError),
    "dots": (index_of({"a": ".."}), UnsafeCheckpointError),
    "nothing": (index_of({"a": ""}), UnsafeCheckpointError),
    "a link out": (index_of({"a": "out.safetensors"}), UnsafeCheckpointError),
    "a directory": (index_of({"a": "folder.safetensors"}), FormatError),
    "a pipe": (index_of({"a": "pipe.safetensors"}), FormatError),
    "itself": (index_of({"a": "model.safetensors.index.json"}), FormatError),
    "half a character": (index_of({"a": "\ud800.safetensors"}), UnsafeCheckpointError),
}


@pytest.mark.parametrize("name", BAD_INDEXES)
def test_bad_indexes_are_refused(tmp_path, name):
    text, error = BAD_INDEXES[name]
    root = tmp_path / "inside"
    root.mkdir()
    for place in (root, tmp_path):
        save_file({"a": A}, place / "x.safetensors")
    (root / "out.safetensors").symlink_to("../x.safetensors")
    (root / "folder.safetensors").mkdir()
    os.mkfifo(root / "pipe.safetensors")
    (root / "model.safetensors.index.json").write_text(text)
    assert recognises(root)
    with pytest.raises(error):
        find(root)


def test_a_name_in_two_files_counts_where_the_index_says(tmp_path):
    save_file({"a": A, "b": B}, tmp_path / "x.safetensors")
    save_file({"a": A + 1, "c": C}, tmp_path / "y.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index_of({"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"}))
    same(find(tmp_path), "a", A + 1)
    index.write_text(index_of({"b": "x.safetensors", "c": "y.safetensors"}))
    with pytest.raises(FormatError, match=r"a is in x\.safetensors and in y\.safetensors"):
        find(tmp_path)


@given(data=st.data())
def test_changed_files_are_refused_or_fit(tmp_path_factory, data):
    """Whatever a header says: a clear error, or tensors that lie within the file."""
    root = tmp_path_factory.mktemp("fuzz")
    path = root / "model.safetensors"
    good = raw_file({"a": OF_A, "b": entry("U8", [3], 48, 51)}, bytes(range(51)))
    cut = data.draw(st.integers(0, len(good)))
    at = data.draw(st.integers(0, len(good)))
    noise = data.draw(st.binary(max_size=6))
    path.write_bytes(data.draw(st.sampled_from([good[:cut], good[:at] + noise + good[at + 1 :]])))
    try:
        found = find(root)
    except CheckpointError:
        return
    size = path.stat().st_size
    for tensor in found.state.values():
        for part in tensor.parts:
            assert part.place.start >= 8
            assert part.place.start + tensor.nbytes <= size


# --- files of ranks


def shard_file(path, arrays, offsets):
    told = {name: {"saved_offsets": list(at)} for name, at in offsets.items()}
    save_file(arrays, path, {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0"})


def shard_name(rank):
    return f"shard-{rank:05}-model-00001-of-00001.safetensors"


def test_files_of_ranks_are_joined(tmp_path):
    shard_file(tmp_path / shard_name(1), {"a": A[:2], "c": C}, {"a": (0, 0), "c": ()})
    shard_file(tmp_path / shard_name(2), {"a": A[2:, :1]}, {"a": (2, 0)})
    shard_file(tmp_path / shard_name(3), {"a": A[2:, 1:]}, {"a": (2, 1)})
    assert recognises(tmp_path)
    found = find(tmp_path)
    same(found, "a", A)
    same(found, "c", C)
    assert "DCP_SHARDING_INFO" not in found.user_metadata


BAD_SHARDS = {
    "overlap": (((0, 0), (1, 0)), "overlap"),
    "gap": (((0, 0), (4, 0)), r"leave out \(1, 4\) at \(3, 0\)"),
    "the same": (((0, 0), (0, 0)), "overlap"),
    "negative": (((0, 0), (-1, 0)), "does not say where"),
    "too few": (((0, 0), (3,)), "does not say where"),
    "far": (((0, 0), (2**70, 0)), "does not say where"),
    "not numbers": (((0, 0), (3.0, 0)), "does not say where"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_pieces_that_do_not_fit_are_refused(tmp_path, name):
    places, match = BAD_SHARDS[name]
    for rank, at in enumerate(places, 1):
        shard_file(tmp_path / shard_name(rank), {"a": A}, {"a": at})
    with pytest.raises(FormatError, match=match):
        find(tmp_path)


def test_sharding_information_that_lies_is_refused(tmp_path):
    path = tmp_path / shard_name(1)
    for told in ("{", "[]", "{}", '{"a": 3}', '{"a": {"saved_offsets": 3}}', "[" * 100_000):
        save_file({"a": A}, path, {"DCP_SHARDING_INFO": told})
        with pytest.raises(FormatError, match="does not say where a begins"):
            find(tmp_path)
    shard_file(path, {"a": A}, {"a": (0, 0)})
    shard_file(tmp_path / shard_name(2), {"a": A.astype(np.float64)}, {"a": (3, 0)})
    with pytest.raises(FormatError, match="another dtype"):
        find(tmp_path)


def test_small_types_stay_small(tmp_path):
    save_file({"a": A.astype(ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    same(find(tmp_path), "a", A.astype(ml_dtypes.bfloat16))
