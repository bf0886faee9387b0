# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's metadata: pickles of a few small classes, one for all ranks or one for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardkeep.dtypes import dtype_name
from shardkeep.errors import CheckpointError, CorruptionError, FormatError, UnsupportedValueError
from shardkeep.foreign import pickles
from shardkeep.foreign.regular_files import read_whole
from shardkeep.foreign.shapes import checked_shape
from shardkeep.foreign.stand_ins import PLAIN, Record, records
from shardkeep.foreign.torch_stand_ins import TORCH
from shardkeep.wording import shown

__all__ = ["GLOBAL", "Box", "Location", "Metadata", "Tensor", "metadata_files", "read_metadata"]

GLOBAL = ".metadata"
_RANK = re.compile(r"\.rank(\d{1,7})_metadata|(\d{1,7})\.metadata", re.ASCII)
_PACKAGES = ("hyper_parallel.core.checkpoint", "hyper_parallel.core.distributed_checkpoint")
_NAMES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageInfo",
    "TensorProperties",
    "TensorStorageMetadata",
)
_MOST = pickles.Limits().nbytes
"""Bytes of metadata."""
_FURTHEST = 1 << 62
"""Past any byte of a file."""
_LONGEST = 4096
"""Characters of a name."""
_VERSIONS = re.compile(r"[12]\.\d{1,4}", re.ASCII)

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]
"""Offsets and sizes."""


def _classes() -> dict[str, Callable[..., object] | pickles.Constant]:
    table = {**PLAIN, "torch.Size": TORCH["torch.Size"]}
    for package in _PACKAGES:
        for module in ("metadata", "storage"):
            table |= records(f"{package}.{module}", *_NAMES)
    return table


@dataclass(frozen=True, slots=True)
class Location:
    """Where something lies."""

    file: str
    """Path below the checkpoint."""
    offset: int
    """First byte of a value; tensors are found by `key`."""
    length: int
    """Bytes of a value; -1 where the file does not say."""
    key: str
    """What a tensor is called in its file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as metadata tells of it."""

    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    shape: Ints
    """Of all of it."""
    requires_grad: bool
    """As told, which is nearly always False."""


@dataclass
class Metadata:
    """What one metadata file tells of."""

    source: str
    """For errors."""
    rank: int | None
    """Whose it is; None where it is of all ranks."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """By name."""
    boxes: dict[str, list[Box]] = field(default_factory=dict)
    """What of each tensor is stored; a box may stand twice."""
    values: list[str] = field(default_factory=list)
    """Names of what is no tensor."""
    places: dict[tuple[str, str], list[Location]] = field(default_factory=dict)
    """By name and offset; values have the offset `()`. It stands as text: whoever wrote the file
    can choose numbers of which all tuples have one hash."""
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Where in the nested state each name belongs; older versions do not say."""


def metadata_files(root: Path) -> list[tuple[int | None, str]]:
    """Rank and name of the files to read: the one of all ranks if there is one, else all ranks'."""
    try:
        names = {path.name for path in root.iterdir()}
    except OSError:
        return []
    if GLOBAL in names:
        return [(None, GLOBAL)]
    found = ((_RANK.fullmatch(name), name) for name in names)
    return sorted((int(match[1] or match[2]), name) for match, name in found if match)


def read_metadata(root: Path) -> list[Metadata]:
    """Everything that the metadata files of a checkpoint tell, checked field by field."""
    files = metadata_files(root)
    if not files:
        raise FormatError(f"{root} holds no metadata of HyperParallel")
    ranks = [rank for rank, _ in files if rank is not None]
    # Names of files may claim any number of ranks: they are not all counted.
    gap = next((at for at, rank in enumerate(sorted(set(ranks))) if at != rank), None)
    if gap is not None:
        raise CorruptionError(
            f"{root}: every rank wrote metadata of its own, and that of rank {gap} is missing. "
            "Copy all files, or choose another step."
        )
    if len(ranks) != len(set(ranks)):
        raise CorruptionError(
            f"{root}: two metadata files of one rank; files of two saves are mixed there"
        )
    return [_read(root, rank, name) for rank, name in files]


