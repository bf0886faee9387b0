# SPDX-License-Identifier: Apache-2.0
"""Keeping an optimizer from changing what a snapshot has not taken yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shardkeep.handles import SaveHandle

__all__ = ["guard"]


def guard(optimizer: torch.optim.Optimizer, handle: SaveHandle) -> None:
    """Have the next `optimizer.step()` wait until the snapshot of a lazy save is complete.

    With `async_save(..., snapshot="lazy")`, parameters and optimizer state are copied while forward
    and backward go on; this makes the step, which changes them, wait for what is left of that. A
    failed snapshot does not stop the step: the handle tells of it.
    """

    def wait(*_: Any) -> None:
        hook.remove()
        handle.staged.exception()

    if not handle.staged.done():
        hook = optimizer.register_step_pre_hook(wait)
