"""What section 3 of the design says of each type, one by one."""

import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch

from shardkeep import metadata
from shardkeep.errors import UnsupportedValueError
from shardkeep.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageLocation,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    int_tuple,
)

SEQUENCES = [
    (1, 2),
    [1, 2],
    range(1, 3),
    torch.Size([1, 2]),
    torch.tensor([1, 2]),
    np.array([1, 2]),
    (np.int64(1), np.uint8(2)),
]

EXAMPLES = [
    MetadataIndex("a.b", (0, 4), 3),
    ChunkStorageMetadata((0, 4), (2, 2)),
    TensorProperties("int8", "strided", True, "channels_last", True),
    TensorStorageMetadata(TensorProperties("int8"), (2,), [ChunkStorageMetadata((0,), (2,))]),
    BytesStorageMetadata(),
    StorageLocation("data/0", 512, 64),
    StorageMeta("ckpt", "0" * 32, "f" * 32, ("a", "b")),
    Metadata(
        {"a": BytesStorageMetadata()},
        None,
        {MetadataIndex("a"): StorageLocation("data/0", 0, 1)},
        StorageMeta(),
    ),
]


def kind(value):
    return type(value).__name__


@pytest.mark.parametrize("value", EXAMPLES, ids=kind)
def test_every_type_is_frozen_and_picklable(value):
    assert pickle.loads(pickle.dumps(value)) == value
    field = next(iter(dataclasses.fields(value)), None)
    if field is not None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


@pytest.mark.parametrize("value", EXAMPLES[:7], ids=kind)
def test_small_types_are_hashable(value):
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


@pytest.mark.parametrize("value", EXAMPLES, ids=kind)
def test_fields_missing_from_an_older_pickle_take_their_defaults(value):
    old = pickle.loads(pickle.dumps(value))
    defaults = {
        field.name: field.default
        for field in dataclasses.fields(value)
        if field.default is not dataclasses.MISSING
    }
    for name in defaults:
        del vars(old)[name]
    loaded = pickle.loads(pickle.dumps(old))
    assert {name: getattr(loaded, name) for name in defaults} == defaults
    assert repr(loaded)


def test_every_public_type_is_tried_here():
    assert {kind(value) for value in EXAMPLES} == set(metadata.__all__)


# --- int_tuple ---


@pytest.mark.parametrize("values", [*SEQUENCES, iter([1, 2])], ids=range(8))
def test_any_sequence_of_integers_becomes_a_tuple(values):
    found = int_tuple(values)
    assert found == (1, 2)
    assert type(found) is tuple
    assert {type(x) for x in found} == {int}


def test_bools_become_integers_and_others_are_refused():
    assert [type(x) for x in int_tuple([True, 2])] == [int, int]
    for bad in ([1.0], ["1"], "12", [None], np.array([1.5])):
        with pytest.raises(TypeError):
            int_tuple(bad)


# --- MetadataIndex ---


def test_index_is_a_hint_only():
    a, b = MetadataIndex("w", (0, 4), 1), MetadataIndex("w", (0, 4), 2)
    assert a == b
    assert hash(a) == hash(b)
    assert {a: "x"}[MetadataIndex("w", torch.Size([0, 4]))] == "x"
    assert (a.index, b.index) == (1, 2)


def test_no_offset_is_the_same_as_an_empty_one():
    assert MetadataIndex("w") == MetadataIndex("w", ())
    assert hash(MetadataIndex("w")) == hash(MetadataIndex("w", []))
    assert (MetadataIndex("w").offset, MetadataIndex("w", []).offset) == (None, ())


def test_indexes_differ_by_name_and_offset():
    assert MetadataIndex("w", (0,)) != MetadataIndex("v", (0,))
    assert MetadataIndex("w", (0,)) != MetadataIndex("w", (1,))
    assert MetadataIndex("w", (0,)) != MetadataIndex("w")
    assert MetadataIndex("w") != "w"


@pytest.mark.parametrize("offset", SEQUENCES, ids=range(7))
def test_offset_is_any_sequence(offset):
    found = MetadataIndex("w", offset).offset
    assert found == (1, 2)
    assert {type(x) for x in found} == {int}


# --- ChunkStorageMetadata ---


def test_box_takes_any_sequence():
    box = ChunkStorageMetadata(torch.Size([0, 1]), np.array([2, 3]))
    assert box == ChunkStorageMetadata((0, 1), (2, 3))
    assert {type(x) for x in box.offsets + box.sizes} == {int}
    assert ChunkStorageMetadata((), ()).sizes == ()
    assert ChunkStorageMetadata((4,), (0,)).sizes == (0,)


