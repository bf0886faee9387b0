# SPDX-License-Identifier: Apache-2.0
"""MindSpore's checkpoints: `.ckpt`, its safetensors files, and folders of merged ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from shardkeep.errors import CheckpointNotFoundError, FormatError
from shardkeep.foreign.found import Found
from shardkeep.foreign.layout import OutFile, Outline
from shardkeep.formats.mindspore import ckpt, tensor_files, writing

__all__ = ["SYSTEM", "find", "lay_out", "recognises"]

SYSTEM = "MindSpore"


def recognises(path: Path) -> bool:
    """Whether there is a checkpoint of MindSpore, by what the first bytes say."""
    try:
        if path.is_dir():
            return tensor_files.is_merged_folder(path)
        return path.is_file() and (ckpt.is_ckpt(path) or tensor_files.is_ms_safetensors(path))
    except (OSError, ValueError):
        return False


def find(path: Path) -> Found:
    """Parameters by name, as `mindspore.load_checkpoint` gives them."""
    if path.is_dir():
        if not tensor_files.is_merged_folder(path):
            raise FormatError(
                f"{path} is a directory without {tensor_files.MAP}. Name one of MindSpore's files, "
                "or merge what several ranks wrote with mindspore.unified_safetensors first."
            )
        return Found(SYSTEM, path, tensor_files.read_folder(path))
    if not path.exists():
        raise CheckpointNotFoundError(f"there is nothing at {path}")
    if ckpt.is_ckpt(path) or not tensor_files.is_safetensors(path):
        return Found(SYSTEM, path, ckpt.read_ckpt(path))
    state: dict[str, Any]
    state, metadata = tensor_files.read_tensor_file(path)
    return Found(SYSTEM, path, state, metadata)


def lay_out(
    outline: Outline,
    *,
    format: Literal["ckpt", "safetensors"] = "ckpt",
    crc: bool = False,
    slice_nbytes: int = writing.SLICE_NBYTES,
) -> list[OutFile]:
    """One file that `mindspore.load_checkpoint(file, format=...)` reads.

    Numbers become tensors of no dimensions, as `append_dict` has it; what ties tensors together is
    lost, and each name gets its own copy.
    """
    if format == "safetensors":
        return writing.lay_out_safetensors(outline, crc=crc)
    if format != "ckpt":
        raise ValueError(f'format must be "ckpt" or "safetensors", not {format!r}')
    return writing.lay_out_ckpt(outline, crc=crc, slice_nbytes=slice_nbytes)
