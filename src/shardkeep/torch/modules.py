# SPDX-License-Identifier: Apache-2.0
"""What modules hold, under names that do not depend on what the modules are wrapped in.

`torch.compile`, `DistributedDataParallel`, activation checkpointing and FSDP each put a module
around another, and their name for it into the names of its parameters. A checkpoint that had those
would fit only a program that wraps in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardkeep.errors import MismatchError, UnsupportedValueError
from shardkeep.sharding import ShardedArray
from shardkeep.torch import flat_parameters
from shardkeep.wording import names_text

__all__ = ["Modules", "Rename", "canonical_name", "yielding"]

Rename = Callable[[str], str]
"""From the name of a parameter or buffer in this process to its name in the checkpoint."""

_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
}
"""Classes of torch that only wrap a module, and what they call it."""


def _wrapped_name(module: nn.Module | None) -> str | None:
    """What a module calls the one it only wraps."""
    # By name, because importing the classes would cost those who do not use them.
    for cls in type(module).__mro__:
        name = _WRAPPERS.get(cls.__name__)
        if name is not None and cls.__module__.startswith("torch."):
            return name
    return None


def canonical_name(model: nn.Module, key: str) -> str:
    """A name in the state dict of a model, without what wrappers added to it."""
    module: nn.Module | None = model
    kept = []
    for part in key.split("."):
        inner = _wrapped_name(module)
        while inner is not None and inner != part:  # some take their own name out again
            module = _child(module, inner)
            inner = _wrapped_name(module)
        if inner is None:
            kept.append(part)
        module = _child(module, part)
    return ".".join(kept)


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    return None if module is None else module._modules.get(name)


class Modules:
    """One or several modules that share one space of names."""

    def __init__(self, modules: Mapping[str, nn.Module], rename: Rename | None = None) -> None:
        """Each under a prefix of its names, which may be empty, with its dot."""
        self.modules = list(modules.items())
        self._rename = rename

    @classmethod
    def of(cls, given: object, what: str, rename: Rename | None = None) -> Modules:
        """A module; a sequence of them that are parts of one model; or a mapping by name."""
        if isinstance(given, nn.Module) and not isinstance(given, (nn.ModuleList, nn.ModuleDict)):
            return cls({"": given}, rename)
        made = cls({}, rename)
        if isinstance(given, Mapping):
            made.modules = [(f"{name}.", module) for name, module in given.items()]
        elif isinstance(given, Sequence) and not isinstance(given, str):
            made.modules = [("", module) for module in given]
        elif isinstance(given, (nn.ModuleList, nn.ModuleDict)):
            made.modules = [("", given)]
        else:
            raise TypeError(
                f"{what} is a {type(given).__qualname__}; pass a module, a list of the parts of "
                "one model, or a dict of models by name"
            )
        for _, module in made.modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"{what} holds a {type(module).__qualname__}, expected modules")
        return made

    def name(self, prefix: str, module: nn.Module, key: str) -> str:
        """What a key of one of them is called in the checkpoint."""
        name = prefix + canonical_name(module, key)
        return name if self._rename is None else self._rename(name)

    def has_flat_parameters(self) -> bool:
        """Whether any of them is FSDP1's, which has parameters of its own in place of theirs."""
        return any(flat_parameters.are_in(module) for _, module in self.modules)

    def state(self) -> dict[str, Any]:
        """Parameters, buffers and extra state: the very objects, not copies, by their names."""
        found: dict[str, Any] = {}
        for prefix, module in self.modules:
            for name, _, value in self._items(prefix, module):
                if name in found:
                    raise UnsupportedValueError(
                        f"two modules have a {name}; if they are not parts of one model, pass a "
                        "dict of them by name, else give them other names with rename=..."
                    )
                found[name] = value
        return found

    def _items(self, prefix: str, module: nn.Module) -> Iterator[tuple[str, str, Any]]:
        """Name, key in the module's own state dict, and value."""
        if flat_parameters.are_in(module):
            state = flat_parameters.module_state(module)
        else:
            state = module.state_dict(keep_vars=True)
        for key, value in state.items():
            yield self.name(prefix, module, key), key, value

    def followed(self) -> Iterator[str]:
        """Buffers of which those of the first rank count: DDP overwrites them whenever it runs."""
        for prefix, module in self.modules:
            for path, inner in module.named_modules():
                if type(inner).__name__ == "DistributedDataParallel" and inner.broadcast_buffers:
                    group: Any = inner.process_group
                    if torch.distributed.get_rank(group) > 0:
                        yield from self._buffers(prefix, module, path, inner)

    def buffers(self) -> Iterator[str]:
        """The names of all buffers."""
        for prefix, module in self.modules:
            yield from self._buffers(prefix, module, "", module)

    def _buffers(
        self, prefix: str, module: nn.Module, path: str, inner: nn.Module
    ) -> Iterator[str]:
        begin = f"{path}." if path else ""
        for key, buffer in inner.named_buffers(remove_duplicate=False):
            if type(buffer) in (Tensor, nn.Buffer):  # what is sharded, no other rank has
                yield self.name(prefix, module, begin + key)

    def names(self) -> dict[Tensor, list[str]]:
        """Every parameter, and its names: several where it is tied."""
        found: dict[Tensor, list[str]] = {}
        for prefix, module in self.modules:
            for key, parameter in module.named_parameters(remove_duplicate=False):
                found.setdefault(parameter, []).append(self.name(prefix, module, key))
        return found

    def load(self, state: Mapping[str, Any]) -> dict[Tensor, Tensor]:
        """Take back a filled state; which parameters others took the place of.

        Those are parameters that were on the meta device. All others are what they were: their
        elements have been replaced.
        """
        replaced: dict[Tensor, Tensor] = {}
        for prefix, module in self.modules:
            self._load_one(prefix, module, state, replaced)
        return replaced

    def _load_one(
        self,
        prefix: str,
        module: nn.Module,
        state: Mapping[str, Any],
        replaced: dict[Tensor, Tensor],
    ) -> None:
        own = list(self._items(prefix, module))
        filled = {key: state[name] for name, key, _ in own}
        if flat_parameters.are_in(module):
            flat_parameters.load_module(module, filled)
            return
        abstract = {key: v for _, key, v in own if isinstance(v, Tensor) and v.is_meta}
        for key, old in abstract.items():
            filled[key] = _tied(old, filled[key], key, replaced)
        module.load_state_dict(filled, strict=True, assign=bool(abstract))
        left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
        if abstract and left:
            raise UnsupportedValueError(
                f"after loading, buffers that no checkpoint has are still on the meta device: "
                f"{names_text(left)}. Give the module memory first (module.to_empty(device=...)), "
                "fill these, then load"
            )


def yielding(buffer: Tensor) -> ShardedArray:
    """A buffer that is saved only if no other rank saves its own under the same name."""
    made = ShardedArray.from_local(buffer, [0] * buffer.dim(), buffer.shape)
    return replace(made, yields=True)


def _tied(old: Tensor, new: Tensor, key: str, replaced: dict[Tensor, Tensor]) -> Tensor:
    """What takes the place of an abstract tensor: one and the same for all of its names."""
    known = replaced.setdefault(old, new)
    if known is not new and not (new.is_meta or torch.equal(known, new)):
        raise MismatchError(
            f"{key} is tied to another name in the model, but the two are stored with different "
            "contents; untie them"
        )
    return known
