# SPDX-License-Identifier: Apache-2.0
"""safetensors files as MindSpore writes them: one, or a folder of merged ones with a map."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from shardkeep.dtypes import TABLE
from shardkeep.errors import CheckpointError, CorruptionError, FormatError
from shardkeep.foreign.below import file_below, read_exactly, regular_size
from shardkeep.foreign.crc import followed_by_zeros
from shardkeep.foreign.found import Raw, StoredTensor, whole
from shardkeep.foreign.safetensors_header import Entry, is_safetensors, read_entries
from shardkeep.formats.mindspore.checksums import crc_of

__all__ = [
    "MAP",
    "is_merged_folder",
    "is_ms_safetensors",
    "is_safetensors",
    "read_folder",
    "read_tensor_file",
]

MAP = "param_name_map.json"
"""Which file of a folder holds which parameter."""
_BESIDE = "hyper_param.safetensors"
"""What belongs to no parameter, as the learning rate; not in the map."""
_MAX_MAP = 256 << 20

State = dict[str, StoredTensor]


def is_ms_safetensors(path: Path) -> bool:
    """Whether a file is safetensors that says it is MindSpore's; never an error."""
    try:
        return is_safetensors(path) and read_entries(path)[1].get("format") == "ms"
    except (CheckpointError, OSError):
        return False


def is_merged_folder(path: Path) -> bool:
    """Whether a directory was written by `unified_safetensors`; never an error."""
    try:
        return (path / MAP).is_file()
    except OSError:
        return False


def read_tensor_file(path: Path, file: str = "") -> tuple[State, dict[str, str]]:
    """Tensors and metadata of one file; its checksum, where it has one, is checked."""
    entries, metadata = read_entries(path)
    for name, kind in metadata.items():
        if name in entries:
            raise FormatError(
                f"{name} in {path} has elements of MindSpore's packed type {kind}, which is not "
                "read here"
            )
    if "crc_num" in metadata:
        _check_crc(path, entries, metadata["crc_num"])
    return {
        name: whole(entry.dtype, entry.shape, Raw(file, entry.start))
        for name, entry in entries.items()
    }, metadata


def _check_crc(path: Path, entries: dict[str, Entry], told: str) -> None:
    crc: int | None = 0
    for name in sorted(entries):
        if crc is not None:
            crc = _crc_after(path, entries[name], zlib.crc32(name.encode(), crc))
    if told != str(crc):
        raise CorruptionError(
            f"{path} is damaged: its checksum is {told[:40]}, that of its contents {crc}. Copy it "
            "again, or choose another file."
        )


def _crc_after(path: Path, entry: Entry, crc: int) -> int | None:
    """The checksum with one more entry, as MindSpore takes it.

    It asks Python for `bytes(array)`, and those of an integer without dimensions are as many zeros
    as it says. One that is negative cannot have been written so.
    """
    if entry.shape or TABLE[entry.dtype].kind != "int":
        return crc_of(path, entry.start, entry.stop, crc)
    data = read_exactly(path, entry.start, entry.stop - entry.start)
    value = int.from_bytes(data, "little", signed=not entry.dtype.startswith("u"))
    return followed_by_zeros(crc, value) if value >= 0 else None


def read_folder(root: Path) -> State:
    """Parameters of a folder that `mindspore.unified_safetensors` wrote."""
    path = file_below(root, MAP)
    if regular_size(path) > _MAX_MAP:
        raise FormatError(f"{path} has more than {_MAX_MAP >> 20} MiB")
    table = _map(path)
    state: State = {}
    files = {name: read_tensor_file(file_below(root, name), name)[0] for name in _files(table)}
    for name, file in table.items():
        if name not in files[file]:
            raise CorruptionError(f"{root}: {file} lacks the parameter {name} that {MAP} tells of")
        state[name] = files[file][name]
    if (root / _BESIDE).is_file():
        beside, _ = read_tensor_file(file_below(root, _BESIDE), _BESIDE)
        state |= {name: tensor for name, tensor in beside.items() if name not in state}
    return state


def _map(path: Path) -> dict[str, str]:
    try:
        table = json.loads(read_exactly(path, 0, regular_size(path)))
        table = table.get("weight_map", table)
        if not all(type(name) is str for name in table.values()):
            raise ValueError("a file is not named by text")
    except (ValueError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path} is not a map of parameters to files: {error}") from error
    return dict(table)


def _files(table: dict[str, str]) -> list[str]:
    return list(dict.fromkeys(table.values()))
