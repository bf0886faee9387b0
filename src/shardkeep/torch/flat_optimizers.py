# SPDX-License-Identifier: Apache-2.0
"""Optimizers of FSDP1's flat parameters: under the same names as all others.

FSDP1 translates between flat and named parameters. All of it is collective, and what it gives are
copies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardkeep.torch import flat_parameters
from shardkeep.torch.first_steps import Kept, first_states
from shardkeep.torch.modules import Modules
from shardkeep.torch.optimizers import Optimizers, Owned, on_its_device
from shardkeep.torch.supported import check_state
from shardkeep.tree import Stored

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["FlatOptimizers"]

_Key = tuple[int, str]
"""Which optimizer, and FSDP1's name of a parameter."""


class FlatOptimizers(Optimizers):
    """As `Optimizers`, where the modules are FSDP1's."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        keep_options: Collection[str],
        modules: Modules,
    ) -> None:
        """`modules` are those whose parameters the optimizers have."""
        super().__init__(optimizers, keep_options)
        self._modules = modules

    def owned(self, names: Mapping[Tensor, Sequence[str]]) -> list[Owned]:
        """Every named parameter that lies in the flat ones of every group."""
        found = []
        for number, optimizer in enumerate(self.optimizers):
            check_state(optimizer)
            prefix, module = self._module_of(optimizer)
            state = flat_parameters.optimizer_state(module, optimizer)
            for group, told in zip(optimizer.param_groups, state["param_groups"], strict=True):
                for key in told["params"]:
                    kept = state["state"].get(key, {})
                    name = self._modules.name(prefix, module, key)
                    found.append(Owned(optimizer, group, (number, key), [name], kept))
        return found

    def _module_of(self, optimizer: torch.optim.Optimizer) -> tuple[str, nn.Module]:
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        for prefix, module in self._modules.modules:
            if not mine.isdisjoint(module.parameters()):
                return prefix, module
        return self._modules.modules[0]

    def _first_states(self, empty: Mapping[Any, tuple[Owned, Stored]]) -> dict[Any, Kept]:
        made: dict[_Key, Kept] = {}
        for number, optimizer in enumerate(self.optimizers):
            if not any(key[0] == number for key in empty):
                continue
            before: Any = optimizer.state
            self._initialise(optimizer)
            try:
                _, module = self._module_of(optimizer)
                state = flat_parameters.optimizer_state(module, optimizer)
            finally:
                optimizer.state = before
            made |= {(number, key): kept for key, kept in state["state"].items()}
        return made

    def _initialise(self, optimizer: torch.optim.Optimizer) -> None:
        flat = [p for group in optimizer.param_groups for p in group["params"]]
        wanted: dict[Tensor, Stored] = {p: {} for p in flat if not optimizer.state.get(p)}
        state: defaultdict[Tensor, Any] = defaultdict(dict, optimizer.state)
        optimizer.state = state
        state.update(first_states(optimizer, wanted))

    def initialise(self, names: Mapping[Tensor, Sequence[str]]) -> None:
        """Have everything kept that a first step would."""
        for optimizer in self.optimizers:
            self._initialise(optimizer)

    def _put_states(
        self, states: Sequence[tuple[Owned, Kept]], replaced: Mapping[Tensor, Tensor]
    ) -> None:
        for number, optimizer in enumerate(self.optimizers):
            mine = [(one, kept) for one, kept in states if one.key[0] == number]
            if not mine:
                continue  # nobody asked
            optimizer.state.clear()
            if not any(kept for _, kept in mine):
                continue
            groups = [
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "params": [one.key[1] for one, _ in mine if one.group is group],
                }
                for group in optimizer.param_groups
            ]
            named = {one.key[1]: kept for one, kept in mine if kept}
            _, module = self._module_of(optimizer)
            whole = {"state": named, "param_groups": groups}
            flat = flat_parameters.split_state(module, optimizer, whole)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if flat.get(parameter):
                        kept = on_its_device(group, parameter, flat[parameter])
                        optimizer.state[parameter] = kept
