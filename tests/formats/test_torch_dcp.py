"""Checkpoints of torch.distributed.checkpoint, read without torch and written for it."""

from __future__ import annotations

import contextlib
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.foreign.hostile_pickles import call, colliding_tuples, glob, p4, u
from tests.foreign.layouts import elements_of, outline_of, write
from tests.formats.test_torch_save import DTYPES, bits, tensor_of, trees
from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
)

import shardkeep
from shardkeep.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from shardkeep.foreign import pickles
from shardkeep.foreign.dcp.classes import CLASSES
from shardkeep.foreign.layout import Outline, OutTensor
from shardkeep.formats import torch_dcp

FIXTURE = Path(__file__).parent.parent / "data" / "torch_dcp_2.2" / "r2"

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def flat(state, path=()):
    """Leaves by path, as torch flattens: keys as text."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from flat(value, (*path, str(key)))
    else:
        yield path, state


def assert_same(found, state, root, key=str):
    """What was found is the state, bit for bit; keys are texts, but for those inside of tuples."""
    if isinstance(state, torch.Tensor):
        assert found.dtype == str(state.dtype).removeprefix("torch.")
        assert found.shape == tuple(state.shape)
        assert elements_of(found, root).tobytes() == bits(state)
    elif isinstance(state, dict):
        assert set(found) == set(map(key, state))
        for name, value in state.items():
            assert_same(found[key(name)], value, root, key)
    elif isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        assert type(found) is type(state)
        inside = key if type(state) is list else (lambda name: name)
        for one, other in zip(found, state, strict=True):
            assert_same(one, other, root, inside)
    else:
        assert found == state


def every_kind() -> dict:
    base = torch.arange(24.0).reshape(4, 6)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "dtypes": {dtype: tensor_of(dtype, (3, 5), at) for at, dtype in enumerate(DTYPES)},
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "turned": base.T.clone(memory_format=torch.preserve_format),
        "rows": base[1:3],
        "list": [1, {"x": base[0]}, base[1:2]],
        "tuple": (base[2], "y", (1, base[3])),
        "plain": [1, 2.5, None, "x", (3, b"4")],
        "size": base.shape,
        "step": 7,
    }


@pytest.mark.parametrize("threads", [1, 3])
def test_every_kind_of_tensor_and_value_is_read(tmp_path, threads):
    state = every_kind()
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, thread_count=threads))
    assert torch_dcp.recognises(tmp_path)
    found = torch_dcp.find(tmp_path)
    assert found.system == "torch.distributed.checkpoint"
    assert_same(found.state, state, tmp_path)


def test_a_file_for_each_item(tmp_path):
    state = {"a": torch.randn(3), "b": torch.randn(2, 2), "n": 1}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, single_file_per_rank=False))
    assert len(list(tmp_path.glob("*.distcp"))) == 3
    assert_same(torch_dcp.find(tmp_path).state, state, tmp_path)


def test_many_alike_and_nearly_alike(tmp_path):
    state = {f"{at}": torch.randn(8, 4) if at % 3 else torch.randn(4, 8) for at in range(40)}
    state |= {f"t{at}": torch.randn(4, 8).T for at in range(5)}
    dcp.save(state, checkpoint_id=tmp_path)
    assert_same(torch_dcp.find(tmp_path).state, state, tmp_path)


def test_checkpoints_load_into_targets_like_ours(tmp_path):
    state = every_kind()
    dcp.save(state, checkpoint_id=tmp_path)
    target = {"model": {"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}, "step": 0}
    shardkeep.load(target, tmp_path, keys=["model.*", "step"])
    assert torch.equal(target["model"]["weight"], state["model"]["weight"])
    assert target["step"] == 7
    with shardkeep.open(tmp_path) as opened:
        np.testing.assert_array_equal(opened["turned"][2:4, 1], state["turned"][2:4, 1].numpy())


def test_the_fixture_of_torch_2_2_without_torch():
    code = f"""
