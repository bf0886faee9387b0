# SPDX-License-Identifier: Apache-2.0
"""How errors list names, ranks and values: all that help, and not thousands."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence

__all__ = ["SHOWN", "faults_text", "names_text", "ranks_text", "shown"]

SHOWN = 8
"""How many names or ranks an error lists."""


def names_text(names: Sequence[str]) -> str:
    """The first of them.

    >>> names_text(["a", "b"])
    'a, b'
    """
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in order, each once.

    >>> ranks_text([3, 1, 3])
    'ranks 1, 3'
    """
    shown = sorted({int(rank) for rank in ranks})
    return ("ranks " if len(shown) > 1 else "rank ") + names_text([str(rank) for rank in shown])


def faults_text(what: str, faults: Sequence[str], advice: str, count: int = 0) -> str:
    """What is wrong, where, and what to do; `count` where not all faults are given."""
    left = max(count, len(faults)) - SHOWN
    more = f"\n  ... and {left} more" if left > 0 else ""
    return f"{what}:\n  " + "\n  ".join(faults[:SHOWN]) + more + f"\n{advice}"


class _Shown(reprlib.Repr):
    """Looks at as much of a value as it prints: what a file describes may be endless."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = 100

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print numbers of thousands of digits.
        return repr(x) if x.bit_length() < 256 else f"<an integer of {x.bit_length()} bits>"

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, (bool, float, complex, bytes, bytearray, type(None))):
            return repr(x[:100] if isinstance(x, (bytes, bytearray)) else x)
        return f"<{type(x).__name__}>"


_SHOWN = _Shown()


def shown(value: object) -> str:
    """A value that somebody else made, as short as an error wants it.

    >>> shown([1, (2, [3, [4]])])
    '[1, (2, [...])]'
    """
    return _SHOWN.repr(value)
