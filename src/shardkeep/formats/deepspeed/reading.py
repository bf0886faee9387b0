# SPDX-License-Identifier: Apache-2.0
"""Every file of a universal checkpoint is one of `torch.save`; names are those of the folders."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from shardkeep.errors import CorruptionError, FormatError
from shardkeep.foreign.found import Found, StoredTensor
from shardkeep.foreign.inert import read_beside
from shardkeep.foreign.regular_files import opened
from shardkeep.foreign.torch_objects import read_object
from shardkeep.foreign.torch_zip import Archive
from shardkeep.formats.deepspeed import SYSTEM, ZERO
from shardkeep.stores.local import storage_errors

__all__ = ["find_checkpoint"]

PARAMETER = "param"
"""The key under which a file holds its tensor; other keys say how it was put together."""
_OPTIMIZER = "optimizer_state.pt"
_MODEL = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt", re.ASCII)
_MAX_NAME = 4096


def find_checkpoint(path: Path) -> Found:
    """`zero`: each parameter's states; then the optimizer and the model states of each rank."""
    flags: dict[str, Any] = {}
    zero = {name: _parameter(path, name, flags) for name in _folders(path)}
    state: dict[str, Any] = {ZERO: zero}
    if (path / ZERO / _OPTIMIZER).exists():
        state["optimizer_state"] = read_beside(path, f"{ZERO}/{_OPTIMIZER}")
    with storage_errors(f"looking at {path}"):
        beside = sorted(name for name in os.listdir(path) if _MODEL.fullmatch(name))
    for name in beside:
        state[name.removesuffix(".pt")] = read_beside(path, name)
    return Found(SYSTEM, path, state, {"parameters": flags})


def _folders(path: Path) -> list[str]:
    with storage_errors(f"looking at {path}"), os.scandir(path / ZERO) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if not names:
        raise CorruptionError(f"{path / ZERO} has no folders of parameters; copy all of it")
    return names


def _parameter(path: Path, name: str, flags: dict[str, Any]) -> dict[str, Any]:
    folder = f"{ZERO}/{name}"
    with storage_errors(f"looking at {path / folder}"):
        files = sorted(file for file in os.listdir(path / folder) if file.endswith(".pt"))
    if "fp32.pt" not in files:
        raise CorruptionError(f"{path / folder} lacks fp32.pt; copy all of it", names=(name,))
    states = {file.removesuffix(".pt"): _state(path, f"{folder}/{file}") for file in files}
    shapes = {leaf.shape for leaf, _ in states.values() if _is_of_shape(leaf)}
    if len(shapes) > 1:
        raise FormatError(f"{path / folder}: its states have different shapes: {sorted(shapes)}")
    told = next((more for _, more in states.values() if more), None)
    if told:
        flags[name] = told
    return {key: leaf for key, (leaf, _) in states.items()}


def _is_of_shape(leaf: Any) -> bool:
    """Whether this is as large as the parameter; a step is not."""
    return isinstance(leaf, StoredTensor) and leaf.shape != ()


def _state(path: Path, file: str) -> tuple[Any, dict[str, Any]]:
    """What a file holds, and what it tells of how that was put together."""
    with opened(path, file) as source:
        archive = Archive(source.read, 0, source.size, str(path / file))
        value = read_object(archive, file)
    if not isinstance(value, dict):
        return value, {}
    if PARAMETER not in value or not isinstance(value[PARAMETER], StoredTensor):
        raise FormatError(f"{path / file} holds no tensor under {PARAMETER!r}")
    return value[PARAMETER], {str(k): v for k, v in value.items() if k != PARAMETER}
