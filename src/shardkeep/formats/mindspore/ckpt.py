# SPDX-License-Identifier: Apache-2.0
"""MindSpore's `.ckpt`: one message with a value for each parameter, or several for a large one."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from shardkeep.dtypes import TABLE
from shardkeep.errors import CheckpointError, CorruptionError, FormatError
from shardkeep.foreign.below import read_exactly, regular_size
from shardkeep.foreign.found import Part, StoredTensor
from shardkeep.foreign.shapes import checked_shape, flat_parts
from shardkeep.formats.mindspore.checksums import crc_of
from shardkeep.formats.mindspore.wire import BYTES, Damaged, Field, Stretch
from shardkeep.stores.local import storage_errors

__all__ = ["CRC_MARK", "CRC_NBYTES", "DTYPES", "MAX_NAME", "is_ckpt", "read_ckpt"]

CRC_MARK = b"crc_num"
CRC_NBYTES = 10
_CIPHERS = {0x7F3A5ED8: "AES-GCM", 0x7F3A5ED9: "AES-CBC", 0x7F3A5EDA: "SM4-CBC"}
MAX_NAME = 4096
_MAX_TEXT = 64 << 20

DTYPES = {
    name: TABLE[name.lower()].name
    for name in (
        "Bool", "Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64",
        "Float16", "BFloat16", "Float32", "Float64", "Complex64", "Complex128",
    )
}  # fmt: skip
"""MindSpore's names of element types to ours."""

_KIND = re.compile(r"Q?U?Int\d\w*|(B|Hi)?Float\d\w*|Complex\d+|Bool|str", re.ASCII)
"""What MindSpore calls types of elements, those that are not read among them."""

Leaf = StoredTensor | str | list[StoredTensor]


@dataclass
class _Tensor:
    """One tensor message."""

    dims: list[int] = field(default_factory=list)
    kind: str = ""
    start: int = 0
    stop: int = 0
    filled: bool = False


@dataclass
class _Value:
    """One value of the file: a tensor, a slice of one, or the three tensors of a map."""

    tag: str
    tensors: list[_Tensor]
    is_map: bool


def is_ckpt(path: Path) -> bool:
    """Whether a file looks like a `.ckpt`, encrypted or not; never an error."""
    try:
        size = regular_size(path)
        if size < 8:
            return False
        if int.from_bytes(read_exactly(path, 0, 4), "little") in _CIPHERS:
            return True
        with path.open("rb") as file:
            first = next(iter(_values(file, size)))
    except (CheckpointError, Damaged, OSError, StopIteration):
        return False
    return all(_KIND.fullmatch(t.kind) or t.kind in TABLE for t in first.tensors)


def read_ckpt(path: Path) -> dict[str, Leaf]:
    """Parameters by name. The checksum, where the file has one, is of all of it and is checked."""
    size = regular_size(path)
    _refuse_encrypted(path, size)
    end = _checked_end(path, size)
    state: dict[str, Leaf] = {}
    try:
        with storage_errors(f"reading {path}"), path.open("rb") as file:
            for tag, slices in groupby(_values(file, end), key=lambda value: value.tag):
                if tag in state:
                    raise FormatError(f"{path}: the parameter {tag!r} stands in it twice")
                state[tag] = _leaf(path, tag, list(slices))
    except Damaged as error:
        raise CorruptionError(
            f"{path} is damaged or cut: {error}. Copy it again, or choose another file."
        ) from error
    return state


def _refuse_encrypted(path: Path, size: int) -> None:
    cipher = _CIPHERS.get(int.from_bytes(read_exactly(path, 0, min(4, size)), "little"))
    if cipher:
        raise FormatError(
            f"{path} is encrypted ({cipher}), which is not read here. Load it with "
            f'mindspore.load_checkpoint(dec_key=..., dec_mode="{cipher}") and save it again '
            "without a key."
        )


def _checked_end(path: Path, size: int) -> int:
    """Where the values end; if a checksum follows, it is compared with them."""
    end = size - len(CRC_MARK) - CRC_NBYTES
    if end < 0:
        return size
    trailer = read_exactly(path, end, size - end)
    if not trailer.startswith(CRC_MARK):
        return size
    told, found = int.from_bytes(trailer[len(CRC_MARK) :], "big"), crc_of(path, 0, end)
    if told != found:
        raise CorruptionError(
            f"{path} is damaged: its checksum is {told}, that of its bytes {found}. Copy it again, "
            "or choose another file."
        )
    return end