def _read(root: Path, rank: int | None, name: str) -> Metadata:
    path = root / name
    data = read_whole(root, name, _MOST)
    loaded = pickles.load(data, where=str(path), classes=_classes())
    out = Metadata(str(path), rank)
    try:
        _fill(out, _record(loaded, "Metadata"))
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path} is not metadata of HyperParallel: {error}") from error
    return out


def _fill(out: Metadata, metadata: Record) -> None:
    version = metadata.get("version", "1.0")
    if type(version) is not str or not _VERSIONS.fullmatch(version):
        raise FormatError(f"{out.source} is of version {shown(version)}; 1 and 2 are known")
    for name, row in _items(metadata.get("state_dict_metadata"), "state_dict_metadata"):
        _check_name(name)
        if _is(row, "BytesStorageMetadata"):
            out.values.append(name)
            continue
        _tensor(out, name, _record(row, "TensorStorageMetadata"))
    for index, info in _items(metadata.get("storage_data"), "storage_data"):
        _place(out, _record(index, "MetadataIndex"), _record(info, "StorageInfo"))
    for name, path in _items(metadata.get("planner_data") or {}, "planner_data"):
        if type(path) is tuple and path and all(type(key) in (str, int) for key in path):
            out.paths[name] = path


def _tensor(out: Metadata, name: str, row: Record) -> None:
    what = f"{name} in {out.source}"
    properties = _record(row.get("properties"), "TensorProperties")
    dtype = properties.get("dtype")
    if type(dtype) is not str:
        raise ValueError(f"{name} has no dtype")
    try:
        dtype = dtype_name(dtype[:100])
    except UnsupportedValueError as error:
        raise FormatError(f"{what}: {error}") from error
    out.tensors[name] = Tensor(
        dtype, _shape(row.get("size"), what), properties.get("requires_grad") is True
    )
    out.boxes[name] = []
    chunks = row.get("chunks")
    if type(chunks) not in (list, tuple):
        raise ValueError(f"{name} has no list of chunks")
    for each in chunks:
        chunk = _record(each, "ChunkStorageMetadata")
        offsets, sizes = _shape(chunk.get("offsets"), what), _shape(chunk.get("sizes"), what)
        if len(offsets) != len(out.tensors[name].shape) or len(sizes) != len(offsets):
            raise ValueError(f"{name} has chunks of other dimensions than its own")
        out.boxes[name].append((offsets, sizes))


def _place(out: Metadata, index: Record, info: Record) -> None:
    name, file = index.get("fqn"), info.get("relative_path")
    _check_name(name)
    if type(file) is not str or len(file) > _LONGEST:
        raise ValueError(f"{name} lies in no file")
    offset = _shape(index.get("offset") or (), f"{name} in {out.source}")
    start, length, key = info.get("offset", 0), info.get("length", -1), info.get("tensor_key")
    if type(start) is not int or type(length) is not int or not isinstance(key, str | None):
        raise ValueError(f"{name} lies nowhere")
    if key is not None and len(key) > _LONGEST:
        raise ValueError(f"{name} is called by a text of no fair length")
    if not (0 <= start < _FURTHEST and -1 <= length < _FURTHEST):
        raise ValueError(f"{name} lies nowhere")
    place = Location(file, start, length, name if key is None else key)
    out.places.setdefault((name, str(offset)), []).append(place)


def _items(table: Any, what: str) -> Iterator[tuple[Any, Any]]:
    if not isinstance(table, dict):
        raise ValueError(f"{what} is no table")
    return iter(table.items())


def _check_name(name: object) -> None:
    if type(name) is not str or len(name) > _LONGEST:
        raise ValueError("something is not called by a text of a fair length")


def _is(value: object, name: str) -> bool:
    return isinstance(value, Record) and value.name.endswith(f".{name}")


def _record(value: object, name: str) -> Record:
    if not isinstance(value, Record) or not value.name.endswith(f".{name}"):
        raise ValueError(f"a {type(value).__name__} where a {name} belongs")
    return value


def _shape(value: object, what: str) -> Ints:
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{what} has an extent that is no sequence")
    return checked_shape(value, what)
