# SPDX-License-Identifier: Apache-2.0
"""Files of `torch.save`: the zip archives of torch 1.6 and later, and the older streams."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardkeep.foreign.regular_files import beginning

if TYPE_CHECKING:
    from shardkeep.foreign.found import Found
    from shardkeep.foreign.layout import OutFile, Outline

__all__ = ["SYSTEM", "find", "is_stream", "lay_out", "recognises"]

SYSTEM = "torch.save"

ZIP = b"PK\3\4"
LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first number in an old file, as every protocol from 2 on pickles it."""
FRONT = 11
"""At most so many bytes are before that: protocols from 4 on put it into a frame."""


def is_stream(head: bytes) -> bool:
    """Whether the first bytes of a file are those of an old one."""
    return head.startswith(b"\x80") and head.startswith(
        LEGACY, FRONT if head[2:3] == b"\x95" else 2
    )


def recognises(path: Path) -> bool:
    """Whether a file begins like one of torch's."""
    head = beginning(path, FRONT + len(LEGACY))
    if is_stream(head):
        return True
    # The first entry of an archive is its pickle, in a folder; that of a program may be data.
    return head.startswith(ZIP) and _is_of_torch(path)


def _is_of_torch(path: Path) -> bool:
    head = beginning(path, 1024)
    length = int.from_bytes(head[26:28], "little")
    name = head[30 : 30 + length]
    return name.partition(b"/")[2].startswith((b"data.pkl", b"data/", b"version"))


def find(path: Path) -> Found:
    """What a file holds."""
    from shardkeep.formats.torch_save.reading import find_file

    return find_file(path)


def lay_out(outline: Outline, **options: Any) -> list[OutFile]:
    """One file that `torch.load(weights_only=True)` reads."""
    from shardkeep.formats.torch_save.writing import lay_out_file

    return lay_out_file(outline, **options)
