"""Protocol buffers: messages taken apart field by field, changed, and put together again."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from fuzzing.by_bytes import changed_bytes
from fuzzing.trees import Tree, changed_tree

__all__ = ["changed_ckpt", "changed_message"]

_MARK = b"crc_num"
_CRC = 10
_DEPTH = 6


def changed_message(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A message with fields of other numbers, kinds, lengths and contents."""
    tree = _message(data)
    if tree is None:
        return changed_bytes(rng, data, others)
    found = [_message(rng.choice(others))] if others else []
    return _encoded(changed_tree(rng, tree, [one for one in found if one is not None]))


def changed_ckpt(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """A file of MindSpore's; where it has a checksum, that is mostly put right."""
    at = len(data) - len(_MARK) - _CRC
    if at < 0 or not data[at:].startswith(_MARK):
        return changed_message(rng, data, others)
    body = changed_message(rng, data[:at], others)
    crc = zlib.crc32(body) if rng.random() < 0.95 else rng.getrandbits(40)
    return body + _MARK + crc.to_bytes(_CRC, "big")


@lru_cache(maxsize=1024)
def _message(data: bytes) -> Tree | None:
    fields = _fields(data, 0)
    return None if fields is None else Tree(fields)


def _fields(data: bytes, depth: int) -> list[Any] | None:
    """`[number, kind, content]` of each field; None where these bytes are no message."""
    out: list[Any] = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if key >> 3 == 0 or kind not in (0, 2) or at < 0:
            return None
        value, at = _varint(data, at)
        content: Any = value
        if kind == 2:
            content = data[at : at + value]
            if at < 0 or len(content) != value:
                return None
            at += value
            inner = _fields(content, depth + 1) if content and depth < _DEPTH else None
            content = content if inner is None else inner
        out.append([key >> 3, kind, content])
    return out


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while 0 <= at < len(data) and shift < 70:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    return value, -1


def _number(value: int) -> bytes:
    value &= (1 << 70) - 1 if value >= 0 else (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _encoded(fields: Any) -> bytes:
    """Whatever the tree became, as bytes."""
    if type(fields) is bytes:
        return fields
    if type(fields) is str:
        return fields.encode("utf-8", "surrogatepass")
    if type(fields) is not list:
        return _number(fields) if type(fields) is int else b""
    out = []
    for field in fields:
        if type(field) is not list or len(field) < 3 or type(field[0]) is not int:
            out.append(_encoded(field))
            continue
        number, kind, content = field[:3]
        kind = kind if type(kind) is int else 2
        out.append(_number(number << 3 | kind & 7))
        if kind == 0 and type(content) is int:
            out.append(_number(content))
        else:
            data = _encoded(content)
            # A length that was changed to a number of its own follows the content in the tree.
            told = field[3] if len(field) > 3 and type(field[3]) is int else len(data)
            out += [_number(told), data]
    return b"".join(out)
