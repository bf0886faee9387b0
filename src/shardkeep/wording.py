# SPDX-License-Identifier: Apache-2.0
"""How errors list names, ranks and values: all that help, and not thousands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

__all__ = ["SHOWN", "StatsText", "faults_text", "names_text", "ranks_text", "rate", "shown"]

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


class StatsText:
    """What was counted, for the log; made only if somebody reads that, whatever a storage counts.

    >>> str(StatsText({"files": 2.0, "read_s": 0.1234, "bytes_per_s": 3e9, "store": "s3"}))
    'files 2, read_s 0.123, bytes_per_s 3000000000, store s3'
    """

    def __init__(self, stats: Mapping[str, float]) -> None:
        """Kept as they are."""
        self._stats = stats

    def __str__(self) -> str:
        """Seconds with three digits."""
        return ", ".join(f"{key} {self._number(key, n)}" for key, n in self._stats.items())

    @staticmethod
    def _number(key: str, number: object) -> str:
        if not isinstance(number, int | float):
            return str(number)
        return f"{number:.{3 if key.endswith('_s') and not key.endswith('_per_s') else 0}f}"


def rate(nbytes: int, seconds: float) -> float:
    """Bytes per second; 0 where a clock did not move."""
    return nbytes / seconds if seconds > 0 else 0.0


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}
_LETTERS = 100


def shown(value: object, levels: int = 3) -> str:
    """A value that somebody else made, as short as an error wants it.

    Looks at no more than it prints: what a few bytes of a file describe may be endless.

    >>> shown([1, (2, [3, [4]]), {"a": b"b"}])
    "[1, (2, [...]), {'a': b'b'}]"
    """
    kind: type = tuple if isinstance(value, tuple) else type(value)
    if isinstance(value, int) and kind is int and value.bit_length() > 256:
        return f"<an integer of {value.bit_length()} bits>"  # too long for Python to print
    if isinstance(value, (str, bytes, bytearray)):
        return repr(value[:_LETTERS]) + ("..." if len(value) > _LETTERS else "")
    if kind in (int, float, complex, bool, type(None)):
        return repr(value)
    if kind not in _BRACKETS or not isinstance(value, (list, tuple, set, frozenset, dict)):
        return f"<{kind.__name__}>"
    begin, end = _BRACKETS[kind]
    if levels <= 1 and value:
        return f"{begin}...{end}"
    parts = [shown(item, levels - 1) for item in islice(value, SHOWN)]
    if isinstance(value, dict):
        items = islice(value.values(), SHOWN)
        parts = [f"{k}: {shown(v, levels - 1)}" for k, v in zip(parts, items, strict=True)]
    if len(value) > SHOWN:
        parts.append("...")
    return begin + ", ".join(parts) + ("," if kind is tuple and len(value) == 1 else "") + end
