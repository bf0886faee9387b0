# SPDX-License-Identifier: Apache-2.0
"""The formats there are to convert to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from shardkeep.foreign.layout import OutFile, Outline
from shardkeep.formats.huggingface.shards import parse_size

__all__ = ["TARGETS", "Target", "checked_shards", "checked_target", "shard_size"]


@dataclass(frozen=True)
class Target:
    """A format that lays its files out."""

    module: str
    """Where its `lay_out` is."""
    options: Mapping[str, type]
    """What else `lay_out` can be asked for, and what that must be."""
    size: str = ""
    """The option that says how large one file may be; empty where there is only one."""

    def lay_out(self, outline: Outline, **options: Any) -> list[OutFile]:
        """Of the format."""
        found: list[OutFile] = importlib.import_module(self.module).lay_out(outline, **options)
        return found


TARGETS: Mapping[str, Target | None] = {
    "native": None,
    "hf": Target(
        "shardkeep.formats.huggingface",
        {"values": str, "single_file": bool, "stem": str},
        "max_shard_size",
    ),
    "torch-dcp": Target("shardkeep.formats.torch_dcp", {"chunk_bytes": int}, "file_bytes"),
    "torch-save": Target("shardkeep.formats.torch_save", {}),
    "hyper-parallel": Target("shardkeep.formats.hyper_parallel", {"platform": str}, "max_nbytes"),
    "mindspore": Target(
        "shardkeep.formats.mindspore", {"format": str, "crc": bool, "slice_nbytes": int}
    ),
}
"""By the name that `convert` knows them by; ours has a writer of its own."""

_WANTED = {bool: "true or false", int: "a positive whole number", str: "text"}


def checked_target(
    name: str, options: Mapping[str, Any], sized: bool
) -> tuple[Target | None, dict[str, Any]]:
    """A target that can be asked for this, and its options; a `ValueError` says what there is
    instead."""
    if name not in TARGETS:
        raise ValueError(f"to is {name!r}; use one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    if sized and target is not None and not target.size:
        raise ValueError(f"{name} makes one file; shards and max_shard_size mean nothing to it")
    known: Mapping[str, type] = {} if target is None else target.options
    checked = {}
    for option, value in options.items():
        if option not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ValueError(f"{option!r} is not an option of {name}; {there}")
        # A text such as "no" would count as true, and one such as "1MB" is no number of bytes.
        kind = known[option]
        checked[option] = _whole(value) if kind is int else value
        if type(checked[option]) is not kind:
            raise ValueError(f"{option} is {value!r}; use {_WANTED[kind]}")
    return target, checked


def checked_shards(shards: object) -> int | None:
    """About how many files there shall be, where somebody said so."""
    found = _whole(shards)
    if found is None and shards is not None:
        raise ValueError(f"shards is {shards!r}; use {_WANTED[int]}")
    return found


def _whole(value: Any) -> int | None:
    """A positive whole number, be it one of numpy's; None for all else."""
    try:
        found = 0 if isinstance(value, bool) else index(value)
    except TypeError:
        return None
    return found if found > 0 else None


def shard_size(nbytes: int, shards: int | None, max_shard_size: int | str | None) -> int | None:
    """Most bytes of a file, where somebody said how many there shall be, or how large."""
    sizes = [] if max_shard_size is None else [parse_size(max_shard_size)]
    if shards is not None:
        sizes.append(-(-nbytes // shards) or 1)
    return min(sizes, default=None)
