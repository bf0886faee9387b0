# SPDX-License-Identifier: Apache-2.0
"""For programs that train with PyTorch.

`AppState` is a training state by the names of the bare model. `StorageWriter` and `StorageReader`
put the native format under torch's own driver; `to_torch` and `from_torch` map metadata both ways.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardkeep.torch.app_state import AppState
from shardkeep.torch.guarding import guard
from shardkeep.torch.rng import RngState, rng_state

if TYPE_CHECKING:
    from shardkeep.torch.mapping import from_torch, to_torch
    from shardkeep.torch.storage_reader import StorageReader
    from shardkeep.torch.storage_reader import StorageReader as FileSystemReader
    from shardkeep.torch.storage_writer import StorageWriter
    from shardkeep.torch.storage_writer import StorageWriter as FileSystemWriter

__all__ = [
    "AppState",
    "FileSystemReader",
    "FileSystemWriter",
    "RngState",
    "StorageReader",
    "StorageWriter",
    "from_torch",
    "guard",
    "rng_state",
    "to_torch",
]

# They import torch.distributed.checkpoint, which takes a second: only for who asks.
_LATER = {
    "FileSystemReader": ("storage_reader", "StorageReader"),
    "FileSystemWriter": ("storage_writer", "StorageWriter"),
    "StorageReader": ("storage_reader", "StorageReader"),
    "StorageWriter": ("storage_writer", "StorageWriter"),
    "from_torch": ("mapping", "from_torch"),
    "to_torch": ("mapping", "to_torch"),
}


def __getattr__(name: str) -> object:
    """Import what needs torch's checkpoint driver on first use."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATER[name]
    found = getattr(importlib.import_module(f"shardkeep.torch.{module}"), attribute)
    globals()[name] = found
    return found
