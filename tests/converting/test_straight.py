"""What is stored as it is wanted is copied as bytes; everything else arrives all the same."""

import os
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

import shardkeep
from shardkeep.converting.contents import Contents
from shardkeep.metadata import TensorProperties
from shardkeep.sharding import LocalShard, ShardedArray, ShardedTensorMetadata, ShardMetadata


def cut(array, dim, parts):
    """All pieces of an array along a dimension, held by one process."""
    shards = []
    at = 0
    for part in np.array_split(array, parts, dim):
        offsets = tuple(at if d == dim else 0 for d in range(array.ndim))
        shards.append(LocalShard(part.copy(), ShardMetadata(offsets, part.shape)))
        at += part.shape[dim]
    boxes = [shard.metadata for shard in shards]
    properties = TensorProperties(array.dtype)
    return ShardedArray(tuple(shards), ShardedTensorMetadata(boxes, array.shape, properties))


@pytest.fixture
def arrays():
    rng = np.random.default_rng(3)
    shapes = {"rows": (64, 700), "columns": (48, 96), "both": (6, 40, 30), "small": (5,)}
    made = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    return made | {"large": rng.integers(0, 256, 3_000_001, np.uint8), "one": np.array(7, "<i8")}


@pytest.fixture
def source(tmp_path, arrays):
    pieces = {"rows": (0, 3), "columns": (1, 4), "both": (1, 2)}
    state = {n: cut(a, *pieces[n]) if n in pieces else a for n, a in arrays.items()}
    path = tmp_path / "source"
    shardkeep.save(state, path, no_dist=True)
    return path


def wished(monkeypatch):
    """The tensors that were read by way of boxes, and not as bytes."""
    names = set()
    read = Contents.read

    def spy(self, wishes):
        names.update(wish.tensor.name for wish in wishes)
        read(self, wishes)

    monkeypatch.setattr(Contents, "read", spy)
    return names


@pytest.mark.parametrize("to", ["native", "hf", "torch-dcp"])
def test_only_what_lies_otherwise_is_looked_up_by_boxes(source, arrays, tmp_path, monkeypatch, to):
    names = wished(monkeypatch)
    shardkeep.convert(source, tmp_path / "made", to=to, memory_budget=16 << 20)
    if to != "native":  # of ours, the ends of files have chunks and other things side by side
        assert names == {"columns", "both"}
    shardkeep.convert(tmp_path / "made", tmp_path / "back", memory_budget=16 << 20)
    assert shardkeep.verify(tmp_path / "back").ok
    for path in ("made", "back"):
        with shardkeep.open(tmp_path / path) as made:
            for name, array in arrays.items():
                assert made[name].numpy().tobytes() == array.tobytes(), (path, name)


def test_joined_cut_and_cast_tensors_arrive(source, arrays, tmp_path, monkeypatch):
    names = wished(monkeypatch)
    shardkeep.convert(
        source,
        tmp_path / "made",
        to="torch-dcp",
        rules=["split rows = a, b @ 0"],
        cast=["columns:f32=f16"],
    )
    assert names == {"columns", "both"}
    with shardkeep.open(tmp_path / "made") as made:
        halves = np.concatenate([made["a"].numpy(), made["b"].numpy()])
        assert halves.tobytes() == arrays["rows"].tobytes()
        assert (made["columns"].numpy() == arrays["columns"].astype(np.float16)).all()


@pytest.mark.parametrize("to", ["native", "hf"])
def test_damage_in_the_source_ends_the_convert_and_is_named(source, tmp_path, to):
    (path,) = (source / "data").glob("*-r*")
    with shardkeep.open(source) as opened:
        chunks = opened.metadata.storage_data
        place = next(at for key, at in chunks.items() if key.fqn == "large")
    data = bytearray(path.read_bytes())
    data[place.offset + 2_000_000] ^= 4
    path.write_bytes(data)
    with pytest.raises(shardkeep.CorruptionError, match="large") as caught:
        shardkeep.convert(source, tmp_path / "made", to=to)
    assert caught.value.names == ("large",)
    assert not (tmp_path / "made").exists()


def test_a_source_that_is_replaced_meanwhile_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.arange(12 << 20, dtype=np.uint8)}, path)
    read = Contents.read_runs

    def replaced(self, *args):
        later = time.time() + 1
        os.utime(path, (later, later))
        read(self, *args)

    monkeypatch.setattr(Contents, "read_runs", replaced)
    with pytest.raises(shardkeep.StorageError, match="after it was looked at"):
        shardkeep.convert(path, tmp_path / "made")
