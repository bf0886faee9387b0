# SPDX-License-Identifier: Apache-2.0
"""Names with holes: `*` stands for any text, `#` for a number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

__all__ = ["Found", "Pattern", "matching"]

_HOLES = re.compile(r"[*#]")


@dataclass(frozen=True)
class Found:
    """What stood in the holes of a name."""

    texts: tuple[str, ...]
    """For each `*`."""
    number: int = 0
    """For `#`."""


@dataclass(frozen=True)
class Pattern:
    """A name with holes.

    >>> pattern = Pattern("layers.*.experts.#.w1")
    >>> pattern.match("layers.7.experts.12.w1")
    Found(texts=('7',), number=12)
    >>> Pattern("layers.*.w1").fill(Found(("7",)))
    'layers.7.w1'
    """

    text: str
    """As it was written."""

    @property
    def stars(self) -> int:
        """How many `*` it has."""
        return self.text.count("*")

    @property
    def numbers(self) -> int:
        """How many `#` it has."""
        return self.text.count("#")

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        # A star takes as little as it can, so that the first of two does not swallow the second's.
        holes = {"*": "(.*?)", "#": "(0|[1-9][0-9]{0,17})"}
        parts = re.split(r"([*#])", self.text)
        return re.compile("".join(holes.get(part, re.escape(part)) for part in parts), re.DOTALL)

    def match(self, name: str) -> Found | None:
        """What stands in the holes; None where the name is another."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        kinds = _HOLES.findall(self.text)
        pairs = list(zip(kinds, found.groups(), strict=True))
        texts = tuple(text for kind, text in pairs if kind == "*")
        return Found(texts, next((int(text) for kind, text in pairs if kind == "#"), 0))

    def fill(self, found: Found) -> str:
        """The name with these in its holes."""
        texts = iter(found.texts)
        return _HOLES.sub(
            lambda hole: next(texts) if hole[0] == "*" else str(found.number), self.text
        )


def matching(names: Iterable[str], glob: str) -> list[str]:
    """Names that a glob selects, or that lie in the container it names; or the name itself.

    >>> matching(["model.a", "model.b", "step"], "model")
    ['model.a', 'model.b']
    """
    names = list(names)
    if glob in names:
        return [glob]  # a name may hold brackets, which mean something else in a glob
    inside = f"{glob}.*"
    return [name for name in names if fnmatchcase(name, glob) or fnmatchcase(name, inside)]
