# SPDX-License-Identifier: Apache-2.0
"""What tells one checkpoint of another system from the next one at its place.

Every rank parses by itself. Where a checkpoint is replaced in between, two ranks would load two
saves; so the first tells the others what it has found, in a few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from shardkeep.engine.digests import algorithm
from shardkeep.foreign.tables import Tables

__all__ = ["fingerprint"]

_PLAIN = (str, int, float, bool, type(None))


def fingerprint(tables: Tables, looks: Sequence[tuple[int, int]]) -> bytes:
    """Equal where the same was found: names, types, shapes and places, and files that look alike.

    `looks` are size and time of every file. Numbers of files and devices are left out: a network
    file system may tell each machine others.
    """
    digest = algorithm("xxh3-128").stream()
    tensors, chunks = (
        tables.state.tensors,
        tables.state.chunks_among(np.arange(len(tables.state.tensors)))[0],
    )
    plain = {name: value for name, value in tables.plain.items() if type(value) in _PLAIN}
    told = [
        list(tensors.names),
        [(kind.dtype, kind.requires_grad) for kind in tensors.kinds],
        list(tables.plain),
        {name: repr(value) for name, value in plain.items()},
        tables.files,
        list(looks),
    ]
    digest.update(msgspec.msgpack.encode(told))
    columns = (tensors.kind, tensors.shape_start, tensors.shapes, tensors.alias_of, chunks.tensor)
    boxes = (chunks.boxes.start, chunks.boxes.offsets, chunks.boxes.sizes)
    for column in (*columns, *boxes, chunks.file, chunks.start):
        assert column is not None
        digest.update(np.ascontiguousarray(column, np.int64))
    found: bytes = digest.digest()
    return found
