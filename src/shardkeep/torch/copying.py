# SPDX-License-Identifier: Apache-2.0
"""Copies of nested containers, where a load or a stand-in must not change the program's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardkeep.per_rank import PerRank
from shardkeep.tree import AwareStateful, is_stateful

__all__ = ["aside", "clone", "copied", "taken_back"]

SMALL = 1 << 20
"""Bytes of tensors that can be had twice."""


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


def aside(value: Any) -> Any:
    """A `Stateful` that is loaded into copies of what it gave, and told when all is there.

    What it gave may be its own containers and tensors, and some of them those of others. Large
    tensors are filled in place all the same: there may be no room for two. So is a module, and one
    that asks what is stored takes care of that itself.
    """
    if isinstance(value, PerRank):
        return replace(value, value=aside(value.value))
    if is_stateful(value) and not isinstance(value, (AwareStateful, nn.Module)):
        return _Aside(value)
    return value


def taken_back(value: Any) -> Any:
    """The object that `aside` stands for."""
    if isinstance(value, PerRank):
        return replace(value, value=taken_back(value.value))
    return value.own if isinstance(value, _Aside) else value


def _clone_small(tensor: Tensor) -> Tensor:
    return clone(tensor) if tensor.nbytes <= SMALL else tensor


class _Aside:
    def __init__(self, own: Any) -> None:
        self.own = own

    def state_dict(self) -> Mapping[str, Any]:
        given: Mapping[str, Any] = copied(self.own.state_dict(), _clone_small)
        return given

    def load_state_dict(self, state_dict: Mapping[str, Any], /) -> object:
        return self.own.load_state_dict(state_dict)