import json, sys; sys.modules["torch"] = None
import numpy as np, shardkeep
from pathlib import Path
root = Path({str(FIXTURE)!r})
told = json.loads((root / "expected/expected.json").read_text())["tensors"]
with shardkeep.open(root) as found:
    for name, row in told.items():
        want = np.load(root / "expected" / row["file"])
        have = found[name][...] if row["shape"] else found[name][()]
        have = np.ascontiguousarray(have)
        assert list(want.shape) == row["shape"] and str(have.dtype) == row["dtype"], name
        assert have.tobytes() == want.tobytes(), name
    state = found.state_dict(as_="numpy")
    assert (state["step"], state["lr"], state["name"]) == (17, 0.25, "run-7")
    assert state["nested"]["t"] == (1, "x")
    assert state["nested"]["a"][:2] == [1, 2]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert len(json.loads((FIXTURE / "expected/expected.json").read_text())["tensors"]) == 9


def test_metadata_of_torch_1_13(tmp_path):
    shutil.copytree(FIXTURE, tmp_path / "old")
    path = tmp_path / "old" / ".metadata"
    data = path.read_bytes()
    new = rewritten(data, "torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
    path.write_bytes(new)
    assert torch_dcp.recognises(tmp_path / "old")
    old, new = torch_dcp.find(FIXTURE).state, torch_dcp.find(tmp_path / "old").state
    assert new["step"] == old["step"]
    weight = elements_of(
        new["model"]["emb.weight"]
        if "emb.weight" in new["model"]
        else new["model"]["emb"]["weight"],
        tmp_path / "old",
    )
    assert weight.shape == (13, 8)


def rewritten(data, old, new):
    """A pickle of protocol 4 in one frame, whose texts that begin with `old` begin with `new`."""
    import pickletools

    out, last = bytearray(), 0
    ops = list(pickletools.genops(data))
    for (op, arg, at), (_, _, end) in zip(ops, [*ops[1:], (None, None, len(data))], strict=True):
        if op.name == "FRAME":
            pass
        elif op.name == "SHORT_BINUNICODE" and arg.startswith(old):
            text = (new + arg.removeprefix(old)).encode()
            out += b"\x8c" + bytes([len(text)]) + text
        else:
            out += data[at:end]
        last = end
    assert last == len(data)
    return bytes(out)


def test_a_flat_state_stays_flat(tmp_path):
    state = {"a.b": torch.ones(2), "c": 3}
    dcp.save(
        state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False)
    )
    assert_same(torch_dcp.find(tmp_path).state, state, tmp_path)


def test_items_as_safetensors(tmp_path):
    state = {"w": torch.randn(3, 4), "b": torch.randn(4).bfloat16(), "step": 3}
    writer = FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer)
    assert_same(torch_dcp.find(tmp_path).state, state, tmp_path)


def test_compressed_items(tmp_path):
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"w": torch.arange(1000.0).reshape(10, 100), "t": (torch.ones(3), 1), "step": 3}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, _extensions=[ZStandard()]))
    assert_same(torch_dcp.find(tmp_path).state, state, tmp_path)
    with shardkeep.open(tmp_path) as opened:
        np.testing.assert_array_equal(opened["w"][3:5, 10:20], state["w"][3:5, 10:20].numpy())
    damaged(tmp_path, lambda m: None)
    file = next(tmp_path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-200] + bytes(200))
    with pytest.raises(CheckpointError):
        shardkeep.open(tmp_path).state_dict()