def test_impossible_boxes_are_refused():
    with pytest.raises(ValueError, match=r"as many offsets as sizes, found \(0,\) and \(1, 2\)"):
        ChunkStorageMetadata((0,), (1, 2))
    with pytest.raises(ValueError, match="negative"):
        ChunkStorageMetadata((-1,), (1,))
    with pytest.raises(ValueError, match="negative"):
        ChunkStorageMetadata((0, 0), (1, -1))


# --- TensorProperties ---


def test_defaults():
    assert dataclasses.astuple(TensorProperties("float32")) == (
        "float32",
        "strided",
        False,
        "contiguous_format",
        False,
    )


@pytest.mark.parametrize(
    "dtype",
    [
        "bfloat16",
        "torch.bfloat16",
        "BFloat16",
        torch.bfloat16,
        ml_dtypes.bfloat16,
        np.dtype(ml_dtypes.bfloat16),
    ],
    ids=repr,
)
def test_dtypes_have_one_spelling(dtype):
    assert TensorProperties(dtype).dtype == "bfloat16"


def test_framework_objects_are_kept_as_strings():
    found = TensorProperties(
        torch.int8, layout=torch.strided, memory_format=torch.channels_last, requires_grad=True
    )
    assert found == TensorProperties("int8", "strided", True, "channels_last")
    assert all(type(x) in (str, bool) for x in dataclasses.astuple(found))
    assert TensorProperties(np.dtype(">f4")).dtype == "float32"
    assert TensorProperties(np.int16).dtype == "int16"
    assert TensorProperties("int8", layout=torch.sparse_coo).layout == "sparse_coo"


@pytest.mark.parametrize(
    "memory_format",
    ["contiguous_format", "channels_last", "preserve_format", "torch.preserve_format"],
)
def test_known_memory_formats(memory_format):
    wanted = memory_format.removeprefix("torch.")
    assert TensorProperties("int8", memory_format=memory_format).memory_format == wanted
    given = getattr(torch, wanted)
    assert TensorProperties("int8", memory_format=given).memory_format == wanted


@pytest.mark.parametrize("memory_format", ["", "nhwc", torch.channels_last_3d, None])
def test_unknown_memory_formats_are_refused(memory_format):
    with pytest.raises(ValueError, match=r"memory format .* is unknown"):
        TensorProperties("int8", memory_format=memory_format)


def test_unknown_dtypes_are_refused():
    with pytest.raises(UnsupportedValueError, match="qint8"):
        TensorProperties(torch.qint8)


def test_create_from_tensor():
    tensor = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    assert TensorProperties.create_from_tensor(tensor) == TensorProperties(
        "float16", requires_grad=True
    )
    assert TensorProperties.create_from_tensor(np.zeros(2, "i2")) == TensorProperties("int16")
    assert TensorProperties.create_from_tensor(np.float64(1)) == TensorProperties("float64")
    meta = torch.zeros(2, device="meta")
    assert TensorProperties.create_from_tensor(meta) == TensorProperties("float32")

    class Pinned:
        dtype = "int8"

        def is_pinned(self):
            return True

    assert TensorProperties.create_from_tensor(Pinned()).pin_memory is True


# --- the rest ---


def test_tensor_metadata_keeps_tuples():
    chunk = ChunkStorageMetadata((0,), (4,))
    found = TensorStorageMetadata(TensorProperties("int8"), torch.Size([4]), [chunk])
    assert found.size == (4,)
    assert type(found.size) is tuple
    assert found.chunks == (chunk,)
    assert TensorStorageMetadata(TensorProperties("int8"), ()).chunks == ()


def test_plain_values_are_all_alike():
    assert BytesStorageMetadata() == BytesStorageMetadata()


def test_storage_meta():
    assert dataclasses.astuple(StorageMeta()) == (None, None, None, ())
    assert StorageMeta(modules=["a"]).modules == ("a",)


def test_metadata():
    found = Metadata({})
    assert (found.planner_data, found.storage_data, found.storage_meta) == (None, None, None)
    assert found.version == "1.0.0"
    locations = {MetadataIndex("w", (0,), 5): StorageLocation("data/0", 4096, 16)}
    assert Metadata({}, storage_data=locations).storage_data[MetadataIndex("w", [0])].nbytes == 16
