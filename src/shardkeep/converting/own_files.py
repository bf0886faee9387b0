# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory are those of the checkpoint in it: no other goes when it is replaced.

By what the checkpoint says of itself, and not by how files are called; but for ours, whose names
hold the number of a save. So one that is damaged can be replaced, as by `save`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardkeep.errors import CheckpointError, CheckpointExistsError, FormatError, StorageError
from shardkeep.foreign.dcp import METADATA, rank_metadata
from shardkeep.foreign.dcp.classes import Info
from shardkeep.foreign.dcp.items import ItemFiles
from shardkeep.foreign.dcp.reading import find_checkpoint
from shardkeep.foreign.detecting import Format, detect
from shardkeep.foreign.tables import tables_of
from shardkeep.formats import huggingface, hyper_parallel, megatron, mindspore, torch_dcp
from shardkeep.formats.huggingface.places import Home, choose_weights
from shardkeep.formats.hyper_parallel.metadata_files import metadata_files, read_metadata
from shardkeep.formats.mindspore.tensor_files import MAP
from shardkeep.formats.native.names import RECORD, lease_save_id, save_id_of

__all__ = ["not_of_checkpoint"]


def not_of_checkpoint(path: Path, names: list[str]) -> list[str]:
    """Which of a directory's files are no part of the one checkpoint there."""
    if (path / RECORD).exists():
        own = {n for n in names if save_id_of(n) or lease_save_id(n)}
        # The record's name alone does not tell that it is a checkpoint of Shardkeep.
        return [n for n in names if n not in own and not (own and n == RECORD)]
    system = "another system"
    try:
        known = detect(path)
        if known is None:
            return names
        system = known.SYSTEM
        own = _files_of(path, known)
    except StorageError:
        raise
    except CheckpointError as error:
        raise CheckpointExistsError(
            f"it is not known which files of {path} are those of a checkpoint of {system}, and "
            f"what else replacing it would remove ({error}); move it, or choose another destination"
        ) from error
    return [n for n in names if n not in own]


def _files_of(path: Path, known: Format) -> set[str]:
    """The files of another system's checkpoint, as it names them itself."""
    if known.SYSTEM in (torch_dcp.SYSTEM, megatron.SYSTEM):
        files = _NamedFiles(path)
        find_checkpoint(path, items=lambda _: files)
        beside = {megatron.COMMON, megatron.CONFIG} if known.SYSTEM == megatron.SYSTEM else set()
        return {METADATA, *rank_metadata(path).values(), *files.names, *beside}
    if known.SYSTEM == hyper_parallel.SYSTEM:
        places = [at for told in read_metadata(path) for at in told.places.values()]
        return {place.file for at in places for place in at} | {n for _, n in metadata_files(path)}
    if known.SYSTEM == mindspore.SYSTEM:
        return {MAP, *tables_of(known.find(path)).files}
    if known.SYSTEM != huggingface.SYSTEM:
        raise FormatError("it lies in folders, and nothing names all files")
    known.find(path)  # an index names nothing that is not there
    home = Home(path)
    weights = choose_weights(home)
    if not weights.index:
        return set(weights.files)
    table: Any = home.read_json(weights.index)
    return {weights.index, *table["weight_map"].values()}


class _NamedFiles(ItemFiles):
    """The files that torch's metadata names; what values are does not matter."""

    names: frozenset[str] = frozenset()

    def expect(self, infos: Iterable[Info]) -> None:
        """Remember them."""
        infos = list(infos)
        self.names = frozenset(info.path for info in infos)
        super().expect(infos)

    def value(self, fqn: str, info: Info) -> Any:
        """Nothing: it may be an object of any class."""
