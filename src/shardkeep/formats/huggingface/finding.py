# SPDX-License-Identifier: Apache-2.0
"""Reading a Hugging Face checkpoint's headers: which tensors there are, and where they lie."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardkeep.errors import CheckpointNotFoundError, FormatError
from shardkeep.foreign.found import Found, Raw, StoredTensor, whole
from shardkeep.foreign.headers import Entry, check_packed, read_whole_header
from shardkeep.formats.huggingface.names import (
    DTYPE_OF,
    INDEX_ENDING,
    PACKED,
    SHARDING,
    WEIGHTS_ENDING,
)
from shardkeep.formats.huggingface.places import (
    Home,
    Weights,
    choose_weights,
    looks_like_safetensors,
)
from shardkeep.formats.huggingface.quantised import Target, dequantised
from shardkeep.formats.huggingface.sharded import Piece, join_pieces
from shardkeep.stores.local import storage_errors
from shardkeep.wording import names_text

__all__ = ["SYSTEM", "find", "recognises"]

SYSTEM = "Hugging Face"


def recognises(path: Path) -> bool:
    """Whether a directory has an index or a safetensors file in it, or a file is one."""
    with contextlib.suppress(OSError, ValueError):
        if not path.is_dir():
            return looks_like_safetensors(path)
        names = os.listdir(path)
        if any(name.endswith(INDEX_ENDING) for name in names):
            return True
        weights = [name for name in names if name.endswith(WEIGHTS_ENDING)]
        return bool(weights) and looks_like_safetensors(path / min(weights))
    return False


def find(path: Path, *, dequantise: Target | None = None) -> Found:
    """What a checkpoint holds; reads headers and the index.

    With `dequantise`, what is stored as blocks of 8 or 4 bits with scales is found as tensors of
    that type, under the names that models know, worked out when they are read.
    """
    if not path.exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}")
    home = Home(path)
    weights = choose_weights(home)
    beside: dict[str, Any] = {}
    expected: Mapping[str, str] = {}
    if weights.index:
        weights, expected = _follow_index(home, weights.index, beside)
    files = {name: _read_file(home, name) for name in weights.files}
    if weights.sharded or any(SHARDING in file.metadata for file in files.values()):
        pieces = [piece for file in files.values() for piece in file.pieces()]
        state = join_pieces(pieces, str(home.given))
    else:
        state = _join_whole(files, expected, home)
    for file in files.values():
        _add_ties(state, file.metadata)
    if dequantise is not None:
        state = dequantised(state, home, dequantise)
    metadata = {key: value for file in files.values() for key, value in file.metadata.items()}
    beside = {key: value for key, value in metadata.items() if key != SHARDING} | beside
    return Found(SYSTEM, home.root, state, beside)


def _follow_index(
    home: Home, name: str, beside: dict[str, Any]
) -> tuple[Weights, Mapping[str, str]]:
    """The files that an index names, and where it says each tensor is."""
    table = home.read_json(name)
    places = table.get("weight_map")
    if not isinstance(places, dict) or not all(type(file) is str for file in places.values()):
        raise FormatError(f"{home.directory / name}: weight_map does not map names to files")
    if not places:
        raise FormatError(f"{home.directory / name} names no tensor")
    metadata = table.get("metadata")
    if isinstance(metadata, dict):
        beside.update(metadata)
    # In the order of first mention, and every name checked before any file is opened.
    files = tuple(dict.fromkeys(places.values()))
    for file in files:
        home.place(file)
    return Weights(files, name), places


class _File:
    """One safetensors file, as far as its header tells."""

    def __init__(
        self, place: str, where: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]
    ) -> None:
        self.place = place
        self.where = where
        self.entries = entries
        self.metadata = metadata

    def tensor(self, name: str) -> StoredTensor:
        """An entry as a tensor of its own."""
        entry = self.entries[name]
        dtype, shape = _type_of(entry, name, self.where)
        return whole(dtype, shape, Raw(self.place, entry.start))

    def pieces(self) -> list[Piece]:
        """The entries as parts of tensors."""
        told = self.metadata.get(SHARDING)
        return [Piece.of(name, self.tensor(name), told, self.where) for name in self.entries]


def _read_file(home: Home, name: str) -> _File:
    where = str(home.directory / name) if name else str(home.given)
    file = home.open(name)
    try:
        with storage_errors(f"reading {where}"):
            entries, metadata, end = read_whole_header(file, where)
        check_packed(entries, end, file.size, where)
    finally:
        file.close()
    return _File(home.place(name), where, entries, metadata or {})


def _type_of(entry: Entry, name: str, where: str) -> tuple[str, tuple[int, ...]]:
    if entry.dtype == "F4" and entry.shape and entry.shape[-1] % 2 == 0:
        return PACKED, (*entry.shape[:-1], entry.shape[-1] // 2)
    dtype = DTYPE_OF.get(entry.dtype)
    if dtype is None:
        raise FormatError(f"{where}: {name} has elements of type {entry.dtype}, which are not read")
    return dtype, entry.shape


def _join_whole(
    files: Mapping[str, _File], expected: Mapping[str, str], home: Home
) -> dict[str, StoredTensor]:
    """All tensors by name; each where the index says, or in one file only."""
    lost = [name for name, file in expected.items() if name not in files[file].entries]
    if lost:
        raise FormatError(
            f"{home.directory}: the index names tensors that are not in their files: "
            f"{names_text(lost)}"
        )
    found: dict[str, str] = dict(expected)
    for file, part in files.items():
        for name in part.entries:
            if found.setdefault(name, file) != file and name not in expected:
                raise FormatError(
                    f"{home.directory}: {name} is in {found[name]} and in {file}; no index says "
                    "which of them counts"
                )
    return {name: files[file].tensor(name) for name, file in found.items()}


def _add_ties(state: dict[str, StoredTensor], metadata: Mapping[str, str]) -> None:
    """`safetensors.torch.save_model` tells in the metadata which name stands for which."""
    for name, kept in metadata.items():
        if name not in state and kept in state and name != "format":
            state[name] = state[kept]
