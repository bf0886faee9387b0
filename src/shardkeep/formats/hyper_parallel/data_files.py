# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's tensor files: safetensors, or what torch saves under the same name."""

from __future__ import annotations

from pathlib import Path

from shardkeep.errors import CorruptionError, FormatError
from shardkeep.foreign.below import file_below, read_exactly
from shardkeep.foreign.found import Raw, StoredTensor, whole
from shardkeep.foreign.regular_files import opened
from shardkeep.foreign.safetensors_header import is_safetensors, read_entries
from shardkeep.foreign.torch_objects import read_object
from shardkeep.foreign.torch_zip import Archive

__all__ = ["DataFiles"]

_ZIP = b"PK\x03\x04"


class DataFiles:
    """The tensor files of a checkpoint, each parsed once."""

    def __init__(self, root: Path) -> None:
        """Nothing is opened yet."""
        self._root = root
        self._known: dict[str, dict[str, StoredTensor]] = {}

    def tensor(self, file: str, key: str) -> StoredTensor:
        """A tensor of a file; where it lies is relative to the checkpoint."""
        tensors = self._known.get(file)
        if tensors is None:
            tensors = self._known[file] = self._parse(file)
        found = tensors.get(key)
        if found is None:
            raise CorruptionError(
                f"{self._root / file} lacks {key!r}, which the metadata says is there: the two are "
                "of different saves, or damaged",
                names=(key,),
            )
        return found

    def _parse(self, file: str) -> dict[str, StoredTensor]:
        path = file_below(self._root, file)
        if is_safetensors(path):
            entries, _ = read_entries(path)
            return {
                key: whole(entry.dtype, entry.shape, Raw(file, entry.start))
                for key, entry in entries.items()
            }
        if read_exactly(path, 0, 4) != _ZIP:
            raise FormatError(f"{path} is neither a safetensors file nor one that torch saved")
        return self._archive(file, path)

    def _archive(self, file: str, path: Path) -> dict[str, StoredTensor]:
        with opened(self._root, file) as opened_file:
            archive = Archive(opened_file.read, 0, opened_file.size, str(path))
            table = read_object(archive, file)
        if not isinstance(table, dict):
            raise FormatError(f"{path} holds a {type(table).__name__}, not tensors by name")
        tensors = {}
        for key, tensor in table.items():
            if type(key) is not str or not isinstance(tensor, StoredTensor):
                raise FormatError(f"{path} holds something other than tensors by name")
            tensors[key] = tensor
        return tensors
