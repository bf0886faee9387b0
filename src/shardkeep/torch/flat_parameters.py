# SPDX-License-Identifier: Apache-2.0
"""FSDP1: modules whose parameters lie in flat ones.

`FullyShardedDataParallel` cuts a flat parameter anywhere, also inside a row, so only it can say
what a rank holds of a named one. What it gives is made for the occasion, not its own memory; what
was loaded is handed back to it. Both are collective.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["are_in", "load_module", "module_state", "optimizer_state", "split_state"]


def are_in(module: nn.Module) -> bool:
    """Whether any part of a module is FSDP1's."""
    return any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())


@contextlib.contextmanager
def _sharded(module: nn.Module) -> Iterator[None]:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import (
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with Fsdp.state_dict_type(
            module,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        ):
            yield


def module_state(module: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, each rank its part."""
    with _sharded(module), torch.no_grad():
        return dict(module.state_dict())


def load_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Take such a state back."""
    with _sharded(module), torch.no_grad():
        module.load_state_dict(state, strict=True)


def optimizer_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer keeps of named parameters, each rank its part, and its groups."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    with _sharded(module), torch.no_grad():
        return Fsdp.optim_state_dict(module, optimizer, optimizer.state_dict())


def split_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[Tensor, dict[str, Any]]:
    """Such a state as the optimizer keeps it, of flat parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    with _sharded(module), torch.no_grad():
        flat = Fsdp.optim_state_dict_to_load(module, optimizer, state)
    owners = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in flat["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, owners, strict=True))
    return {by_number[number]: kept for number, kept in flat["state"].items()}
