# SPDX-License-Identifier: Apache-2.0
"""The formats there are to convert to."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardkeep.foreign.layout import OutFile, Outline

__all__ = ["TARGETS", "Target", "checked_target", "shard_size"]


@dataclass(frozen=True)
class Target:
    """A format that lays its files out."""

    module: str
    """Where its `lay_out` is."""
    options: frozenset[str]
    """What else `lay_out` can be asked for."""
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
        frozenset({"values", "single_file", "stem"}),
        "max_shard_size",
    ),
    "torch-dcp": Target("shardkeep.formats.torch_dcp", frozenset({"chunk_bytes"}), "file_bytes"),
    "torch-save": Target("shardkeep.formats.torch_save", frozenset()),
    "hyper-parallel": Target(
        "shardkeep.formats.hyper_parallel", frozenset({"platform"}), "max_nbytes"
    ),
    "mindspore": Target(
        "shardkeep.formats.mindspore", frozenset({"format", "crc", "slice_nbytes"})
    ),
}
"""By the name that `convert` knows them by; ours has a writer of its own."""


def checked_target(name: str, options: Mapping[str, Any], sized: bool) -> Target | None:
    """A target that can be asked for this; a `ValueError` says what there is instead."""
    if name not in TARGETS:
        raise ValueError(f"to is {name!r}; use one of {', '.join(TARGETS)}")
    target = TARGETS[name]
    if sized and target is not None and not target.size:
        raise ValueError(f"{name} makes one file; shards and max_shard_size mean nothing to it")
    known = frozenset() if target is None else target.options
    for option in options:
        if option not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ValueError(f"{option!r} is not an option of {name}; {there}")
    return target


def shard_size(nbytes: int, shards: int | None, max_shard_size: int | None) -> int | None:
    """Most bytes of a file, where somebody said how many there shall be, or how large."""
    sizes = [] if max_shard_size is None else [max_shard_size]
    if shards is not None:
        sizes.append(-(-nbytes // max(1, shards)) or 1)
    return min(sizes, default=None)
