# SPDX-License-Identifier: Apache-2.0
"""Other systems' pickles, read by an interpreter that can do nothing but build data.

Python's own unpickler imports and calls whatever a pickle names. This one (`pickle_machine`) looks
names up in a table of stand-ins (`stand_ins`, `torch_stand_ins`, or a reader's own) and knows no
other way to reach code: no import, no attribute is ever looked up or set by a name that the pickle
gives, and only what the table holds is called. So what can happen is what the table's functions do,
and those build values.

What a pickle can take is bounded by its length: memory by some 50 times as much, sharing and
nesting by `Limits`. Whatever is wrong with one, the error is a `CheckpointError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

from shardkeep.errors import FormatError
from shardkeep.foreign.graphs import Constant, Global, Limits, StandIn, check_graph
from shardkeep.foreign.pickle_machine import Classes, Cut, interpret
from shardkeep.foreign.stand_ins import PLAIN

__all__ = ["Classes", "Constant", "Cut", "Global", "Limits", "StandIn", "load", "load_next"]


def load(
    data: bytes | bytearray | memoryview | BinaryIO,
    *,
    where: str,
    classes: Classes | None = None,
    persistent: Callable[[Any], object] | None = None,
    limits: Limits = Limits(),
) -> Any:
    """What a pickle of protocol 0 to 5 describes, built from stand-ins.

    `where` is told in errors. `classes` says what stands in for what (default: plain values only);
    a name that is not there is an `UnsafeCheckpointError`. `persistent` gets the persistent ids.
    The result has no cycles, no `Global` and bounded depth, so that one may walk it.

    >>> import pickle
    >>> load(pickle.dumps({"step": 3}), where="a test")
    {'step': 3}
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        data = data.read(limits.nbytes + 1)
    return load_next(
        bytes(data), where=where, classes=classes, persistent=persistent, limits=limits
    )[0]


def load_next(
    data: bytes,
    start: int = 0,
    *,
    where: str,
    classes: Classes | None = None,
    persistent: Callable[[Any], object] | None = None,
    limits: Limits = Limits(),
) -> tuple[Any, int]:
    """The pickle that begins at `start`, and where it ends; for several in a row.

    Bytes that end too early are a `Cut`, so that one who has more of them can try again.
    """
    if len(data) - start > limits.nbytes:
        raise FormatError(f"{where}: a pickle of more than {limits.nbytes} bytes is not read")
    result, end = interpret(data, start, where, classes or PLAIN, persistent, limits)
    check_graph(result, where, limits)
    return result, end
