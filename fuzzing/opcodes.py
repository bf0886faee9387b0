"""Pickles as what they are: programs, changed opcode by opcode."""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from fuzzing.by_bytes import changed_bytes
from fuzzing.hostile import number, text
from shardkeep.foreign.dcp.classes import CLASSES
from shardkeep.foreign.torch_stand_ins import TORCH

__all__ = ["changed_pickle"]

_CODE = (
    ("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("builtins", "print"),
    ("posix", "system"), ("subprocess", "Popen"), ("operator", "attrgetter"), ("codecs", "encode"),
    ("torch", "load"), ("numpy", "load"), ("functools", "partial"), ("copyreg", "_reconstructor"),
    ("__main__", "X"), ("collections", "OrderedDict"), ("argparse", "Namespace"),
)  # fmt: skip
_KNOWN = tuple(tuple(name.rsplit(".", 1)) for name in {**TORCH, **CLASSES} if "." in name)

_SNIPPETS = (
    b"(", b")", b"]", b"}", b"\x8f", b"t", b"l", b"d", b"R", b"b", b"s", b"u", b"a", b"e", b"0",
    b"1", b"2", b"N", b"\x85", b"\x86", b"\x87", b"\x88", b"\x89", b"\x90", b"\x91", b"\x93",
    b"\x94", b"\x81", b"\x92", b"Q", b".", b"o", b"}b", b")R", b"(tR", b"N\x85R", b"K\1\x85R",
    b"]\x94h\0a", b"}\x94Nh\0s", b"2\x86", b"(" * 1001, b"]" * 200 + b"a" * 199,
    b"(" * 60 + b"t" * 60, b")" + b"2\x86" * 40, b"}" + b")" + b"2\x86" * 30 + b"Ns",
    b"}(" + b")2\x86N" * 20 + b"u", b"\x8f(" + b"K\1)" * 9 + b"\x90", b"\x97", b"\x98", b"\x82\1",
    b"G\x7f\xf8\0\0\0\0\0\0", b"I99999999999999999999\n", b"I01\n", b"L5L\n", b"Fnan\n",
    b"V\\ud800\n", b"S'a'\n", b"S'\n", b"V" + b"x" * 3000 + b"\n", b"\x8e" + b"\xff" * 8,
    b"\x8d" + b"\xff" * 8, b"\x96\xff\xff\xff\xff\0\0\0\0", b"B\xff\xff\xff\x7f",
    b"X\xff\xff\xff\x7f", b"T\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\xff",
    b"\x8a\xff" + b"\x7f" * 255, b"\x8a\0", b"j\xff\xff\xff\xff", b"r\xff\xff\xff\x7f",
    b"r\0\0\1\0", b"h\xff", b"p999999\n", b"g999999\n", b"p-1\n", b"g-1\n", b"\x95" + b"\xff" * 8,
    b"\x80\4", b"\x80\xff", b"Pabc\n", b"J\xff\xff\xff\x7f", b"M\xff\xff",
)  # fmt: skip


def changed_pickle(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """One to five opcodes dropped, repeated, moved, given other arguments, or put in."""
    program = _program(data)
    if not program:
        return changed_bytes(rng, data, others)
    out = list(program)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        _change(rng, out, others)
        if not out:
            break
    return b"".join(out)


@lru_cache(maxsize=1024)
def _program(data: bytes) -> tuple[bytes, ...]:
    """The opcodes with their arguments; frames, which tell of lengths, are left out."""
    places = []
    try:
        for code, _, at in pickletools.genops(data):
            places.append((at or 0, code.name))
    except (ValueError, IndexError, UnicodeError, OverflowError):
        if not places:
            return ()
    ends = [*(at for at, _ in places[1:]), len(data)]
    pairs = zip(places, ends, strict=True)
    return tuple(data[at:end] for (at, name), end in pairs if name != "FRAME")


def _change(rng: Random, out: list[bytes], others: Sequence[bytes]) -> None:
    at, pick = rng.randrange(len(out)), rng.randrange(12)
    if pick == 0:
        del out[at : at + rng.choice((1, 1, 2, 10))]
    elif pick == 1:
        out[at:at] = out[at : at + rng.choice((1, 2, 5))] * rng.choice((1, 1, 3, 100))
    elif pick == 2:
        other = rng.randrange(len(out))
        out[at], out[other] = out[other], out[at]
    elif pick < 6:
        out[at] = _argument(rng, out[at])
    elif pick < 9:
        out.insert(at, rng.choice(_SNIPPETS))
    elif pick == 9:
        module, name = rng.choice(_CODE) if rng.random() < 0.3 else rng.choice(_KNOWN)
        out.insert(at, f"c{module}\n{name}\n".encode())
    elif pick == 10 and others:
        other_program = _program(rng.choice(others))
        if other_program:
            begin = rng.randrange(len(other_program))
            out[at:at] = other_program[begin : begin + rng.choice((1, 3, 10, 40))]
    else:
        out[at] = _value(rng)


def _argument(rng: Random, code: bytes) -> bytes:
    """The same opcode with something else behind it, or another that takes as much."""
    first = code[:1]
    if first in b"KMJ\x8a\x8b":
        return _integer(rng, int.from_bytes(code[1:5], "little"))
    if first in b"X\x8c\x8d":
        return _text(rng)
    if first in b"hqjr" and len(code) > 1:
        return first + bytes([rng.randrange(256)]) + code[2:]
    if len(code) > 1:
        at = rng.randrange(1, len(code))
        return code[:at] + bytes([code[at] ^ (1 << rng.randrange(8))]) + code[at + 1 :]
    return rng.choice(_SNIPPETS)


def _value(rng: Random) -> bytes:
    return _integer(rng, 0) if rng.random() < 0.6 else _text(rng)


def _integer(rng: Random, near: int) -> bytes:
    value = number(rng, near)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    size = min(255, value.bit_length() // 8 + 1)
    return bytes([0x8A, size]) + (value % (1 << 8 * size)).to_bytes(size, "little")


def _text(rng: Random) -> bytes:
    data = text(rng).encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data
