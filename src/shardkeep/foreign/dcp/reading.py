# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints of torch's: metadata, then where each item lies in its file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardkeep.collector import paused_collector
from shardkeep.dtypes import TABLE
from shardkeep.errors import CheckpointNotFoundError, CorruptionError, FormatError
from shardkeep.foreign import pickles
from shardkeep.foreign.dcp import METADATA, SYSTEM, rank_metadata
from shardkeep.foreign.dcp.classes import (
    CLASSES,
    Bytes,
    Chunk,
    Description,
    Index,
    Info,
    Tensor,
)
from shardkeep.foreign.dcp.items import ItemFiles
from shardkeep.foreign.dcp.joining import Joined, spot
from shardkeep.foreign.found import Found, Part, StoredTensor
from shardkeep.foreign.nesting import nested
from shardkeep.foreign.regular_files import read_whole
from shardkeep.wording import shown

__all__ = ["MCORE", "find_checkpoint"]

MCORE = "mcore_data"
"""What Megatron adds to torch's metadata; told in `user_metadata`."""

_MOST = 1 << 31
"""Bytes of metadata: several million chunks."""


def find_checkpoint(
    path: Path, rank: int | None = None, items: Callable[[Path], ItemFiles] = ItemFiles
) -> Found:
    """What the checkpoint holds; its tensors are left where they are. `items` opens its files."""
    names = _metadata_names(path, rank)
    joined = Joined(str(path))
    with paused_collector():
        for number, name in names.items():
            _describe(path, name, number, joined)
        leaves = dict(_leaves(path, joined, items))
        state = nested(leaves, joined.paths, str(path))
    return Found(SYSTEM, path, state, dict(joined.notes))


def _metadata_names(path: Path, rank: int | None) -> dict[int, str]:
    if (path / METADATA).exists() and rank is None:
        return {0: METADATA}
    names = rank_metadata(path)
    if rank is not None:
        if rank not in names:
            raise CheckpointNotFoundError(f"{path} has no metadata of rank {rank}")
        return {rank: names[rank]}
    if not names:
        raise FormatError(f"{path} has no {METADATA}: not torch's, or not finished")
    return names


def _describe(path: Path, name: str, rank: int, joined: Joined) -> None:
    where = str(path / name)
    data = read_whole(path, name, _MOST)
    limits = pickles.Limits(nbytes=_MOST)
    found = pickles.load(data, where=where, classes=CLASSES, limits=limits)
    if type(found) is not Description or type(found.state) is not dict:
        raise FormatError(f"{where} is a pickle, but not of torch's metadata")
    leaves, places = found.get("state_dict_metadata"), found.get("storage_data")
    if type(leaves) is not dict or type(places) is not dict:
        raise FormatError(f"{where} does not say what is stored, and where")
    spots: dict[tuple[str, str], Info] = {}
    for index, info in places.items():
        if type(index) is not Index or type(info) is not Info:
            raise FormatError(f"{where}: other places than torch's own storage has")
        at = spot(index.fqn, index.offset)
        if at in spots:
            raise FormatError(f"{where}: {index.fqn} is stored twice at {index.offset}")
        spots[at] = info
    joined.places += spots.values()
    for fqn, leaf in leaves.items():
        if type(fqn) is not str or type(leaf) not in (Tensor, Bytes):
            raise FormatError(f"{where}: {shown(fqn)} is neither a tensor nor a value")
        joined.add(rank, fqn, leaf, spots)
    joined.add_paths(found.get("planner_data"), where)
    version = found.get("version")
    if type(version) is str:
        joined.notes["version"] = version
    more = found.get(MCORE)
    if type(more) is dict:
        joined.notes[MCORE] = more


def _leaves(
    path: Path, joined: Joined, items: Callable[[Path], ItemFiles]
) -> Iterator[tuple[str, Any]]:
    known: dict[object, StoredTensor] = {}
    with items(path) as files:
        files.expect(joined.places)
        for fqn in joined.order:
            tensor = joined.tensors.get(fqn)
            if tensor is not None:
                made = _tensor(path, fqn, tensor, joined, files)
                # The same bytes under two names are a tie.
                yield fqn, known.setdefault(made.identity() if made.parts else fqn, made)
            else:
                yield fqn, _value(path, fqn, joined.values[fqn], files)


def _tensor(path: Path, fqn: str, tensor: Tensor, joined: Joined, files: ItemFiles) -> StoredTensor:
    dtype, size = tensor.properties.dtype, tensor.size
    if dtype not in TABLE:
        raise FormatError(f"{path}: {fqn} has the dtype torch.{dtype}, which is not supported")
    parts: dict[str, tuple[Part, Info]] = {}
    for chunk, info in joined.chunks_of(fqn, tensor):
        if len(chunk.sizes) != len(size):
            raise FormatError(f"{path}: {fqn} has shape {size} and a chunk of {chunk.sizes}")
        if 0 in chunk.sizes:
            continue
        if info is None:
            raise CorruptionError(
                f"{path}: nothing says where {fqn} at {chunk.offsets} is stored", names=(fqn,)
            )
        _check_room(path, fqn, dtype, chunk, info)
        at = str(chunk.offsets)  # see `spot`
        if at in parts:
            part, first = parts[at]
            _check_copy(path, fqn, chunk, first, info, part, files)
            continue
        place = files.tensor(fqn, dtype, chunk.sizes, info)
        parts[at] = Part(chunk.offsets, chunk.sizes, place), info
    every = tuple(part for part, _ in parts.values())
    return StoredTensor(dtype, size, every, tensor.properties.requires_grad)


def _check_copy(
    path: Path, fqn: str, chunk: Chunk, one: Info, other: Info, part: Part, files: ItemFiles
) -> None:
    """What ranks saved each for themselves must be the same."""
    if one is other or part.sizes != chunk.sizes:
        raise CorruptionError(f"{path}: {fqn} has two chunks at {chunk.offsets}", names=(fqn,))
    if not files.same_bytes(one, other):
        raise FormatError(
            f"{path}: ranks saved different elements for {fqn} at {chunk.offsets}; pass rank= to "
            "take those of one rank"
        )


def _check_room(path: Path, fqn: str, dtype: str, chunk: Chunk, info: Info) -> None:
    nbytes = math.prod(chunk.sizes) * TABLE[dtype].itemsize
    if nbytes > info.length and not info.transforms:
        raise CorruptionError(
            f"{path}: {fqn} at {chunk.offsets} has {nbytes} bytes, and {info.length} are stored",
            names=(fqn,),
        )


def _value(path: Path, fqn: str, infos: list[Info], files: ItemFiles) -> Any:
    first, *others = infos
    if any(not files.same_bytes(first, other) for other in others):
        raise FormatError(
            f"{path}: ranks saved different values for {fqn}; pass rank= to take those of one rank"
        )
    files.claim(fqn, first)
    return files.value(fqn, first)
