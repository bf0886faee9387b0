# SPDX-License-Identifier: Apache-2.0
"""Which system wrote what lies there: told by its content."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from shardkeep.foreign.found import Found
from shardkeep.stores.local import storage_errors

__all__ = ["FORMATS", "Format", "detect", "recognised_later", "seen"]

NATIVE_RECORD = "checkpoint.json"
"""Where this is, the checkpoint is ours."""

FORMATS: tuple[str, ...] = (
    "megatron",
    "torch_dcp",
    "torch_save",
    "hyper_parallel",
    "mindspore",
    "deepspeed",
    "orbax",
    "huggingface",
)
"""Modules of `shardkeep.formats` that read other systems' checkpoints, in the order of asking: what
is made of another's parts comes before that other."""

SHOWN = 8
"""Names that an error lists."""


class Format(Protocol):
    """A module that reads the checkpoints of one system."""

    SYSTEM: str
    """Its name."""

    def recognises(self, path: Path) -> bool:
        """Whether it wrote what lies there; looks at the content, and never raises."""

    def find(self, path: Path, **options: Any) -> Found:
        """What lies there."""


def detect(path: Path) -> Format | None:
    """The format of what lies there, if it is one of another system."""
    with storage_errors(f"looking at {path}"):
        if not path.exists() or (path / NATIVE_RECORD).exists():
            return None
    return _recognising(FORMATS, path)


def recognised_later(name: str, path: Path) -> bool:
    """Whether one of the formats that are asked after this one would recognise what lies there."""
    return _recognising(FORMATS[FORMATS.index(name) + 1 :], path) is not None


def _recognising(names: Sequence[str], path: Path) -> Format | None:
    for name in names:
        known = cast("Format", importlib.import_module(f"shardkeep.formats.{name}"))
        if known.recognises(path):
            return known
    return None


def seen(path: Path) -> str:
    """What there is instead of a checkpoint, for an error."""
    if path.is_file():
        with path.open("rb") as file:
            return f"a file that begins with {file.read(8)!r}"
    names = sorted(os.listdir(path))
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else "nothing"
