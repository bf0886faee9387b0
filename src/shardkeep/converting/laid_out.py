# SPDX-License-Identifier: Apache-2.0
"""Into other systems' formats, whose files are laid out first; and how far they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from shardkeep.converting.contents import Contents
from shardkeep.converting.workplace import Workplace
from shardkeep.foreign.layout import Elements, Literal, OutFile
from shardkeep.foreign.writing import FileNote, write_layout

__all__ = ["layout_digest", "write_laid_out"]


def layout_digest(files: Sequence[OutFile]) -> str:
    """Equal for equal files: what was written of other ones is of no use."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(repr((file.name, file.size, len(file.segments))).encode())
        for segment in file.segments:
            digest.update(repr((segment.start, segment.nbytes)).encode())
            if isinstance(segment, Literal):
                digest.update(segment.data)
            elif isinstance(segment, Elements):
                tensor = segment.tensor
                where = (tensor.name, tensor.dtype, tensor.shape, segment.offsets, segment.sizes)
                digest.update(repr((where, segment.checked)).encode())
    return digest.hexdigest()


def write_laid_out(
    contents: Contents,
    files: Sequence[OutFile],
    place: Workplace,
    *,
    budget: int,
    progress: Callable[[int], None],
) -> None:
    """Write all files in the workplace, going on from what its journal says."""
    write_layout(
        place.made,
        files,
        contents.read,
        contents,
        budget=budget,
        notes=_Notes(place),
        progress=progress,
    )


class _Notes:
    """`shardkeep.foreign.writing.Notes` in the journal of a workplace."""

    def __init__(self, place: Workplace) -> None:
        self._place = place
        self._found: dict[str, FileNote] = {}
        for entry in place.entries:
            if "upto" in entry:
                before = self._found.get(entry["file"]) if entry["upto"] else None
                sums = {**(before.sums if before else {}), **_numbers(entry["sums"])}
                note = FileNote(entry["upto"], sums, entry["done"])
                self._found[entry["file"]] = note

    def found(self, name: str) -> FileNote | None:
        """What the journal says."""
        return self._found.get(name)

    def note(self, name: str, note: FileNote) -> None:
        """Into the journal."""
        entry = {"file": name, "upto": note.upto, "sums": dict(note.sums), "done": note.done}
        self._place.note(entry)


def _numbers(sums: dict[str, int]) -> dict[int, int]:
    """JSON has no numbers as keys."""
    return {int(number): value for number, value in sums.items()}
