"""Numbers, texts and other values that parsers tend to get wrong."""

from __future__ import annotations

from random import Random
from typing import Any

__all__ = ["DEEP", "TWICE", "number", "text", "thing"]

DEEP = "\x01deep"
"""A text that encoders turn into containers within containers; how many follows."""
TWICE = "\x01twice"
"""A key that begins so is written without it, and so stands twice."""

_NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 100, 127, 128, 255, 256, 1000, 4095, 4096, 4097,
    1 << 15, 1 << 16, (1 << 16) - 1, 1 << 17, 1 << 20, 1 << 24, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 1, 1 << 32, 1 << 40, 1 << 44, 1 << 52, 1 << 53, 1 << 60, 1 << 61, (1 << 62) - 1,
    1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 70, 10**18, 10**30,
    1 << 5000, 1 << 20_000,
    -2, -128, -(1 << 31), -(1 << 32), -(1 << 62), -(1 << 63), -(1 << 63) - 1, -(10**30),
)  # fmt: skip

_TEXTS = (
    "", ".", "..", "../x", "../../../etc/passwd", "/etc/passwd", "/", "a/../../b", "a//b", "./a",
    "data/../../x", "a\0b", "\0", "C:\\x", "\\\\host\\x", "x:y", "a\nb", " ", "~", "é", "e\u0301",
    "\U0001f600", "\udc80", "\ud800", "__metadata__", "__shardkeep__.values", "checkpoint.json",
    "None", "True", "0", "-1", "1e400", "nan", "float32", "F32", "F4", "I64", "object", "%s%n{0}",
    "weight_map", ".metadata", "<|x|>", "a.b", "a[0]", 'a["b"]', "\ufeff", "9" * 5000,
)  # fmt: skip

_SHAPES: tuple[list[int], ...] = (
    [],
    [0],
    [1 << 31, 1 << 31, 4],
    [1 << 63],
    [1 << 32, 1 << 32],
    [0, 1 << 62],
    [-1],
    [1] * 33,
    [1] * 65,
    [1 << 20] * 4,
    [2] * 64,
)

LONG = 10_000_000
"""Characters of a very long name."""


def number(rng: Random, near: int | None = None) -> int:
    """A number that is too large, too small, or next to one that was right."""
    if near is not None and rng.random() < 0.5:
        return rng.choice(
            (near + 1, near - 1, near * 2, -near, near << 32, near + (1 << 32), near ^ 1, near // 2)
        )
    return rng.choice(_NUMBERS)


def text(rng: Random, near: str = "") -> str:
    """A name that nobody should have, rarely a very long one."""
    pick = rng.random()
    if near and pick < 0.2:
        at = rng.randrange(len(near) + 1)
        return near[:at] + rng.choice(_TEXTS) + near[at:]
    if pick < 0.22:
        return "x" * rng.choice((255, 256, 4096, 4097, 70_000))
    if pick < 0.2203:
        return "x" * LONG
    return rng.choice(_TEXTS)


def thing(rng: Random) -> Any:
    """Something of any type."""
    pick = rng.randrange(16)
    if pick < 4:
        return number(rng)
    if pick < 7:
        return text(rng)
    if pick < 9:
        return list(rng.choice(_SHAPES))
    if pick == 9:
        depth = rng.choice((10, 64, 65, 66, 200, 1001, 3000, 100_000))
        return f"{DEEP}{depth if rng.random() < 0.1 or depth < 3000 else 200}"
    if pick == 10:
        return rng.choice((1.5, -0.0, float("nan"), float("inf"), 1e308, 5e-324))
    if pick == 11:
        return {text(rng): number(rng)}
    return rng.choice((None, True, False, [], {}, [[]], [None], {"": {}}, ""))