def _values(file: io.BufferedReader, end: int) -> Iterator[_Value]:
    message = Stretch(file, 0, end)
    for value in message:
        if value.number != 1 or value.kind != BYTES:
            raise Damaged(f"there is no parameter at byte {value.start}")
        yield _value(message.inside(value))


def _value(message: Stretch) -> _Value:
    tag, tensors, is_map = None, [], False
    for part in message:
        if part.kind != BYTES:
            continue
        if part.number == 1:
            tag = _text(message, part, MAX_NAME)
        elif part.number == 2:
            tensors = [_tensor(message.inside(part))]
        elif part.number == 3:
            inner = message.inside(part)
            tensors = [_tensor(inner.inside(each)) for each in inner if each.number == 1]
            is_map = True
    if tag is None or not tensors:
        raise Damaged(f"the parameter at byte {message.start} lacks its name or its tensor")
    return _Value(tag, tensors, is_map)


def _tensor(message: Stretch) -> _Tensor:
    out = _Tensor()
    for part in message:
        if part.number == 1:
            out.dims += message.numbers(part)
            if len(out.dims) > 1024:
                raise Damaged(f"the tensor at byte {message.start} has too many dimensions")
        elif part.number == 2 and part.kind == BYTES:
            out.kind = _text(message, part, 64)
        elif part.number == 3 and part.kind == BYTES:
            out.start, out.stop, out.filled = part.start, part.stop, True
    if not out.kind or not out.filled:
        raise Damaged(f"the tensor at byte {message.start} lacks its type or its content")
    return out


def _text(message: Stretch, part: Field, limit: int) -> str:
    if part.stop - part.start > limit:
        raise Damaged(f"the name at byte {part.start} is longer than {limit} bytes")
    try:
        return message.read(part).decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"the name at byte {part.start} is not UTF-8") from error


def _leaf(path: Path, tag: str, slices: list[_Value]) -> Leaf:
    what = f"{tag} in {path}"
    counts = {(value.is_map, len(value.tensors)) for value in slices}
    if len(counts) > 1:
        raise FormatError(f"{what}: its slices are of different kinds")
    if slices[0].is_map:
        columns = zip(*(value.tensors for value in slices), strict=True)
        return [_stacked(what, list(column)) for column in columns]
    tensors = [value.tensors[0] for value in slices]
    if tensors[0].kind == "str":
        return _string(path, what, tensors)
    return _joined(what, tensors, tensors[0].dims)


def _string(path: Path, what: str, slices: list[_Tensor]) -> str:
    if sum(each.stop - each.start for each in slices) > _MAX_TEXT:
        raise FormatError(f"{what} is a text of more than {_MAX_TEXT >> 20} MiB")
    data = b"".join(read_exactly(path, each.start, each.stop - each.start) for each in slices)
    try:
        return data.decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise CorruptionError(f"{what} is not text: {error}") from error


def _stacked(what: str, slices: list[_Tensor]) -> StoredTensor:
    """A tensor of a map: slices have rows of their own."""
    if any(not each.dims for each in slices):
        raise FormatError(f"{what}: a slice of a map has no rows")
    rows = sum(checked_shape(each.dims, what)[0] for each in slices)
    if any(each.dims[1:] != slices[0].dims[1:] for each in slices):
        raise FormatError(f"{what}: its slices have different shapes")
    return _joined(what, slices, [rows, *slices[0].dims[1:]], same_dims=False)


def _joined(
    what: str, slices: list[_Tensor], dims: list[int], *, same_dims: bool = True
) -> StoredTensor:
    kind = slices[0].kind
    if any(each.kind != kind or (same_dims and each.dims != dims) for each in slices):
        raise FormatError(f"{what}: its slices tell of different shapes or types")
    name = DTYPES.get(kind, kind)
    if name not in TABLE:
        raise FormatError(f"{what} has elements of type {kind!r}, which cannot be read here")
    itemsize = TABLE[name].itemsize
    shape = checked_shape(dims, what)
    nbytes = sum(each.stop - each.start for each in slices)
    if shape == (0,) and nbytes == itemsize:
        shape = ()  # as older versions write a scalar
    if nbytes != math.prod(shape) * itemsize:
        raise CorruptionError(
            f"{what} has {nbytes} bytes; shape {shape} and type {kind} need "
            f"{math.prod(shape) * itemsize}. The file is cut, or slices are missing."
        )
    parts: list[Part] = []
    first = 0
    for each in slices:
        count, rest = divmod(each.stop - each.start, itemsize)
        if rest:
            raise FormatError(f"{what}: a slice ends within an element")
        parts += flat_parts(shape, first, first + count, "", each.start, itemsize)
        first += count
    return StoredTensor(name, shape, tuple(parts))
