# SPDX-License-Identifier: Apache-2.0
"""Telling other systems' checkpoints by what lies in a directory: none is mixed with ours."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

from shardkeep.foreign.regular_files import beginning
from shardkeep.formats.native.names import RECORD
from shardkeep.stores.local import LocalStore

__all__ = ["foreign_format"]

_MARKS = (
    (".metadata", "torch.distributed.checkpoint or HyperParallel"),
    ("_CHECKPOINT_METADATA", "Orbax"),
    ("_METADATA", "Orbax"),
    ("manifest.ocdbt", "Orbax"),
    ("model.safetensors.index.json", "Hugging Face"),
    ("model.safetensors", "Hugging Face"),
    ("pytorch_model.bin", "Hugging Face"),
    ("common.pt", "Megatron"),
    ("mp_rank_00_model_states.pt", "DeepSpeed"),
    ("param_name_map.json", "MindSpore"),
    ("zarr.json", "zarr"),
)
_ENDINGS = (
    (".distcp", "torch.distributed.checkpoint"),
    ("_metadata", "HyperParallel"),
    (".metadata", "torch.distributed.checkpoint or HyperParallel"),
    (".safetensors", "Hugging Face"),
    (".safetensors.index.json", "Hugging Face"),
)

_ORBAX_STEP = "_CHECKPOINT_METADATA"
_ORBAX_ITEM = "_METADATA"
"""What is in folders of Orbax's that are steps, and in those that are items of one."""
_ORBAX_TREE = b'"tree_metadata"'
_BELOW = 100
"""Folders that are looked into, and a hundredth of the entries among which they are sought."""


def foreign_format(store: LocalStore, *, below: bool = False) -> str | None:
    """Which system's checkpoint a directory seems to hold, if it is not ours.

    With `below`, folders in it count that are parts of such a one, too.
    """
    names = store.list()
    if RECORD in names:
        return None
    for mark, system in _MARKS:
        if mark in names:
            return system
    for name in names:
        for ending, system in _ENDINGS:
            if name.endswith(ending):
                return system
    return "Orbax" if below and names and _holds_orbax(store.root) else None


def _holds_orbax(root: Path) -> bool:
    """Whether folders there are steps or items of Orbax's: beside them need be nothing of its."""
    try:
        with os.scandir(root) as entries:
            found = (entry.path for entry in islice(entries, _BELOW * 100) if entry.is_dir())
            folders = list(islice(found, _BELOW))
    except OSError:  # no directory, or none any more
        return False
    return any(
        os.path.isfile(f"{folder}/{_ORBAX_STEP}") or _is_tree(f"{folder}/{_ORBAX_ITEM}")
        for folder in folders
    )


def _is_tree(file: str) -> bool:
    return os.path.isfile(file) and _ORBAX_TREE in beginning(Path(file), 4096)
