# SPDX-License-Identifier: Apache-2.0
"""Items that torch wrote as safetensors: all tensors of a file behind one header."""

from __future__ import annotations

import json
from typing import Any

from shardkeep.dtypes import TABLE
from shardkeep.errors import CorruptionError, FormatError
from shardkeep.foreign.regular_files import OpenedFile
from shardkeep.wording import shown

__all__ = ["SafetensorsItems"]

Ints = tuple[int, ...]
_HEADER = 100_000_000


class SafetensorsItems:
    """The header at one place of a file."""

    def __init__(self, file: OpenedFile, at: int, where: str) -> None:
        self.where = where
        length = int.from_bytes(file.read(at, 8), "little")
        if not 2 <= length <= min(_HEADER, file.size - at - 8):
            raise FormatError(f"{where}: at byte {at} is neither an archive nor safetensors")
        try:
            self._table = json.loads(file.read(at + 8, length))
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"{where}: at byte {at} is neither an archive nor safetensors"
            ) from error
        if type(self._table) is not dict:
            raise FormatError(f"{where}: at byte {at} is neither an archive nor safetensors")
        self._base, self._end = at + 8 + length, file.size

    def start(self, fqn: str, dtype: str, sizes: Ints) -> int:
        """Where the elements of a tensor begin in the file."""
        row = TABLE[dtype]
        entry: Any = self._table.get(fqn)
        shape = [*sizes, row.extra_dim] if row.extra_dim else [*sizes]
        nbytes = row.itemsize
        for extent in sizes:
            nbytes *= extent
        try:
            low, high = entry["data_offsets"]
            fine = entry["dtype"] == row.safetensors and entry["shape"] == shape
            fine = fine and type(low) is int and type(high) is int and high - low == nbytes
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptionError(
                f"{self.where}: {fqn} is not in the header", names=(fqn,)
            ) from error
        if not fine or low < 0 or self._base + high > self._end:
            raise CorruptionError(
                f"{self.where}: {fqn} lies there as {shown(entry)}, expected {dtype} {sizes}",
                names=(fqn,),
            )
        return int(self._base + low)
