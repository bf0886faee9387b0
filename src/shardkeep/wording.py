# SPDX-License-Identifier: Apache-2.0
"""How errors list names and ranks: all that help, and not thousands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["SHOWN", "faults_text", "names_text", "ranks_text"]

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
