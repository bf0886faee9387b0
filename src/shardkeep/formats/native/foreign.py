# SPDX-License-Identifier: Apache-2.0
"""Telling other systems' checkpoints by what lies in a directory: none is mixed with ours."""

from __future__ import annotations

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


def foreign_format(store: LocalStore) -> str | None:
    """Which system's checkpoint a directory seems to hold, if it is not ours."""
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
    return None
