# SPDX-License-Identifier: Apache-2.0
"""MindSpore's files, laid out: what `mindspore.load_checkpoint` reads back."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardkeep.boxes import flat_range_boxes
from shardkeep.dtypes import TABLE
from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.crc import combined
from shardkeep.foreign.layout import (
    Elements,
    Late,
    Literal,
    OutFile,
    Outline,
    OutTensor,
    Segment,
)
from shardkeep.foreign.safetensors_header import lay_out_entries
from shardkeep.formats.mindspore.ckpt import CRC_MARK, CRC_NBYTES, DTYPES, MAX_NAME
from shardkeep.formats.mindspore.wire import VARINT, bytes_head, varint

__all__ = ["SLICE_NBYTES", "lay_out_ckpt", "lay_out_safetensors"]

SLICE_NBYTES = 512 << 20
"""A larger parameter is cut: protocol buffers hold less than 2 GiB in one piece."""

_NAMES = {ours: name for name, ours in DTYPES.items() if not name.startswith("Complex")}
"""What `mindspore.load_checkpoint` knows, which is not all that MindSpore has."""

CrcOf = Callable[[Elements], int]


@dataclass
class _File:
    """A file that grows at its end."""

    segments: list[Segment] = field(default_factory=list)
    at: int = 0
    _text: bytearray = field(default_factory=bytearray)

    def literal(self, data: bytes) -> None:
        self._text += data

    def elements(
        self, tensor: OutTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], checked: bool
    ) -> None:
        self.flush()
        each = Elements(self.at, tensor, offsets, sizes, checked)
        self.segments.append(each)
        self.at += each.nbytes

    def flush(self) -> None:
        if self._text:
            self.segments.append(Literal(self.at, bytes(self._text)))
            self.at += len(self._text)
            self._text.clear()


def lay_out_ckpt(outline: Outline, *, crc: bool, slice_nbytes: int) -> list[OutFile]:
    """One `.ckpt`: parameters, then numbers and texts as `append_dict` writes them."""
    if not outline.tensors and not outline.values:
        raise UnsupportedValueError(
            "there is nothing to write, and a .ckpt of nothing is an empty file; use "
            'format="safetensors"'
        )
    file = _File()
    for name, tensor in outline.tensors.items():
        _check(name, tensor)
        if tensor.shape == (0,):
            raise UnsupportedValueError(
                f"{name} has shape (0,), which MindSpore reads as a scalar that is missing; leave "
                "it out"
            )
        _add_tensor(file, name, tensor, crc, slice_nbytes)
    for name, value in outline.values.items():
        if type(value) is str:
            _add_value(file, name, (0,), "str", _utf32(name, value))
        else:
            dtype, data = _scalar(name, value)
            _add_value(file, name, (), _NAMES[dtype], data)
    file.flush()
    if crc:
        before = tuple(file.segments)
        late = Late(file.at, len(CRC_MARK) + CRC_NBYTES, lambda crc_of: _trailer(before, crc_of))
        return [OutFile("", file.at + late.nbytes, [*before, late])]
    return [OutFile("", file.at, file.segments)]


def _check(name: str, tensor: OutTensor) -> None:
    if len(name.encode()) > MAX_NAME:
        raise UnsupportedValueError(f"the name {name[:60]}... is longer than {MAX_NAME} bytes")
    if tensor.dtype not in _NAMES:
        raise UnsupportedValueError(
            f"{name} has elements of type {tensor.dtype}; MindSpore loads {', '.join(_NAMES)}. "
            "Convert it first, or leave it out."
        )


def _add_tensor(file: _File, name: str, tensor: OutTensor, crc: bool, slice_nbytes: int) -> None:
    itemsize = TABLE[tensor.dtype].itemsize
    count = math.prod(tensor.shape)
    step = max(slice_nbytes // itemsize, 1)
    for first in range(0, max(count, 1), step):
        stop = min(first + step, count)
        _add_head(file, name, tensor.shape, _NAMES[tensor.dtype], (stop - first) * itemsize)
        for offsets, sizes in flat_range_boxes(tensor.shape, first, stop):
            file.elements(tensor, offsets, sizes, crc)


def _add_value(file: _File, name: str, dims: Sequence[int], kind: str, data: bytes) -> None:
    _add_head(file, name, dims, kind, len(data))
    file.literal(data)


def _add_head(file: _File, name: str, dims: Sequence[int], kind: str, nbytes: int) -> None:
    """All of a value up to its content, which is what ends it."""
    tensor = b"".join(varint(1 << 3 | VARINT) + varint(extent) for extent in dims)
    tensor += bytes_head(2, len(kind)) + kind.encode() + bytes_head(3, nbytes)
    tag = bytes_head(1, len(name.encode())) + name.encode()
    inside = tag + bytes_head(2, len(tensor) + nbytes) + tensor
    file.literal(bytes_head(1, len(inside) + nbytes) + inside)


def _utf32(name: str, value: str) -> bytes:
    try:
        data = (value or "\0").encode("utf-32-le")
    except UnicodeEncodeError:
        data = b""
    if not data or value.endswith("\0"):
        raise UnsupportedValueError(
            f"the text {name} is not valid Unicode or ends with NUL, which MindSpore drops"
        )
    return data


def _scalar(name: str, value: Any) -> tuple[str, bytes]:
    """A number as the tensor of no dimensions that MindSpore makes of it, but without loss."""
    if type(value) is bool:
        return "bool", bytes([value])
    if type(value) is int and -(2**63) <= value < 2**63:
        return "int64", struct.pack("<q", value)
    if type(value) is float:
        return "float64", struct.pack("<d", value)
    raise UnsupportedValueError(
        f"{name} is a {type(value).__name__}, and MindSpore's files hold tensors, texts and "
        "numbers of 64 bits. Leave it out, or convert to a format that holds it."
    )


def _crc_of_all(segments: Sequence[Segment], crc_of: CrcOf, crc: int = 0) -> int:
    for each in segments:
        if isinstance(each, Literal):
            crc = zlib.crc32(each.data, crc)
        elif isinstance(each, Elements):
            crc = combined(crc, crc_of(each), each.nbytes)
    return crc


def _trailer(segments: Sequence[Segment], crc_of: CrcOf) -> bytes:
    return CRC_MARK + _crc_of_all(segments, crc_of).to_bytes(CRC_NBYTES, "big")


def lay_out_safetensors(outline: Outline, *, crc: bool) -> list[OutFile]:
    """One safetensors file; numbers are tensors of no dimensions, texts are refused."""
    scalars: dict[str, tuple[str, bytes]] = {}
    for name, value in outline.values.items():
        scalars[name] = _scalar(name, value)
    for name, tensor in outline.tensors.items():
        _check(name, tensor)
    rows = [(name, tensor.dtype, tensor.shape) for name, tensor in outline.tensors.items()]
    rows += [(name, dtype, ()) for name, (dtype, _) in scalars.items()]
    if crc:
        for name, dtype, shape in rows:
            if dtype == "bfloat16" or (not shape and TABLE[dtype].kind == "int"):
                raise UnsupportedValueError(
                    f"MindSpore's checksum of safetensors files does not cover {name}: it fails on "
                    'bfloat16 and on integers of no dimensions. Use format="ckpt", or no checksum.'
                )
    metadata = {"format": "ms"} | ({"crc_num": str(2**32 - 1)} if crc else {})
    header, starts, size = lay_out_entries(rows, metadata)
    inside: dict[str, Segment] = {}
    for name, tensor in outline.tensors.items():
        if tensor.nbytes:
            zeros = (0,) * len(tensor.shape)
            inside[name] = Elements(starts[name], tensor, zeros, tensor.shape, crc)
    for name, (_, data) in scalars.items():
        inside[name] = Literal(starts[name], data)
    first: Segment = Literal(0, header)
    if crc:
        first = Late(0, len(header), lambda crc_of: _with_crc(header, starts, inside, crc_of))
    return [OutFile("", size, [first, *sorted(inside.values(), key=lambda each: each.start)])]


def _with_crc(
    header: bytes, names: dict[str, int], inside: dict[str, Segment], crc_of: CrcOf
) -> bytes:
    """The header with its checksum: of names and contents in the order of the names."""
    crc = 0
    for name in sorted(names):
        crc = zlib.crc32(name.encode(), crc)
        if name in inside:
            crc = _crc_of_all([inside[name]], crc_of, crc)
    told = b'"crc_num":"%d"' % crc
    return header.replace(b'"crc_num":"%d"' % (2**32 - 1), told, 1).ljust(len(header))
