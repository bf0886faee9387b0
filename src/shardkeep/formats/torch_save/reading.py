# SPDX-License-Identifier: Apache-2.0
"""Reading files of `torch.save`: where their tensors lie."""

from __future__ import annotations

from pathlib import Path

from shardkeep.errors import FormatError
from shardkeep.foreign.found import Found
from shardkeep.foreign.regular_files import opened
from shardkeep.foreign.torch_objects import read_object
from shardkeep.foreign.torch_zip import Archive
from shardkeep.formats.torch_save import FRONT, LEGACY, SYSTEM, ZIP, is_stream
from shardkeep.formats.torch_save.legacy import read_stream

__all__ = ["find_file"]


def find_file(path: Path) -> Found:
    """What the file holds; its tensors are left where they are."""
    with opened(path) as file:
        head = file.read(0, FRONT + len(LEGACY))
        if head.startswith(ZIP):
            state = read_object(Archive(file.read, 0, file.size, str(path)), "")
        elif is_stream(head):
            state = read_stream(file, str(path))
        else:
            raise FormatError(f"{path} begins with {head[:8]!r}, and is no file of torch.save")
    return Found(SYSTEM, path, state)
