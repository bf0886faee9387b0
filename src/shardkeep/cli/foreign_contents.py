# SPDX-License-Identifier: Apache-2.0
"""What `show` finds in another system's checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardkeep.cli.contents import Contents, Row, TensorRow, Totals, ValueRow, matching
from shardkeep.cli.texts import short_repr
from shardkeep.foreign.reader import ForeignReader
from shardkeep.foreign.tables import ODD

__all__ = ["read_foreign"]


def read_foreign(reader: ForeignReader, glob: str | None = None) -> Contents:
    """Names, shapes and values, as far as the parser told them; no element is read."""
    reader.read_metadata()
    tables = reader.tables
    names: Sequence[str] = tables.structure.names
    if glob is not None:
        names = matching(names, glob)
    rows: list[Row] = [
        ValueRow(name, type(tables.plain[name]).__name__, short_repr(tables.plain[name]), "")
        if name in tables.plain
        else _tensor_row(reader, name)
        for name in names
    ]
    return Contents(_totals(reader), rows, ())


def _tensor_row(reader: ForeignReader, name: str) -> TensorRow:
    tensors = reader.tables.state.tensors
    row = tensors.row_of[name]
    stored = tensors.stored_row(row)
    chunks = reader.tables.state.chunks_of(stored)
    assert chunks.file is not None
    files = tuple(reader.tables.files[n] for n in np.unique(chunks.file).tolist() if n != ODD)
    nbytes = int(tensors.volumes[row]) * int(tensors.itemsize[row])
    same_as = None if stored == row else tensors.names[stored]
    dtype = tensors.properties(row).dtype
    return TensorRow(name, tensors.shape(row), dtype, len(chunks), nbytes, files, same_as)


def _totals(reader: ForeignReader) -> Totals:
    tables = reader.tables
    tensors = tables.state.tensors
    nbytes = (tensors.volumes * tensors.itemsize)[tensors.alias_of < 0]
    root = reader.root
    sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()]
    if root.is_file():
        sizes = [root.stat().st_size]
    assert tables.state.chunks is not None
    return Totals(
        path=reader.checkpoint_id,
        system=reader.system,
        tensors=len(tensors),
        values=len(tables.plain),
        chunks=len(tables.state.chunks),
        files=len(sizes),
        tensor_bytes=int(nbytes.sum()),
        file_bytes=sum(sizes),
        user=reader.user_metadata,
    )
