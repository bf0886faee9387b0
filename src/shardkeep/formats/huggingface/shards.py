# SPDX-License-Identifier: Apache-2.0
"""Which tensor goes into which file, and at which byte: the same for any number of writers.

Files are filled in the order of the state. Within a file, tensors of wider elements come first, so
that every tensor begins on a multiple of its item size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index

import msgspec

from shardkeep.dtypes import lookup
from shardkeep.errors import UnsupportedValueError
from shardkeep.formats.huggingface.names import (
    MODEL,
    SHARDING,
    entry_form,
    file_name,
    index_name,
    is_plain,
)
from shardkeep.wording import names_text

__all__ = ["Shard", "Tensor", "index_text", "parse_size", "plan_shards", "refuse_values"]

DEFAULT_SIZE = "5GB"
"""What transformers writes into one file."""
MAX_TEXT = 50_000_000
"""Bytes of header after which another file is begun; readers accept twice as many."""
PAGE = 4096
WORTH_A_PAGE = 1 << 20
"""Bytes of tensors from which their first byte is worth to lie on a page."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\Z", re.IGNORECASE)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(size: int | str) -> int:
    """Bytes of a size as transformers takes it.

    >>> parse_size("5GB"), parse_size("1GiB"), parse_size(300)
    (5000000000, 1073741824, 300)
    """
    if isinstance(size, str):
        found = _SIZE.match(size.strip())
        if found is not None:
            number, unit, binary = found.groups()
            given = float(number) * (1024 if binary else 1000) ** _POWER[unit.lower()]
            size = int(given) if given < 1 << 63 else size  # no file can have more
    try:
        nbytes = 0 if isinstance(size, bool) else index(size)  # type: ignore[arg-type]
    except TypeError:
        nbytes = 0
    if nbytes <= 0:
        raise ValueError(f"max_shard_size is {size!r}; use bytes, or text such as '5GB'")
    return nbytes


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to be stored."""

    name: str
    """Its name."""
    dtype: str
    """Name in `shardkeep.dtypes.TABLE`."""
    shape: tuple[int, ...]
    """Its extent."""
    nbytes: int
    """Bytes of all elements."""


@dataclass(frozen=True, eq=False)
class Shard:
    """One file."""

    name: str
    """Path below the directory."""
    header: bytes
    """Its first bytes; tensors come next."""
    size: int
    """All of it."""
    tensors: tuple[tuple[Tensor, int], ...]
    """What is in it, and the first byte of each; in the order they lie."""


def refuse_values(names: Sequence[str], values: str) -> None:
    """Plain values have no place in these files: an error, unless they are to be dropped."""
    if values not in ("refuse", "drop"):
        raise ValueError(f"values is {values!r}; use 'refuse' or 'drop'")
    if names and values == "refuse":
        raise UnsupportedValueError(
            f"a Hugging Face checkpoint holds tensors only, and these are plain values: "
            f"{names_text(list(names))}. Leave them out of the state, or pass values='drop'"
        )


def plan_shards(
    tensors: Sequence[Tensor],
    *,
    max_shard_size: int | str = DEFAULT_SIZE,
    stem: str = MODEL,
    ties: Mapping[str, str] = {},
    metadata: Mapping[str, str] = {},
) -> list[Shard]:
    """Files for all tensors; at least one, if with nothing in it.

    `ties` maps names that are not stored to those that are.
    """
    limit = parse_size(max_shard_size)
    if not is_plain(stem):
        raise ValueError(f"stem is {stem!r}; use a file name without a path")
    _refuse_types(tensors)
    _refuse_ties(ties)
    groups = list(_grouped(tensors, limit)) or [[]]
    shards = []
    for number, group in enumerate(groups):
        kept = {tensor.name for tensor in group}
        told = {"format": "pt", **metadata}
        told |= {name: stored for name, stored in ties.items() if stored in kept}
        shards.append(_shard(file_name(number, len(groups), stem), group, told))
    return shards


def _refuse_types(tensors: Sequence[Tensor]) -> None:
    refused = [t for t in tensors if entry_form(lookup(t.dtype), t.shape) is None]
    if refused:
        kinds = sorted({tensor.dtype for tensor in refused})
        raise UnsupportedValueError(
            f"a Hugging Face checkpoint cannot hold elements of type {names_text(kinds)}: "
            f"{names_text([tensor.name for tensor in refused])}. Cast them, or leave them out"
        )
    if any(tensor.name == "__metadata__" for tensor in tensors):
        raise UnsupportedValueError(
            "a tensor cannot be called __metadata__ in a safetensors file; give it another name"
        )


def _refuse_ties(ties: Iterable[str]) -> None:
    """The header tells of ties in its metadata, where these names mean something else."""
    taken = {"format", SHARDING}.intersection(ties)
    if taken:
        raise UnsupportedValueError(
            f"a tied tensor cannot be called {names_text(sorted(taken))} in a Hugging Face "
            "checkpoint; give it another name, or its own copy"
        )


def _grouped(tensors: Iterable[Tensor], limit: int) -> Iterable[list[Tensor]]:
    """One file after the other; a tensor that is larger than a file has one of its own."""
    group: list[Tensor] = []
    nbytes = text = 0
    for tensor in tensors:
        more = len(tensor.name) * 4 + 200
        if group and (nbytes + tensor.nbytes > limit or text + more > MAX_TEXT):
            yield group
            group, nbytes, text = [], 0, 0
        group.append(tensor)
        nbytes += tensor.nbytes
        text += more
    if group:
        yield group


def _shard(name: str, group: Sequence[Tensor], metadata: Mapping[str, str]) -> Shard:
    ordered = sorted(group, key=lambda tensor: -lookup(tensor.dtype).itemsize)
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    starts = []
    for tensor in ordered:
        form = entry_form(lookup(tensor.dtype), tensor.shape)
        assert form is not None
        offsets = (at, at + tensor.nbytes)
        table[tensor.name] = {"dtype": form[0], "shape": form[1], "data_offsets": offsets}
        starts.append(at)
        at += tensor.nbytes
    text = msgspec.json.encode(table)
    step = PAGE if at >= WORTH_A_PAGE else 8
    room = -(-(8 + len(text)) // step) * step
    header = (room - 8).to_bytes(8, "little") + text.ljust(room - 8)
    placed = tuple((t, room + start) for t, start in zip(ordered, starts, strict=True))
    return Shard(name, header, room + at, placed)


def index_text(shards: Sequence[Shard], stem: str = MODEL) -> tuple[str, bytes] | None:
    """Name and content of the index, where there are several files."""
    if len(shards) == 1:
        return None
    places = {tensor.name: shard.name for shard in shards for tensor, _ in shard.tensors}
    total = sum(tensor.nbytes for shard in shards for tensor, _ in shard.tensors)
    table = {"metadata": {"total_size": total}, "weight_map": places}
    text = json.dumps(table, indent=2, sort_keys=True) + "\n"
    return index_name(stem), text.encode()
