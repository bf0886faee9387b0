"""JSON and msgpack: inputs decoded, changed as trees, and encoded again."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

import msgspec

from fuzzing import hostile
from fuzzing.by_bytes import changed_bytes
from fuzzing.trees import Tagged, Tree, changed_tree

__all__ = ["changed_json", "changed_msgpack"]

_DEEP = re.compile(rb'"\\u0001deep(\d{1,7})"')
_TWICE = b"\\u0001twice"
_SPLICED = 8
"""Other inputs that a piece may come from."""


def changed_json(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """JSON that holds something else; what is no JSON is changed as bytes."""
    tree = _json(data)
    if tree is None:
        return changed_bytes(rng, data, others)
    found = [_json(rng.choice(others)) for _ in range(2)] if others else []
    value = changed_tree(rng, tree, [one for one in found if one is not None])
    try:
        text = json.dumps(value).encode()
    except ValueError:  # a number that Python does not print
        return changed_bytes(rng, data, others)
    if b"\\u0001" in text:
        text = _DEEP.sub(_nested_json, text).replace(_TWICE, b"")
    return text


@lru_cache(maxsize=2048)
def _json(data: bytes) -> Tree | None:
    try:
        return Tree(json.loads(data))
    except (ValueError, RecursionError):
        return None


def _nested_json(found: re.Match[bytes]) -> bytes:
    count = int(found[1])
    return b"[" * count + b"]" * count if count % 2 else b'{"a":' * count + b"1" + b"}" * count


def changed_msgpack(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """The same with msgpack, extensions within extensions included."""
    tree = _msgpack(data)
    if tree is None:
        return changed_bytes(rng, data, others)
    found = [_msgpack(rng.choice(others)) for _ in range(2)] if others else []
    value = changed_tree(rng, tree, [one for one in found if one is not None])
    return encoded_msgpack(value)


@lru_cache(maxsize=2048)
def _msgpack(data: bytes) -> Tree | None:
    try:
        return Tree(_decoded(data))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _decoded(data: bytes | memoryview) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_tagged)


def _tagged(code: int, data: memoryview) -> Tagged:
    raw = bytes(data)
    try:
        inner = _decoded(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        inner = raw
    return Tagged(code, inner if type(inner) is list else raw)


def encoded_msgpack(value: Any) -> bytes:
    """What cannot be said in msgpack becomes something that can."""
    return msgspec.msgpack.encode(_sayable(value), enc_hook=_extension)


def _extension(value: Any) -> Any:
    inner = value.inner
    raw = inner if type(inner) is bytes else encoded_msgpack(inner)
    return msgspec.msgpack.Ext(max(-128, min(127, value.code)), raw)


def _sayable(value: Any) -> Any:
    if type(value) is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Tagged(1, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))
    if type(value) is str:
        count = value.removeprefix(hostile.DEEP)
        if count != value and len(count) < 8 and count.isascii() and count.isdecimal():
            return msgspec.Raw(b"\x91" * int(count) + b"\xc0")
        return (
            value.encode("utf-8", "replace").decode()
            if max(value, default="") > "\ud7ff"
            else value
        )
    if type(value) is list:
        return [_sayable(item) for item in value]
    if type(value) is dict:
        return {_key(key): _sayable(item) for key, item in value.items()}
    return value


def _key(key: Any) -> Any:
    return key.encode("utf-8", "replace").decode() if type(key) is str else key
