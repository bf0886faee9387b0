# SPDX-License-Identifier: Apache-2.0
"""The nesting in an index: taken apart when somebody looks inside, and checked then.

A load mostly looks for nothing in it: its target has the same nesting, and so the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np

from shardkeep.columns import Ints
from shardkeep.errors import CheckpointError, FormatError, UnsupportedValueError
from shardkeep.structure import Node, Structure

__all__ = ["StoredStructure", "reading_tables"]

_WRONG = (KeyError, ValueError, TypeError, IndexError, RecursionError, msgspec.MsgspecError)
"""What tables that are none are met with."""


@contextmanager
def reading_tables(where: str) -> Iterator[None]:
    """What is wrong with the tables of this file becomes a `FormatError`."""
    try:
        yield
    except UnsupportedValueError as error:  # an element type, say, that a newer version stores
        raise FormatError(f"{where}: {error}") from error
    except CheckpointError:
        raise
    except _WRONG as error:
        raise FormatError(f"{where}: the tensor table is not valid: {error!r}") from error


class StoredStructure(Structure):
    """A structure as it was read, whose leaves are the rows of tables."""

    def __init__(
        self, data: bytes, rows: Ints, tables: Mapping[int, Sequence[str]], where: str
    ) -> None:
        """`rows` is the row of each leaf among the names in the table of its kind."""
        super().__init__(None)
        self._data = data
        self._rows = rows
        self._tables = tables
        self._where = where
        self._is_open = False

    def look(self) -> None:
        """Take it apart, if nobody has yet."""
        if not self._is_open:
            self._take(Structure.decode(self._data))

    @property
    def root(self) -> Node:
        """The tree of nodes."""
        self.look()
        return self._root

    @root.setter
    def root(self, root: Node) -> None:
        self._root = root

    @property
    def kinds(self) -> list[int]:
        """Kind of each leaf, in order."""
        self.look()
        return super().kinds

    @property
    def names(self) -> list[str]:
        """Name of each leaf, in order: that of its row."""
        self.look()
        return super().names

    def same(self, other: Structure) -> bool:
        """Whether nesting and keys are equal; mostly the bytes of both say so at once."""
        if not self._is_open and other.encode() == self._data:
            self._take(other)
            return True
        return super().same(other)

    def _take(self, found: Structure) -> None:
        with reading_tables(self._where):
            names = self._names_of(found)
            root, kinds, key_types = found.root, found.kinds, found.key_types
        self._root, self._kinds, self._key_types, self._names = root, kinds, key_types, names
        self._is_open = True

    def _names_of(self, found: Structure) -> list[str]:
        """Leaves are named as their rows are; every row belongs to one leaf."""
        kinds = np.array(found.kinds, np.int64)
        if len(self._rows) != len(kinds):
            raise ValueError("the structure has other leaves than the tables")
        for kind, names in self._tables.items():
            if not np.array_equal(np.sort(self._rows[kinds == kind]), np.arange(len(names))):
                raise ValueError("the leaves of the structure are not the rows of the tables")
        pairs = zip(found.kinds, self._rows.tolist(), strict=True)
        names = [self._tables[kind][row] for kind, row in pairs]
        # Counted first: a long key above many leaves would make more names than any memory holds.
        if found.has_simple_keys and (found.letters > sum(map(len, names)) or found.names != names):
            raise ValueError("names do not follow from the structure")
        return names
