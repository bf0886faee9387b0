"""Values of a few bytes that would take for ever to print, where errors tell of what they found."""

import pickle
import time

import pytest

from shardkeep import CheckpointError
from shardkeep.foreign import pickles
from shardkeep.foreign.torch_stand_ins import TORCH, Storage
from shardkeep.wording import shown

PAIRS = b")" + b"2\x86" * 60
"""A tuple of two tuples of two tuples ...: 2 ** 60 of them, if taken apart."""
LONG = b"\x8b" + (2000).to_bytes(4, "little") + b"\x7f" * 2000
"""An integer of more digits than Python prints."""


def call(name: str, *arguments: bytes) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


V2, V3 = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
PROGRAMS = {
    "size": lambda x: call(V2, b"Pa\n", b"K\0", x, b")", b"\x89", b"}"),
    "extent": lambda x: call(V2, b"Pa\n", b"K\0", x + b"\x85", b")", b"N"),
    "offset": lambda x: call(V2, b"Pa\n", x, b")", b")", b"\x89", b"}"),
    "dtype": lambda x: call(V3, b"Pa\n", b"K\0", b")", b")", b"\x89", b"}", x),
    "lazy bits": lambda x: call(
        V2, b"Pa\n", b"K\0", b")", b")", b"\x89", b"}", b"}" + x + b"\x88s"
    ),
    "byte order": lambda x: (
        call("numpy.dtype", text("f4"), b"K\0", b"K\1") + b"(K\3" + x + b"NNNtb"
    ),
    "numpy dtype": lambda x: call("numpy.dtype", x, b"K\0", b"K\1"),
    "device": lambda x: call("torch.device", x),
    "device number": lambda x: call("torch.device", text("cuda"), x),
    "the value": lambda x: x,
}


@pytest.mark.parametrize("endless", [PAIRS, LONG], ids=["pairs", "long"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_errors_are_short_and_quick(program, endless):
    begun = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        pickles.load(
            b"\x80\4" + program(endless) + b".",
            where="here",
            classes=TORCH,
            persistent=lambda _: Storage("float32", 16, 0),
        )
    assert time.perf_counter() - begun < 1
    assert len(str(caught.value)) < 1000


def test_long_numbers_are_what_python_can_print():
    number = 2**8000
    assert pickles.load(pickle.dumps(number), where="here") == number
    assert str(number)
    with pytest.raises(CheckpointError):
        pickles.load(pickle.dumps(2**9000), where="here")


def test_shown():
    nested = ()
    for _ in range(80):
        nested = (nested, nested)
    endless = (nested, [nested] * 99, {1: nested}, 1 << 100_000, "x" * 10_000, b"x" * 10_000)
    for value in endless:
        assert len(shown(value)) < 300
    for value in ([1, "a", None, 2.5, True], (1,), (), {}, [], {1: {2: 3}}, {4}, b"a", "b", 1j):
        assert shown(value) == repr(value)
    assert shown(object()) == "<object>"
