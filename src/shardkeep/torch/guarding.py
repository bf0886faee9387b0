# SPDX-License-Identifier: Apache-2.0
"""Keeping an optimizer from changing what a snapshot has not taken yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardkeep.adapters.torch_steps import before_step

if TYPE_CHECKING:
    import torch

    from shardkeep.handles import SaveHandle

__all__ = ["guard"]


def guard(optimizer: torch.optim.Optimizer, handle: SaveHandle) -> None:
    """Have the next `optimizer.step()` wait until the state may change after a lazy save.

    With `async_save(..., snapshot="lazy")`, parameters and optimizer state are copied while forward
    and backward go on; this makes the step, which changes them, wait for what is left of that. A
    failed snapshot does not stop the step: the handle tells of it.
    """

    if not handle.staged.done():
        before_step(optimizer, handle.staged.exception)
