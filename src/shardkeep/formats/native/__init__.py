# SPDX-License-Identifier: Apache-2.0
"""The native format, version 1, on a directory. `docs/FORMAT.md` is its specification."""

from __future__ import annotations

from typing import ClassVar

from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.writer import NativeWriter

__all__ = ["NativeReader", "NativeStorage", "NativeWriter"]


class NativeStorage:
    """The pair of classes behind directories."""

    writer: ClassVar = NativeWriter
    reader: ClassVar = NativeReader
