"""The native reader and writer as objects that somebody else holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import shardkeep
from shardkeep import (
    CorruptionError,
    DefaultSavePlanner,
    MetadataIndex,
    NativeReader,
    NativeWriter,
)
from shardkeep.formats.native.layout import Limits


def a_state(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "a": rng.random((300, 5)),
        "b": rng.integers(0, 9, 70_000),
        "empty": np.zeros((0, 3)),
        "scalar": np.float32(seed).reshape(()),
        "text": f"some text {seed}",
        "number": seed,
    }


def load(path, reader):
    target = {key: np.empty_like(value) for key, value in a_state().items() if key in "ab"}
    shardkeep.load(target, path, storage_reader=reader, keys=["a", "b"])
    return target


def test_a_reader_verifies_unless_it_is_told_not_to(tmp_path):
    shardkeep.save(a_state(), tmp_path)
    (file,) = (path for path in (tmp_path / "data").iterdir() if "index" not in path.name)
    data = bytearray(file.read_bytes())
    at = bytes(data).index(a_state()["b"].tobytes()[:64])
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptionError):
        load(tmp_path, NativeReader())
    assert load(tmp_path, NativeReader(verify=False))["b"][0] != a_state()["b"][0]


def test_a_reader_is_used_for_one_checkpoint_after_the_other(tmp_path):
    reader = NativeReader()
    for seed in range(3):
        shardkeep.save(a_state(seed), tmp_path / str(seed))
    for seed in (1, 0, 2, 2):
        found = load(tmp_path / str(seed), reader)
        assert np.array_equal(found["a"], a_state(seed)["a"])
        assert np.array_equal(found["b"], a_state(seed)["b"])
        if seed:
            reader.close()


def test_nothing_is_kept_of_the_checkpoint_before(tmp_path):
    """Content digests are read once for each file, and files are known by their numbers."""
    reader, told = NativeReader(), []
    for seed in range(2):
        shardkeep.save(a_state(seed), tmp_path / str(seed))
        reader.reset(tmp_path / str(seed))
        reader.read_metadata()
        chunks = reader.index.chunks_among(np.arange(len(reader.index.tensors)))[0]
        told.append(reader.contents_at(chunks.file, chunks.start))
    reader.close()
    assert (told[0] != told[1]).any()


class Telling(NativeWriter):
    """Keeps what it returns."""

    def finish(self, metadata, results):
        self.told = super().finish(metadata, results)
        return self.told


def test_a_writer_tells_of_a_checkpoint_what_a_reader_finds(tmp_path):
    """Chunks and places of tensors and values, over several files."""
    writer = Telling(limits=Limits(payload=200_000))
    shardkeep.save(a_state(), tmp_path, storage_writer=writer)
    reader = NativeReader(tmp_path)
    try:
        found = reader.read_metadata()
        told = writer.told
        assert list(told.state_dict_metadata) == list(found.state_dict_metadata)
        assert len({place.file for place in found.storage_data.values()}) > 1
        for name, entry in found.state_dict_metadata.items():
            assert told.state_dict_metadata[name] == entry, name
            for chunk in getattr(entry, "chunks", ()):
                index = MetadataIndex(name, chunk.offsets)
                assert told.storage_data[index] == found.storage_data[index], name
        for name in ("text", "number"):
            place = found.storage_data[MetadataIndex(name)]
            assert told.storage_data[MetadataIndex(name)] == place
            data = (tmp_path / place.file).read_bytes()
            assert 0 < place.offset < place.offset + place.nbytes <= len(data)
        place = found.storage_data[MetadataIndex("text")]
        held = (tmp_path / place.file).read_bytes()[place.offset : place.offset + place.nbytes]
        assert b"some text 0" in held
    finally:
        reader.close()


class Listing(DefaultSavePlanner):
    """Says in a plain dict what will be stored, as planners that are not ours may."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, state_dict_metadata=dict(metadata.state_dict_metadata))


def test_a_writer_says_which_planners_it_understands(tmp_path):
    with pytest.raises(TypeError, match="needs the metadata of the default planner"):
        shardkeep.save(a_state(), tmp_path, planner=Listing())
    assert [path.name for path in tmp_path.rglob("*")] == ["data"]


def test_a_writer_may_be_made_with_its_base(tmp_path):
    state = a_state()
    shardkeep.save(state, tmp_path / "0")
    state["a"] += 1
    writer = NativeWriter(base=tmp_path / "0")
    result = shardkeep.save(state, tmp_path / "1", storage_writer=writer)
    assert result.stats["kept_bytes"] >= state["b"].nbytes
    found = load(tmp_path / "1", NativeReader())
    assert np.array_equal(found["a"], state["a"])
    assert np.array_equal(found["b"], state["b"])
