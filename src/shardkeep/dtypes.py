# SPDX-License-Identifier: Apache-2.0
"""The one table of element types.

A dtype is known everywhere by torch's name without `torch.`. Each row says what the other worlds
call it and how its bytes look inside a safetensors file. Where safetensors has no code with exactly
our byte layout, the entry is written under a plain code with one more dimension; the name in our
index is the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from shardkeep.errors import MissingDependencyError, UnsupportedValueError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TABLE", "DType", "bits_of", "by_code", "can_cast", "dtype_name", "lookup"]

Kind = Literal["bool", "int", "float", "complex"]
Cast = Literal[False, True, "widen"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type in every world that has it."""

    name: str
    """Our name, torch's without the prefix."""
    itemsize: int
    """Bytes of one element; always a power of two."""
    kind: Kind
    """Casting never crosses kinds."""
    safetensors: str
    """Code of the entry in a data file."""
    extra_dim: int = 0
    """Length of the dimension added in a data file where the code is not exactly this type."""
    numpy: str = ""
    """Name in numpy or ml_dtypes; empty where neither has it and raw bits are handed out."""
    torch: str = ""
    """Attribute of `torch`; empty where torch lacks it."""
    mindspore: str = ""
    """Attribute of `mindspore`; empty where it lacks it."""
    code: int = -1
    """Row in the table; for columns in memory and on the wire, never on disk."""

    def to_numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype, or the unsigned type of the same size where numpy has no such type."""
        import ml_dtypes
        import numpy as np

        if not self.numpy:
            return self.bits()
        found = getattr(ml_dtypes, self.numpy, None)
        try:
            return np.dtype(found if found is not None else self.numpy)
        except TypeError as error:
            raise MissingDependencyError(
                f"elements of type {self.name} need a newer ml_dtypes than {ml_dtypes.__version__}"
            ) from error

    def bits(self) -> np.dtype[np.generic]:
        """A dtype of the same size whose copies keep every bit."""
        return bits_of(self.itemsize)


@cache
def bits_of(itemsize: int) -> np.dtype[np.generic]:
    """A dtype for elements of so many bytes, whatever they mean, whose copies keep every bit."""
    import numpy as np

    return np.dtype("complex128" if itemsize == 16 else f"u{itemsize}")


def _row(
    name: str,
    itemsize: int,
    kind: Kind,
    code: str,
    extra_dim: int = 0,
    *,
    numpy: str | None = None,
    torch: bool = True,
    mindspore: bool = False,
) -> DType:
    return DType(
        name,
        itemsize,
        kind,
        code,
        extra_dim,
        name if numpy is None else numpy,
        name if torch else "",
        ("bool_" if name == "bool" else name) if mindspore else "",
    )


_ROWS = (
    _row("bool", 1, "bool", "BOOL", mindspore=True),
    _row("uint8", 1, "int", "U8", mindspore=True),
    _row("int8", 1, "int", "I8", mindspore=True),
    _row("uint16", 2, "int", "U16", mindspore=True),
    _row("int16", 2, "int", "I16", mindspore=True),
    _row("uint32", 4, "int", "U32", mindspore=True),
    _row("int32", 4, "int", "I32", mindspore=True),
    _row("uint64", 8, "int", "U64", mindspore=True),
    _row("int64", 8, "int", "I64", mindspore=True),
    _row("float16", 2, "float", "F16", mindspore=True),
    _row("bfloat16", 2, "float", "BF16", mindspore=True),
    _row("float32", 4, "float", "F32", mindspore=True),
    _row("float64", 8, "float", "F64", mindspore=True),
    _row("complex32", 4, "complex", "F16", 2, numpy=""),
    _row("complex64", 8, "complex", "C64", mindspore=True),
    _row("complex128", 16, "complex", "F64", 2, mindspore=True),
    _row("float8_e4m3fn", 1, "float", "F8_E4M3"),
    _row("float8_e4m3fnuz", 1, "float", "F8_E4M3FNUZ"),
    _row("float8_e5m2", 1, "float", "F8_E5M2"),
    _row("float8_e5m2fnuz", 1, "float", "F8_E5M2FNUZ"),
    _row("float8_e8m0fnu", 1, "float", "F8_E8M0"),
    # safetensors' F4 counts elements where torch counts bytes of two: kept as torch's bytes.
    _row("float4_e2m1fn_x2", 1, "float", "U8", numpy=""),
    # One byte an element, as ml_dtypes holds them.
    _row("float8_e3m4", 1, "float", "U8", torch=False),
    _row("float8_e4m3", 1, "float", "U8", torch=False),
    _row("float8_e4m3b11fnuz", 1, "float", "U8", torch=False),
    _row("float6_e2m3fn", 1, "float", "U8", torch=False),
    _row("float6_e3m2fn", 1, "float", "U8", torch=False),
    _row("float4_e2m1fn", 1, "float", "U8", torch=False),
    _row("int4", 1, "int", "U8", torch=False),
    _row("uint4", 1, "int", "U8", torch=False),
    _row("int2", 1, "int", "U8", torch=False),
    _row("uint2", 1, "int", "U8", torch=False),
    _row("int1", 1, "int", "U8", torch=False),
    _row("uint1", 1, "int", "U8", torch=False),
)

TABLE: dict[str, DType] = {
    row.name: DType(
        row.name,
        row.itemsize,
        row.kind,
        row.safetensors,
        row.extra_dim,
        row.numpy,
        row.torch,
        row.mindspore,
        code,
    )
    for code, row in enumerate(_ROWS)
}
"""Every supported type by name."""

_BY_CODE = tuple(TABLE.values())

_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "bool_": "bool",
}

_PYTHON: dict[type, str] = {int: "int64", float: "float64", complex: "complex128"}


def dtype_name(dtype: object) -> str:
    """Our name of a dtype given as a string or as any framework's dtype object.

    >>> dtype_name("torch.bfloat16"), dtype_name("Float32"), dtype_name(bool)
    ('bfloat16', 'float32', 'bool')
    """
    if not isinstance(dtype, str):
        given = getattr(dtype, "name", None)
        if not isinstance(given, str):
            if isinstance(dtype, type):
                given = _PYTHON.get(dtype, dtype.__name__)
            else:
                given = str(dtype)
        dtype = given
    bare = dtype.rpartition(".")[2]
    if bare in TABLE:
        return bare
    lowered = bare.lower()
    name = _ALIASES.get(lowered, lowered)
    if name not in TABLE:
        raise UnsupportedValueError(
            f"dtype {dtype!r} cannot be stored; supported are {', '.join(TABLE)}"
        )
    return name


def lookup(dtype: object) -> DType:
    """The table row of a dtype, or `UnsupportedValueError` naming it."""
    known = TABLE.get(dtype) if type(dtype) is str else None
    if known is not None:
        return known
    return TABLE[dtype_name(dtype)]


def by_code(code: int) -> DType:
    """The row with this number."""
    return _BY_CODE[code]


def can_cast(source: DType, target: DType, cast: Cast) -> bool:
    """Whether loading `source` into `target` is allowed; `"widen"` keeps every value exactly."""
    if source.name == target.name:
        return True
    if not cast or source.kind != target.kind or not source.numpy or not target.numpy:
        return False
    return cast is True or _widens(source, target)


def _widens(source: DType, target: DType) -> bool:
    import numpy as np

    if source.itemsize > 2 or source.kind == "complex":
        return bool(np.can_cast(source.to_numpy(), target.to_numpy(), "safe"))
    # Small types are few enough to try every value, which needs no rule for each float format.
    every = np.arange(256**source.itemsize, dtype=source.bits()).view(source.to_numpy())
    with np.errstate(all="ignore"):
        if source.kind == "int":
            # By way of int64 and object: small types do not cast to each other directly.
            wide = every.astype(np.int64)
            return bool(np.all(wide.astype(target.to_numpy()).astype(object) == wide))
        wide = every.astype(np.float64)
        there = wide.astype(target.to_numpy()).astype(np.float64)
    same = (wide == there) & (np.signbit(wide) == np.signbit(there))
    return bool(np.all(same | (np.isnan(wide) & np.isnan(there))))
