"""The table against torch, numpy, ml_dtypes and safetensors; casts against every value."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from shardkeep.dtypes import TABLE, by_code, can_cast, dtype_name, lookup
from shardkeep.errors import UnsupportedValueError

ROWS = pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))
TORCH_ROWS = pytest.mark.parametrize(
    "row", [r for r in TABLE.values() if r.torch], ids=[r.name for r in TABLE.values() if r.torch]
)

# Bytes of one element of a safetensors code.
CODE_BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8"], 1),
    **dict.fromkeys(["F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}


def some_bytes(row, count=6):
    rng = np.random.default_rng(row.code)
    raw = rng.integers(0, 256, count * row.itemsize, np.uint8)
    return raw & 1 if row.name == "bool" else raw


def header_and_data(message):
    length = int.from_bytes(message[:8], "little")
    return json.loads(message[8 : 8 + length]), message[8 + length :]


# --- the table ---


@ROWS
def test_row_is_consistent(row):
    assert TABLE[row.name] is row
    assert by_code(row.code) is row
    assert row.itemsize in (1, 2, 4, 8, 16)
    assert lookup(row.name) is row
    assert row.to_numpy().itemsize == row.itemsize
    assert row.bits().itemsize == row.itemsize
    assert CODE_BYTES[row.safetensors] * (row.extra_dim or 1) == row.itemsize


@ROWS
def test_numpy_knows_the_type(row):
    if not row.numpy:
        assert row.to_numpy() == row.bits()
        return
    assert row.to_numpy().name == row.name
    assert dtype_name(row.to_numpy()) == row.name
    assert dtype_name(row.to_numpy().type) == row.name
    assert dtype_name(np.zeros(1, row.to_numpy()).dtype) == row.name


@ROWS
def test_bits_keep_every_bit(row):
    raw = some_bytes(row, 64)
    raw[: row.itemsize] = 1 if row.name == "bool" else 0xFF  # a NaN in most float types
    bits = raw.view(row.bits())
    copied = np.empty_like(bits)
    np.copyto(copied, bits)
    assert copied[::-1].copy()[::-1].tobytes() == raw.tobytes()


@TORCH_ROWS
def test_torch_knows_the_type(row):
    dtype = getattr(torch, row.torch)
    assert dtype.itemsize == row.itemsize
    assert dtype_name(dtype) == dtype_name(str(dtype)) == row.name
    assert dtype.is_complex == (row.kind == "complex")
    # A pair of 4-bit floats in a byte does not count as floating point with torch.
    assert dtype.is_floating_point == (row.kind == "float") or row.name == "float4_e2m1fn_x2"


def test_all_of_ml_dtypes_is_in_the_table():
    names = {
        name
        for name in dir(ml_dtypes)
        if isinstance(getattr(ml_dtypes, name), type)
        and issubclass(getattr(ml_dtypes, name), np.generic)
    }
    assert names - {"bcomplex32", "complex32"} <= set(TABLE)


def test_torch_types_are_in_the_table_or_refused():
    dtypes = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    left = {str(d).removeprefix("torch.") for d in dtypes} - set(TABLE)
    assert all(name.startswith(("bits", "q", "int", "uint")) for name in left), left
    for name in left:
        with pytest.raises(UnsupportedValueError, match=name):
            dtype_name(getattr(torch, name))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Float32", "float32"),
        ("Bool", "bool"),
        ("BFloat16", "bfloat16"),
        ("bool_", "bool"),
        ("torch.half", "float16"),
        ("long", "int64"),
        ("cdouble", "complex128"),
        ("float", "float32"),
        (bool, "bool"),
        (int, "int64"),
        (float, "float64"),
        (complex, "complex128"),
        (np.bool_, "bool"),
        (np.uint8, "uint8"),
        (np.dtype(">i4"), "int32"),
        (np.dtype("c16"), "complex128"),
    ],
    ids=str,
)
def test_spellings(given, name):
    assert dtype_name(given) == name


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (np.dtype(object), "object"),
        (np.dtype("U5"), "str"),
        (np.dtype("S5"), "bytes"),
        (np.dtype("M8[s]"), "datetime64"),
        (np.dtype("m8[s]"), "timedelta64"),
        (np.dtype([("a", "i4")]), "void"),
        (torch.qint8, "qint8"),
        (torch.quint4x2, "quint4x2"),
        (torch.bits8, "bits8"),
        (str, "str"),
        (object, "object"),
        (None, "None"),
        ("", ""),
        ("float9", "float9"),
    ],
    ids=str,
)
def test_refused_by_name(given, named):
    with pytest.raises(UnsupportedValueError, match=f"dtype '.*{named}.*' cannot be stored"):
        dtype_name(given)
    with pytest.raises(UnsupportedValueError):
        lookup(given)


@pytest.mark.skipif(np.dtype("g").itemsize == 8, reason="long double is double here")
def test_long_double_is_refused():
    with pytest.raises(UnsupportedValueError, match=np.dtype("g").name):
        dtype_name(np.dtype("g"))
    with pytest.raises(UnsupportedValueError, match=np.dtype("G").name):
        dtype_name(np.dtype("G"))


# --- safetensors ---

SAFETENSORS_ROWS = [
    row
    for row in TABLE.values()
    # The others are stored under a plain code.
    if row.torch and not row.extra_dim and row.name != "float4_e2m1fn_x2"
]


@pytest.mark.parametrize("row", SAFETENSORS_ROWS, ids=[r.name for r in SAFETENSORS_ROWS])
def test_safetensors_writes_the_same_code_and_bytes(row):
    dtype = getattr(torch, row.torch)
    raw = some_bytes(row)
    message = safetensors.torch.save({"x": torch.from_numpy(raw.copy()).view(dtype)})
    header, data = header_and_data(message)
    assert header["x"]["dtype"] == row.safetensors
    assert header["x"]["shape"] == [6]
    assert data == raw.tobytes()


@ROWS
def test_safetensors_reads_an_entry_under_our_code(row):
    raw = some_bytes(row)
    shape = [2, 3] + ([row.extra_dim] if row.extra_dim else [])
    entry = {"dtype": row.safetensors, "shape": shape, "data_offsets": [0, raw.nbytes]}
    header = json.dumps({"x": entry}).encode()
    message = len(header).to_bytes(8, "little") + header + raw.tobytes()
    if row.safetensors == "F8_E8M0":
        # Its Python side cannot load this code yet, but checks the sizes.
        ((name, found),) = safetensors.deserialize(message)
        assert (name, found["dtype"], found["shape"]) == ("x", row.safetensors, shape)
        assert bytes(found["data"]) == raw.tobytes()
        return
    loaded = safetensors.torch.load(message)["x"]
    assert list(loaded.shape) == shape
    assert loaded.view(torch.uint8).numpy().tobytes() == raw.tobytes()
    if row.torch:
        # The whole array again: the last dimension folds back into the element.
        typed = loaded.view(getattr(torch, row.torch)).reshape(2, 3)
        assert typed.view(torch.uint8).numpy().tobytes() == raw.tobytes()


@pytest.mark.skipif(sys.byteorder != "little", reason="compares memory with the file")
@pytest.mark.parametrize("name", ["complex64", "float64", "int16", "bool"])
def test_safetensors_numpy_has_the_same_layout(name):
    row = TABLE[name]
    array = some_bytes(row).view(row.to_numpy())
    header, data = header_and_data(safetensors.numpy.save({"x": array}))
    assert (header["x"]["dtype"], data) == (row.safetensors, array.tobytes())


# --- casts ---

YES = """
float16>float32 float16>float64 bfloat16>float32 bfloat16>float64 float32>float64
uint8>int16 uint8>uint16 uint8>int64 int8>int16 uint16>int32 uint32>int64 int32>int64 uint32>uint64
complex64>complex128
float8_e4m3fn>bfloat16 float8_e4m3fn>float16 float8_e5m2>bfloat16 float8_e5m2>float16
float8_e8m0fnu>bfloat16 float8_e8m0fnu>float32 float8_e4m3fnuz>float16
int4>int8 uint4>int8 uint4>uint8 int2>int4 uint2>int4 float4_e2m1fn>float8_e4m3fn
float6_e2m3fn>float8_e4m3fn
"""
NO = """
bfloat16>float16 float16>bfloat16 float32>float16 float32>bfloat16 float64>float32
int8>uint8 uint8>int8 int8>uint64 int64>uint64 uint64>int64 int64>int32 int16>int8
complex128>complex64 float8_e4m3fn>float8_e5m2 float8_e5m2>float8_e4m3fn float8_e8m0fnu>float16
float8_e4m3fn>float8_e8m0fnu int4>uint4 uint4>int4 int8>int4 float8_e4m3fn>float4_e2m1fn
float32>float8_e5m2 float4_e2m1fn>float8_e4m3fnuz
"""
NEVER = """
float32>int64 float16>int32 int8>float32 int64>float64 bool>int8 bool>float32 uint8>bool
float32>complex64 complex64>float32 int32>complex128 complex32>complex64 complex64>complex32
float4_e2m1fn_x2>float32 float32>float4_e2m1fn_x2
"""


def pair(text):
    source, target = text.split(">")
    return TABLE[source], TABLE[target]


@pytest.mark.parametrize("text", YES.split())
def test_widening(text):
    assert can_cast(*pair(text), "widen")
    assert can_cast(*pair(text), True)
    assert not can_cast(*pair(text), False)


@pytest.mark.parametrize("text", NO.split())
def test_not_widening(text):
    assert not can_cast(*pair(text), "widen")
    assert can_cast(*pair(text), True)
    assert not can_cast(*pair(text), False)


@pytest.mark.parametrize("text", NEVER.split())
def test_never(text):
    for cast in (False, True, "widen"):
        assert not can_cast(*pair(text), cast)


@ROWS
def test_the_same_type_needs_no_cast(row):
    for cast in (False, True, "widen"):
        assert can_cast(row, row, cast)


def values_of(row):
    """Every value of a small type; -0.0 and 0.0 are two, all NaNs are one."""
    every = np.arange(256**row.itemsize).astype(row.bits()).view(row.to_numpy())
    if row.kind == "int":
        return set(every.astype(np.int64).tolist())
    with np.errstate(invalid="ignore"):
        return {"nan" if x != x else repr(x) for x in every.astype(np.float64).tolist()}


def test_widening_is_inclusion_of_values():
    small = {
        row.name: values_of(row)
        for row in TABLE.values()
        if row.itemsize <= 2 and row.numpy and row.kind in ("int", "float")
    }
    for source, have in small.items():
        for target, room in small.items():
            if TABLE[source].kind == TABLE[target].kind:
                found = can_cast(TABLE[source], TABLE[target], "widen")
                assert found == (have <= room), (source, target)
