"""Torch's metadata and ours say the same, both ways."""

from __future__ import annotations

import gc
import itertools
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardkeep
from shardkeep import PlanError, UnsupportedValueError
from shardkeep.formats.native.reader import NativeReader

torch = pytest.importorskip("torch")

from torch.distributed.checkpoint import load  # noqa: E402
from torch.distributed.checkpoint import metadata as dcp  # noqa: E402
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # noqa: E402
from torch.distributed.checkpoint.default_planner import (  # noqa: E402
    _create_default_local_metadata,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem  # noqa: E402

from shardkeep.structure import TENSOR, VALUE  # noqa: E402
from shardkeep.torch import StorageReader, from_torch, to_torch  # noqa: E402
from shardkeep.torch.mapping import properties_to_torch  # noqa: E402
from shardkeep.torch.nesting import paths_of, structure_of  # noqa: E402
from shardkeep.torch.reading import read_items  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]


@st.composite
def tensors(draw):
    """A tensor, cut along its first dimension."""
    size = draw(st.lists(st.integers(1, 5), max_size=3))
    cuts = sorted(draw(st.sets(st.integers(1, size[0] - 1)))) if size and size[0] > 1 else []
    bounds = [0, *cuts, size[0]] if size else []
    chunks = [
        dcp.ChunkStorageMetadata(
            torch.Size([low, *[0] * (len(size) - 1)]), torch.Size([high - low, *size[1:]])
        )
        for low, high in itertools.pairwise(bounds)
    ] or [dcp.ChunkStorageMetadata(torch.Size(), torch.Size())]
    properties = dcp.TensorProperties(
        draw(st.sampled_from(DTYPES)),
        torch.strided,
        draw(st.booleans()),
        draw(st.sampled_from(FORMATS)),
        draw(st.booleans()),
    )
    return dcp.TensorStorageMetadata(properties, torch.Size(size), chunks)


KEYS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=4)
TREES = st.dictionaries(
    KEYS,
    st.recursive(
        st.just(0),
        lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(KEYS, inner),
        max_leaves=6,
    ),
    max_size=4,
)


@st.composite
def metadatas(draw):
    """What torch's planner makes of a nested state."""
    paths = {}

    def visit(path, node):
        if isinstance(node, dict):
            for key, child in node.items():
                visit((*path, key), child)
        elif isinstance(node, list):
            for at, child in enumerate(node):
                visit((*path, at), child)
        else:
            paths.setdefault(".".join(map(str, path)), path)

    visit((), draw(TREES))
    state = {}
    places = {}
    for name in paths:
        entry = draw(tensors() | st.builds(dcp.BytesStorageMetadata))
        state[name] = entry
        chunks = getattr(entry, "chunks", [None])
        for at, box in enumerate(chunks):
            index = dcp.MetadataIndex(name, None if box is None else box.offsets, at)
            places[index] = _StorageInfo(f"__{at}_0.distcp", draw(st.integers(0, 2**40)), 8)
    meta = draw(st.none() | st.builds(dcp.StorageMeta, st.just("a"), st.just("b"), st.just("c")))
    return dcp.Metadata(state, paths, places, meta, "1.0.0")


@settings(max_examples=25)
@given(metadatas())
def test_there_and_back(metadata):
    ours = from_torch(metadata)
    back = to_torch(ours)
    assert back == dcp.Metadata(
        metadata.state_dict_metadata,
        back.planner_data,
        metadata.storage_data,
        metadata.storage_meta,
        metadata.version,
    )
    assert set(back.planner_data) == set(metadata.planner_data)
    # Where two paths would have one name, nesting is given up; else it is the same.
    flat = {name: (name,) for name in metadata.planner_data}
    assert back.planner_data in (metadata.planner_data, flat)
    again = from_torch(back)
    assert again.planner_data.root == ours.planner_data.root
    assert dict(again.state_dict_metadata) == dict(ours.state_dict_metadata)
    assert pickle.loads(pickle.dumps(back)) == back


@given(TREES)
def test_nesting_is_what_torch_flattens(tree):
    def fill(node):
        if isinstance(node, dict):
            return {key: fill(child) for key, child in node.items()}
        if isinstance(node, list):
            return [fill(child) for child in node]
        return torch.zeros(1)

    try:
        flat, paths = flatten_state_dict(fill(tree))
    except ValueError:  # torch refuses two leaves of one name
        return
    structure = structure_of(dict.fromkeys(flat, TENSOR), paths)
    assert paths_of(structure) == paths


@pytest.mark.parametrize(
    "paths",
    [
        None,
        {"a": ("a",), "a.b": ("a", "b")},
        {"a": ("x",), "a.b": ("y",)},
        {"a": (), "a.b": ("a.b",)},
        {"a": ("a",), "a.b": [1]},
        {"a": (1,), "a.b": ("a.b",)},
    ],
    ids=repr,
)
def test_nestings_that_are_none(paths):
    structure = structure_of({"a": TENSOR, "a.b": VALUE}, paths)
    assert structure.root == ["dict", ["a", "a.b"], [TENSOR, VALUE], None]


def test_lists_with_holes():
    paths = {"a.0": ("a", 0), "a.2": ("a", 2)}
    structure = structure_of(dict.fromkeys(paths, VALUE), paths)
    assert structure.build(str) == {"a": ["0", {}, "1"]}
    assert paths_of(structure) == paths
    structure = structure_of({"a.999999": VALUE}, {"a.999999": ("a", 999999)})
    assert structure.build(str) == {"a": {999999: "0"}}