def test_compressed_items_without_zstandard_say_what_to_install(tmp_path):
    state = {"step": 3}
    dcp.save(state, checkpoint_id=tmp_path)
    edited(
        tmp_path,
        lambda m: [
            setattr(i, "transform_descriptors", ["stream.zstd/1"]) for i in m.storage_data.values()
        ],
    )
    code = f"""
import sys; sys.modules["zstandard"] = None
import shardkeep
from shardkeep.formats import torch_dcp
from pathlib import Path
try:
    torch_dcp.find(Path({str(tmp_path)!r}))
except shardkeep.errors.MissingDependencyError as error:
    assert "shardkeep[zstd]" in str(error)
else:
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- metadata of each rank


def by_rank(tmp_path, states):
    """As ranks that save without collectives leave it: files and metadata of each."""
    for rank, state in enumerate(states):
        part = tmp_path / f"part{rank}"
        dcp.save(state, checkpoint_id=part)
        for file in part.glob("*.distcp"):
            file.rename(tmp_path / file.name.replace("__0", f"__{rank}"))
        metadata = pickle.loads((part / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.relative_path = info.relative_path.replace("__0", f"__{rank}")
        (tmp_path / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
        shutil.rmtree(part)
    return tmp_path


def test_metadata_that_ranks_wrote_for_themselves(tmp_path):
    w = torch.randn(3)
    by_rank(tmp_path, [{"w": w, "n": 5}, {"w": w.clone(), "n": 5, "only": torch.ones(2)}])
    assert torch_dcp.recognises(tmp_path)
    assert_same(torch_dcp.find(tmp_path).state, {"w": w, "n": 5, "only": torch.ones(2)}, tmp_path)
    assert "only" not in torch_dcp.find(tmp_path, rank=0).state


def test_ranks_that_saved_different_things_are_told(tmp_path):
    by_rank(tmp_path, [{"w": torch.zeros(3), "n": 5}, {"w": torch.ones(3), "n": 6}])
    with pytest.raises(FormatError, match=r"w.*pass rank="):
        torch_dcp.find(tmp_path)
    assert torch_dcp.find(tmp_path, rank=1).state["n"] == 6
    with pytest.raises(CheckpointNotFoundError, match="rank 7"):
        torch_dcp.find(tmp_path, rank=7)


# --- writing


def laid_out(state, path, **options):
    outline, held = outline_of(state)
    write(torch_dcp.lay_out(outline, **options), held, path)


@pytest.mark.parametrize(
    "options", [{}, {"chunk_bytes": 64}, {"file_bytes": 2000, "chunk_bytes": 90}]
)
def test_written_checkpoints_load_with_torch(tmp_path, options):
    state = every_kind()
    laid_out(state, tmp_path / "w", **options)
    dcp_to_torch_save(tmp_path / "w", tmp_path / "x.pt")
    again = torch.load(tmp_path / "x.pt", weights_only=False)
    for path, leaf in flat(state):
        have = again
        for key in path:
            have = have[key]
        same_in_torch(have, leaf)
    target = {
        "scalar": torch.zeros(()),
        "rows": torch.zeros(2, 6),
        "list": [0, {"x": torch.zeros(6)}, torch.zeros(1, 6)],
    }
    dcp.load(target, checkpoint_id=tmp_path / "w")
    same_in_torch(target["list"], state["list"])
    same_in_torch(target["rows"], state["rows"])
    assert_same(torch_dcp.find(tmp_path / "w").state, state, tmp_path / "w")


def same_in_torch(have, want, key=str):
    if isinstance(want, torch.Tensor):
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        assert bits(have) == bits(want)
    elif isinstance(want, (list, tuple)):
        assert type(have) is type(want)
        inside = key if type(want) is list else (lambda name: name)
        for one, other in zip(have, want, strict=True):
            same_in_torch(one, other, inside)
    elif isinstance(want, dict):
        assert set(have) == set(map(key, want))
        for name, item in want.items():
            same_in_torch(have[key(name)], item, key)
    else:
        assert have == want


def test_written_ties_are_stored_once_and_read_as_ties(tmp_path):
    w = torch.randn(1000)
    laid_out({"a": w, "b": {"c": w}}, tmp_path / "w")
    assert (tmp_path / "w" / "__0_0.distcp").stat().st_size < 6000
    state = torch_dcp.find(tmp_path / "w").state
    assert state["a"] is state["b"]["c"]


def test_values_beyond_what_weights_only_allows(tmp_path):
    import collections
    import datetime
    import decimal
    import fractions
    import uuid

    state = {
        "frozen": frozenset([1]), "queue": collections.deque([1, 2], 7), "path": Path("/x"),
        "now": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "id": uuid.uuid4(),
        "decimal": decimal.Decimal("1.5"), "third": fractions.Fraction(1, 3), "range": range(3),
        "scalar": np.float32(1.5), "none": {}, "set": {1, 2}, "delta": datetime.timedelta(1, 2, 3),
    }  # fmt: skip
    laid_out(state, tmp_path / "w")
    dcp_to_torch_save(tmp_path / "w", tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=False) == state
    found = torch_dcp.find(tmp_path / "w").state
    assert found == state
    assert type(found["scalar"]) is np.float32
    assert found["queue"].maxlen == 7


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"a": {"b": 1}, "a.b": 2}, r"a\.b"),
        ({1: 1, "1": 2}, "1"),
        ({"b": {1: 5, "1": {"c": 6}}}, r"b\.1: two keys"),
        ({"b": {1: {"x": 5}, "1": {"y": 6}}}, r"b\.1: two keys"),
        ({"b": {True: {}, "True": [{"c": 6}]}}, r"b\.True: two keys"),
        ({"x": object()}, r"builtins\.object"),
        ([1, 2], "list"),
        ({"t": OutTensor("t", "int4", (2,))}, "int4"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(state, match):
    with pytest.raises(UnsupportedValueError, match=match):
        torch_dcp.lay_out(Outline(state, {}, {}))


def has_empty(value):
    if isinstance(value, dict):
        return not value or any(map(has_empty, value.values()))
    return isinstance(value, (list, tuple)) and any(map(has_empty, value))


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(trees)
def test_any_state_goes_from_torch_to_us_and_back(tmp_path, state):
    shutil.rmtree(tmp_path, ignore_errors=True)
    try:
        laid_out(state, tmp_path / "w")
    except UnsupportedValueError:
        with pytest.raises(BaseException):  # noqa: B017, PT011
            dcp.save(state, checkpoint_id=tmp_path / "t")
        return
    if state:
        dcp_to_torch_save(tmp_path / "w", tmp_path / "x.pt")
        loaded = torch.load(tmp_path / "x.pt", weights_only=False)
        if not has_empty(state):
            same_in_torch(loaded, state)
            dcp.save(state, checkpoint_id=tmp_path / "t")
            assert_same(torch_dcp.find(tmp_path / "t").state, state, tmp_path / "t")
            assert_same(torch_dcp.find(tmp_path / "w").state, state, tmp_path / "w")


# --- damage


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "step"
    state = {
        "w": torch.arange(12.0).reshape(4, 3),
        "b": torch.ones(3),
        "d": {"n": [1]},
        "t": (torch.ones(2),),
    }
    outline, held = outline_of(state)
    write(torch_dcp.lay_out(outline, chunk_bytes=24), held, path)
    return path


def edited(path, edit):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    edit(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def damaged(path, edit):
    edited(path, edit)
    return path


def info(metadata, fqn, number=0):
    return [i for k, i in metadata.storage_data.items() if k.fqn == fqn][number]


def put(metadata, fqn, **fields):
    for key, value in fields.items():
        setattr(info(metadata, fqn), key, value)


def drop(metadata, fqn):
    key = next(k for k in metadata.storage_data if k.fqn == fqn)
    del metadata.storage_data[key]


def swap(metadata, fqn, other):
    for key in list(metadata.storage_data):
        if key.fqn == fqn:
            metadata.storage_data[key] = info(metadata, other)


def again(metadata, fqn):
    for number in range(100):
        metadata.state_dict_metadata[f"v{number}"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(f"v{number}")] = info(metadata, fqn)


def cut(metadata, offsets, sizes):
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    metadata.state_dict_metadata["b"].chunks = [chunk]


def twice(chunks):
    chunks.append(chunks[0])


def resize(metadata, size):
    metadata.state_dict_metadata["b"].size = torch.Size([size])


def retype(metadata, dtype):
    metadata.state_dict_metadata["b"].properties.dtype = dtype


DAMAGE = {
    "a file above": (lambda m: put(m, "w", relative_path="../x"), UnsafeCheckpointError),
    "a file at the root": (lambda m: put(m, "w", relative_path="/x"), UnsafeCheckpointError),
    "a name with a zero": (lambda m: put(m, "w", relative_path="a\0b"), UnsafeCheckpointError),
    "a file that is not there": (lambda m: put(m, "w", relative_path="x"), CorruptionError),
    "the metadata as data": (lambda m: put(m, "w", relative_path=".metadata"), CheckpointError),
    "a negative offset": (lambda m: put(m, "w", offset=-1), FormatError),
    "an offset past the end": (lambda m: put(m, "w", offset=1 << 40), CorruptionError),
    "an offset past 64 bits": (lambda m: put(m, "w", offset=1 << 70), FormatError),
    "an offset inside": (lambda m: put(m, "w", offset=info(m, "w").offset + 1), CheckpointError),
    "a length too short": (lambda m: put(m, "w", length=info(m, "w").length - 1), CorruptionError),
    "a length of nothing": (lambda m: put(m, "w", length=0), CorruptionError),
    "a length too long": (lambda m: put(m, "w", length=info(m, "w").length + 1), CorruptionError),
    "values at one place": (lambda m: again(m, "d.n"), CorruptionError),
    "another item": (lambda m: swap(m, "w", "b"), CorruptionError),
    "a value as a tensor": (lambda m: swap(m, "b", "d.n"), CorruptionError),
    "an extension": (lambda m: put(m, "d.n", transform_descriptors=["x/1"]), FormatError),
    "nothing for a tensor": (lambda m: drop(m, "w"), CorruptionError),
    "nothing for a value": (lambda m: drop(m, "d.n"), CorruptionError),
    "a gap": (lambda m: m.state_dict_metadata["w"].chunks.pop(), CorruptionError),
    "an overlap": (lambda m: twice(m.state_dict_metadata["w"].chunks), CorruptionError),
    "a larger tensor": (lambda m: resize(m, 2**62), CheckpointError),
    "a chunk of another extent": (lambda m: cut(m, [0], [2]), CheckpointError),
    "a chunk outside": (lambda m: cut(m, [0], [2**61]), CheckpointError),
    "a chunk of other dimensions": (lambda m: cut(m, [0, 0], [3, 1]), FormatError),
    "another dtype": (lambda m: retype(m, torch.int32), CorruptionError),
    "a dtype that is not known": (lambda m: retype(m, torch.uint3), FormatError),
    "a path through a leaf": (lambda m: m.planner_data.update({"b": ("d", "n", "x")}), FormatError),
    "a path to a leaf": (lambda m: m.planner_data.update({"b": ("w",)}), FormatError),
    "a path of nothing": (lambda m: m.planner_data.update({"b": ()}), FormatError),
    "a list without end": (lambda m: m.planner_data.update({"b": ("x", 10**12)}), FormatError),
    "a negative place in a list": (lambda m: m.planner_data.update({"b": ("x", -1)}), FormatError),
    "a number as the first key": (lambda m: m.planner_data.update({"b": (0,)}), FormatError),
    "no nesting but a text": (lambda m: setattr(m, "planner_data", "x"), FormatError),
    "no places": (lambda m: setattr(m, "storage_data", None), FormatError),
    "other places": (lambda m: setattr(m, "storage_data", {"a": "b"}), FormatError),
    "a leaf that is a text": (lambda m: m.state_dict_metadata.update({"b": "x"}), FormatError),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_metadata(good, name):
    edit, kind = DAMAGE[name]
    edited(good, edit)
    with pytest.raises(kind) as caught, shardkeep.open(good) as opened:
        opened.state_dict()
    assert "step" in str(caught.value)


def test_a_storage_that_is_missing_is_told_with_its_file(good):
    (file,) = good.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"archive/data/0", b"archive/data/7"))
    with pytest.raises(CorruptionError, match=rf"{file.name} at byte .*storage 0 is not in"):
        torch_dcp.find(good)


def test_hostile_metadata(good):
    for data, kind in (
        (p4(call("os", "system", u("true"))), UnsafeCheckpointError),
        (b"", CorruptionError),
        (b"\x80\x04N.", FormatError),
        (p4(b"]"), FormatError),
        ((good / ".metadata").read_bytes()[:-40], CheckpointError),
    ):
        (good / ".metadata").write_bytes(data)
        with pytest.raises(kind, match="metadata"):
            torch_dcp.find(good)


def test_chunks_whose_places_collide_are_not_looked_for_for_ever(good, monkeypatch):
    places = colliding_tuples(8000, ((at,) for at in itertools.count()), low=0)
    assert len(set(map(hash, places))) == 1
    monkeypatch.setattr(MetadataIndex, "__hash__", object.__hash__)  # or writing takes for ever

    def many(metadata):
        tensor, stored = metadata.state_dict_metadata["w"], info(metadata, "w")
        size = tensor.chunks[0].sizes
        tensor.chunks = [ChunkStorageMetadata(torch.Size(at), size) for at in places]
        metadata.storage_data.update(
            {MetadataIndex("w", chunk.offsets, 1): stored for chunk in tensor.chunks}
        )

    edited(good, many)
    begun = time.thread_time()
    found = torch_dcp.find(good).state["w"]
    assert time.thread_time() - begun < 3
    assert [part.offsets for part in found.parts] == places


def test_a_hostile_value(good):
    file = good / "__0_0.distcp"
    bomb = p4(call("os", "system", u("true")))
    data = file.read_bytes()
    metadata = pickle.loads((good / ".metadata").read_bytes())
    at = info(metadata, "d.n").offset
    begin = data.index(b"\x80\x02", at)
    file.write_bytes(data[:begin] + bomb + data[begin + len(bomb) :])
    with pytest.raises(CorruptionError, match="CRC-32"):
        torch_dcp.find(good)


def test_files_that_are_cut_missing_or_elsewhere(good, tmp_path):
    file = good / "__0_0.distcp"
    data = file.read_bytes()
    for length in range(0, len(data), 211):
        file.write_bytes(data[:length])
        with pytest.raises(CorruptionError, match="cut"):
            torch_dcp.find(good)
    file.unlink()
    with pytest.raises(CorruptionError, match="missing"):
        torch_dcp.find(good)
    (tmp_path / "outside").write_bytes(data)
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(UnsafeCheckpointError, match="link"):
        torch_dcp.find(good)
    (good / ".metadata").unlink()
    assert not torch_dcp.recognises(good)
    with pytest.raises(FormatError, match="not finished"):
        torch_dcp.find(good)


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data(), st.sampled_from([".metadata", "__0_0.distcp"]))
def test_any_damage_gives_a_state_or_a_checkpoint_error(good, data, name):
    file = good / name
    whole = file.read_bytes()
    try:
        new = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 4))):
            new[data.draw(st.integers(0, len(new) - 1))] = data.draw(st.integers(0, 255))
        file.write_bytes(new)
        with contextlib.suppress(CheckpointError), shardkeep.open(good) as opened:
            opened.state_dict(as_="numpy")
    finally:
        file.write_bytes(whole)


def test_more_files_than_may_be_open_at_once(tmp_path):
    state = {f"{at}": torch.full((2,), float(at)) for at in range(150)}
    laid_out(state, tmp_path / "w", file_bytes=1)
    assert len(list((tmp_path / "w").iterdir())) == 151
    assert_same(torch_dcp.find(tmp_path / "w").state, state, tmp_path / "w")


def test_other_directories_are_not_recognised(tmp_path):
    assert not torch_dcp.recognises(tmp_path)
    assert not torch_dcp.recognises(tmp_path / "absent")
    (tmp_path / ".metadata").write_bytes(b"hyper_parallel.core.checkpoint.metadata")
    assert not torch_dcp.recognises(tmp_path)
    assert not torch_dcp.recognises(tmp_path / ".metadata")
    assert not torch_dcp.recognises(tmp_path)


def test_members_of_enums_as_some_pythons_pickle_them(tmp_path, monkeypatch):
    """3.11.0 to 3.11.3 write `getattr(Format, "TORCH_CONTIGUOUS_FORMAT")`."""
    enum = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(
        enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name))
    )
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    assert b"getattr" in (tmp_path / "ckpt" / ".metadata").read_bytes()
    with shardkeep.open(tmp_path / "ckpt") as found:
        assert found["w"][:].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("owner", ["Metadata", "ChunkStorageMetadata"])
def test_nothing_else_is_got_by_its_name(owner):
    gadget = p4(
        call(
            "builtins", "getattr", glob("torch.distributed.checkpoint.metadata", owner), u("build")
        )
    )
    with pytest.raises(UnsafeCheckpointError, match="getattr"):
        pickles.load(gadget, where="a test", classes=CLASSES)


def test_archives_from_a_mould_are_those_laid_out_one_by_one():
    from shardkeep.foreign.layout import Elements, Late, OutTensor
    from shardkeep.foreign.torch_archives import Box, Moulds, lay_out_archive

    moulds = Moulds()
    tensors = [OutTensor(f"t{n}", "bfloat16", (6, 5)) for n in range(3)]
    tensors += [OutTensor("scalar", "float64", ()), OutTensor("empty", "float32", (0, 4))]
    boxes = [Box(t, (0,) * len(t.shape), t.shape) for t in tensors]
    boxes.append(Box(tensors[0], (2, 0), (4, 5)))
    for number, box in enumerate(boxes):
        base = 64 * number
        made, length = moulds.lay_out(box, base)
        alone, expected = lay_out_archive(box, base, weights_only=True)
        assert length == expected
        for one, other in zip(made, alone, strict=True):
            assert type(one) is type(other)
            assert (one.start, one.nbytes) == (other.start, other.nbytes)
            if isinstance(one, Elements):
                assert (one.tensor, one.offsets, one.sizes, one.checked) == (
                    *(box.tensor, box.offsets, box.sizes),
                    True,
                )
            elif isinstance(one, Late):
                assert one.make(lambda _: 0x12345678) == other.make(lambda _: 0x12345678)
            else:
                assert one.data == other.data
