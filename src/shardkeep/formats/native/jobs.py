# SPDX-License-Identifier: Apache-2.0
"""The data files of one rank as one job, wherever its elements come from and whoever does it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from shardkeep.engine.digests import Algorithm, ContentDigests, DigestLayout
from shardkeep.engine.filling import Chunks
from shardkeep.formats.native.files import FileWriter, data_payload
from shardkeep.formats.native.layout import FilePlan
from shardkeep.planner import SavePlanner, WriteItems

__all__ = ["DataFiles", "Journal", "Written", "file_values"]


class Written(msgspec.Struct, frozen=True):
    """A data file that was written."""

    size: int
    """Bytes of all of it."""
    payload: int
    """Bytes that are digested."""
    root: str
    """Its root digest."""
    content: str
    """Digest of the content digests of its chunks; empty where it has none."""


class Journal(Protocol):
    """Remembers files that are written, for whoever goes on after a kill."""

    save_id: str
    """Of the save, each time it is gone on with."""

    def found(self, name: str) -> Written | None:
        """What a file holds that is there, whole and durable."""

    def written(self, name: str, done: Written) -> None:
        """A file is written."""

    def durable(self, name: str) -> None:
        """A file is durable; may come before `written`."""


@dataclass(frozen=True, eq=False)
class DataFiles:
    """What a rank writes."""

    save_id: str
    """Of the save."""
    algorithm: Algorithm
    """For all digests."""
    block: int
    """Bytes of a block."""
    plans: Sequence[FilePlan]
    """The files."""
    front: Callable[[FilePlan], tuple[bytes, bytes]]
    """Gives the header of a file, and its values, when they are needed."""
    chunks: Callable[[int, int], Chunks]
    """Gives the chunks [low, high) of the rank, which lie in one file."""
    journal: Journal | None = None
    """Knows what need not be written again."""

    def write(self, files: FileWriter, written: list[str]) -> list[Written]:
        """Write all of them; each name joins `written` before its file exists."""
        out: list[Written] = [None] * len(self.plans)  # type: ignore[list-item]

        def write(number: int) -> None:
            out[number] = self._write_file(files, self.plans[number], written)

        files.run(len(self.plans), write)
        return out

    def _write_file(self, files: FileWriter, plan: FilePlan, written: list[str]) -> Written:
        name, journal = plan.name(self.save_id), self.journal
        found = None if journal is None else journal.found(name)
        if found is not None:
            return found
        header, values = self.front(plan)
        layout = DigestLayout(plan.values + len(values), self.block, self.algorithm.size)
        chunks = self.chunks(plan.first, plan.first + plan.count)
        content = ContentDigests(self.algorithm, chunks.nbytes)
        payload = data_payload(plan, header, chunks, values, content)
        durable = (lambda: None) if journal is None else partial(journal.durable, name)
        root = files.write(name, payload, layout, written, content, durable)
        digest = self.algorithm.digest(content.results().tobytes()).hex() if plan.count else ""
        done = Written(layout.file_size, layout.payload, root, digest)
        if journal is not None:
            journal.written(name, done)
        return done


def file_values(plan: FilePlan, items: WriteItems, planner: SavePlanner) -> bytes:
    """The values entry of a file: their number, where each ends, then each."""
    if not plan.holds_values:
        return b""
    parts: list[bytes] = []
    for item in items.value_items:
        data = planner.resolve_data(item)
        assert isinstance(data, bytes)
        parts.append(data)
    ends = np.cumsum([len(part) for part in parts], dtype="<u8")
    return len(parts).to_bytes(8, "little") + ends.tobytes() + b"".join(parts)