def test_offsets_of_scalars():
    metadata = _create_default_local_metadata({"a": torch.tensor(1), "b": 2})
    ours = from_torch(metadata)
    assert ours.state_dict_metadata["a"].chunks[0] == shardkeep.ChunkStorageMetadata((), ())
    back = to_torch(ours)
    assert back.state_dict_metadata == metadata.state_dict_metadata
    assert type(back.state_dict_metadata["a"].chunks[0].offsets) is torch.Size


def test_what_cannot_be_mapped():
    metadata = _create_default_local_metadata({"a": torch.zeros(1)})
    metadata.state_dict_metadata["a"].properties.layout = torch.sparse_coo
    with pytest.raises(UnsupportedValueError, match="a: sparse_coo"):
        from_torch(metadata)
    metadata.state_dict_metadata["a"].properties.layout = torch.strided
    metadata.state_dict_metadata["a"].properties.dtype = torch.quint8
    with pytest.raises(UnsupportedValueError, match=r"a: dtype .*quint8"):
        from_torch(metadata)


def test_what_the_reader_gives_is_the_same(tmp_path):
    shardkeep.save({"a": torch.zeros(3, 2), "b": [torch.tensor(1), {"c": 5}], "d": {}}, tmp_path)
    with shardkeep.open(tmp_path) as opened:
        plain = to_torch(opened.metadata)
    reader = StorageReader(tmp_path)
    lazy = reader.read_metadata()
    plain.storage_meta.load_id = reader.load_id
    assert lazy.state_dict_metadata == plain.state_dict_metadata
    assert plain.state_dict_metadata == lazy.state_dict_metadata
    assert dict(lazy.storage_data) == plain.storage_data
    assert (
        lazy.planner_data
        == plain.planner_data
        == {
            "a": ("a",),
            "b.0": ("b", 0),
            "b.1.c": ("b", 1, "c"),
        }
    )
    assert pickle.loads(pickle.dumps(lazy)) == plain
    with pytest.raises(KeyError):
        lazy.storage_data[dcp.MetadataIndex("a")]
    with pytest.raises(AttributeError):
        _ = lazy.state_dict_metadata["a"].nothing


def test_chunks_of_many_tensors(tmp_path):
    shardkeep.save({f"t{n}": torch.full((n + 1,), n) for n in range(40)}, tmp_path)
    state = StorageReader(tmp_path).read_metadata().state_dict_metadata
    assert [state[f"t{n}"].chunks[0].sizes[0] for n in range(40)] == list(range(1, 41))


def test_metadata_outlives_its_reader(tmp_path):
    shardkeep.save({f"t{n}": torch.full((n + 1,), n) for n in range(40)}, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    reader = StorageReader(tmp_path)
    metadata = reader.read_metadata()
    load({"t1": torch.zeros(2, dtype=torch.int64)}, storage_reader=reader)
    del reader
    locations = metadata.storage_data
    assert metadata.state_dict_metadata["t7"].chunks[0].sizes == (8,)
    del metadata
    gc.collect()
    assert locations[dcp.MetadataIndex("t9", (0,))].length == 80
    del locations
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --- what planners may ask for


@pytest.fixture
def stored(tmp_path):
    """`w` in two chunks of two rows, and `none` without elements."""

    def save(ranks):
        rows = torch.arange(4.0).reshape(2, 2) + 4 * ranks.rank
        whole = shardkeep.ShardedArray.from_local(rows, (2 * ranks.rank, 0), (4, 2))
        state = {"w": whole, "none": torch.zeros(0, 2)}
        shardkeep.save(state, tmp_path, process_group=ranks)

    shardkeep.ThreadRanks(2).run(save)
    reader = NativeReader(tmp_path)
    yield reader.read_metadata().state_dict_metadata
    reader.close()


def item(name, offset, low=(0, 0), lengths=(1, 1), hint=None):
    index = dcp.MetadataIndex(name, offset, hint)
    return ReadItem(LoadItemType.TENSOR, index, (0, 0), index, low, lengths)


@pytest.mark.parametrize("hint", [None, 0, 1, 7])
def test_chunks_are_found_whatever_the_hint(stored, hint):
    found = read_items([item("w", (2, 0), (1, 0), (1, 2), hint)], stored)
    assert found.chunk_row.tolist() == [1]
    assert (found.low.tolist(), found.size.tolist()) == ([3, 0], [1, 2])


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        (item("w", (1, 0)), "w"),
        (item("w", (0, 0), (1, 0), (2, 1)), "reaches out"),
        (item("w", (0, 0), (-1, 0)), "reaches out"),
        (item("w", (0, 0), (0, 0), (1, -1)), "reaches out"),
        (item("w", (0, 0), (0,), (1,)), "other dimensions"),
        (item("none", (0, 0)), "nothing is stored"),
    ],
    ids=range(6),
)
def test_regions_that_are_not_stored(stored, asked, what):
    with pytest.raises(PlanError, match=what):
        read_items([asked], stored)


def test_two_names_for_one_place():
    paths = {"a": ("x",), "a.b": ("x",)}
    structure = structure_of(dict.fromkeys(paths, VALUE), paths)
    assert structure.root == ["dict", ["a", "a.b"], [VALUE, VALUE], None]


def test_elements_that_torch_lacks():
    with pytest.raises(UnsupportedValueError, match="no dtype int4"):
        properties_to_torch(shardkeep.TensorProperties("int4"), "w")


def test_metadata_is_equal_to_metadata_only(tmp_path):
    shardkeep.save({"w": torch.ones(2)}, tmp_path)
    found = StorageReader(tmp_path).read_metadata().state_dict_metadata["w"]
    assert found == found
    assert found != 5
    assert found != dcp.BytesStorageMetadata()
