# SPDX-License-Identifier: Apache-2.0
"""Copies of nested containers, where a load or a stand-in must not change the program's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["clone", "copied"]


def clone(tensor: Tensor) -> Tensor:
    """The same elements in memory of their own."""
    return tensor.detach().clone()


def copied(value: Any, of_tensor: Callable[[Tensor], Tensor]) -> Any:
    """The same containers anew, all the way down.

    Unlike a `deepcopy`, an object that is there twice becomes two. What becomes of tensors is for
    `of_tensor` to say; everything else is shared.
    """
    if isinstance(value, Tensor):
        return of_tensor(value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = copied(item, of_tensor)
        return made
    if type(value) in (list, tuple):
        return type(value)(copied(item, of_tensor) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(copied(item, of_tensor) for item in value))
    return copy.copy(value) if isinstance(value, (list, set)) else value
