# SPDX-License-Identifier: Apache-2.0
"""Sizes, durations, names and values as text or JSON."""

from __future__ import annotations

import base64
import math
import re
import reprlib
from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["count", "human_size", "jsonable", "parse_duration", "printable", "short_repr"]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)", re.ASCII)
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}
_SHORT = 60


def human_size(nbytes: int) -> str:
    """Bytes for people.

    >>> human_size(170), human_size(8192), human_size(3 * 2**40)
    ('170 B', '8.0 KiB', '3.0 TiB')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "file"), count(12000, "file")
    ('1 file', '12,000 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def parse_duration(text: str) -> float:
    """Seconds.

    >>> parse_duration("90"), parse_duration("30m"), parse_duration("1.5h")
    (90.0, 1800.0, 5400.0)
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a time; write seconds, or 45s, 30m, 1h, 2d")
    return float(found[1]) * _UNITS[found[2]]


def printable(text: str) -> str:
    r"""Text that cannot steer a terminal: what is not printable is escaped.

    >>> printable("weiß\x1b[31m")
    'weiß\\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _SHORT
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _repr.maxfrozenset = 8


def short_repr(value: object) -> str:
    """A plain value on a part of one line."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = f"<{type(value).__name__}>"
    text = printable(text)
    return text if len(text) <= _SHORT else text[: _SHORT - 3] + "..."


def jsonable(value: object) -> object:
    """A plain value, or the nested lists of an array, as what JSON has.

    NaN and infinities become strings, complex numbers pairs, bytes Base64.

    >>> jsonable({1: (2.5, float("nan"))}), jsonable(1j), jsonable(b"ab")
    ({'1': [2.5, 'NaN']}, [0.0, 1.0], 'YWI=')
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, complex):
        return [jsonable(value.real), jsonable(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else repr(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque, range)):
        return [jsonable(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return _scalar(value.item())
    return str(value)


def _scalar(found: Any) -> object:
    if isinstance(found, (bool, int, float, complex)):
        return jsonable(found)
    try:
        return jsonable(float(found))
    except (TypeError, ValueError):
        return str(found)
