# SPDX-License-Identifier: Apache-2.0
"""A training program's state as one object to save and load."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardkeep.errors import MismatchError
from shardkeep.torch.copying import aside, clone, copied, taken_back
from shardkeep.torch.flat_optimizers import FlatOptimizers
from shardkeep.torch.modules import Modules, Rename, yielding
from shardkeep.torch.optimizers import Optimizers, StoredNames
from shardkeep.torch.supported import check_supported
from shardkeep.tree import Stored
from shardkeep.wording import names_text

__all__ = ["AppState"]

T = TypeVar("T")

_Optimizer = torch.optim.Optimizer


class _Given(dict[str, Any]):
    """A state to load into, of which one can know whether it is still there."""

    __slots__ = ("__weakref__",)


class AppState:
    """Model, optimizers and all else that decides what a training program does next.

    Names in the checkpoint are those of the bare model, whatever it is wrapped in; optimizer state
    goes by the names of parameters. A new optimizer can be loaded into, and one that was saved
    before its first step comes back without state. Tensors are filled in place; their types and
    everything else come back as they were. The parts are looked at anew in every save and load.

    `model` is a module; a list of modules that are parts of one model, such as the stages of a
    pipeline on this rank; or a dict of models by name. `optimizers` is one; a list, each with
    parameters of its own; or a dict by name. `schedulers` and `ema` likewise; an EMA may also be
    a dict of tensors. `extra` is a dict of what else there is, and is updated by a load.

    `rename` gives the name in the checkpoint for a name in this process, where those of several
    ranks would be the same: experts, or stages that are numbered from 0 on every rank. It must know
    every name. `keep_options` names options of the optimizers that a load leaves alone.

    Buffers, such as statistics of BatchNorm, must be equal on all ranks, unless a DDP module keeps
    them: then those of its first rank are saved. `buffers_from` is the group to do the same for
    where another kind of data parallelism lets them differ.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
        optimizers: _Optimizer | Sequence[_Optimizer] | Mapping[str, _Optimizer] = (),
        schedulers: Any = (),
        ema: Any = None,
        *,
        extra: MutableMapping[str, Any] | None = None,
        rename: Rename | None = None,
        keep_options: Collection[str] = (),
        buffers_from: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        """Nothing is looked at yet but the kinds of things."""
        for what, named in (
            ("model", model),
            ("optimizers", optimizers),
            ("schedulers", schedulers),
        ):
            _check_names(what, named)
        self._modules = Modules.of(model, "model", rename)
        self.extra: MutableMapping[str, Any] = {} if extra is None else extra
        """What else is saved; after a load, what was loaded."""
        self._keep = (keep_options,) if isinstance(keep_options, str) else tuple(keep_options)
        given = {"": [optimizers]} if isinstance(optimizers, _Optimizer) else _named(optimizers)
        for one in (one for some in given.values() for one in some):
            check_supported(one)
        self._optimizers = {name: self._of(some) for name, some in given.items() if some}
        single = callable(getattr(schedulers, "state_dict", None))
        self._schedulers = {"": schedulers} if single else _numbered(schedulers)
        self._buffers_from = buffers_from
        self._ema = ema
        self._ema_modules: Modules | None = None
        if isinstance(ema, nn.Module) or (_holds(ema, nn.Module) and ema):
            _check_names("ema", ema)
            self._ema_modules = Modules.of(ema, "ema", rename)
        self._given: weakref.ref[_Given] | None = None
        """What the load under way was given to load into; a load that fails lets go of it."""

    def _of(self, optimizers: Sequence[_Optimizer]) -> Optimizers:
        if self._modules.has_flat_parameters():
            return FlatOptimizers(optimizers, self._keep, self._modules)
        return Optimizers(optimizers, self._keep)

    def state_dict(self) -> dict[str, Any]:
        """All of the state: the program's own tensors, by name."""
        return self._collect(self._modules.state(), {})

    def state_to_save(self, world_size: int) -> dict[str, Any]:
        """As `state_dict`, but that buffers yield to those of a rank whose count, if it saves them.

        Names do not tell here who saves what: `rename` may give other names on every rank.
        """
        state = self.state_dict()
        if world_size == 1:
            return state
        group = self._buffers_from
        followed = list(self._modules.followed())
        if group is not None and torch.distributed.get_rank(group) > 0:
            followed = list(self._modules.buffers())
        _yield(state["model"], followed)
        if followed and self._ema_modules is not None:
            _yield(state["ema"], self._ema_modules.buffers())
        return state

    def state_to_load(self, stored: Stored) -> dict[str, Any]:
        """As `state_dict`, with room for all optimizer state that is stored, and for no other.

        The optimizers do not have it before `load_state_dict`.
        """
        self._given = None  # of a load that failed
        names = self._modules.names() if self._optimizers else {}
        optimizers = {}
        for name, one in self._optimizers.items():
            under = _under("optimizer", name)
            optimizers[name] = one.state_to_load(names, StoredNames(stored, f"{under}."))
        state = self._collect(self._modules.state(), optimizers)
        if self._schedulers:
            # Schedulers hold one another's tensors, and those of an optimizer, but not for good.
            state["scheduler"] = copied(state["scheduler"], clone)
        if self._ema is not None and self._ema_modules is None:
            state["ema"] = self._ema_to_load(state["ema"])
        if self.extra:
            state["extra"] = {name: aside(one) for name, one in self.extra.items()}
        given = _Given(state)
        self._given = weakref.ref(given)
        return given

    def check_values(self, values: Mapping[str, object]) -> None:
        """Refuse options and classes of optimizers that do not fit, before tensors are read."""
        for name, one in self._optimizers.items():
            one.check_values(values, f"{_under('optimizer', name)}.param_groups.")

    def _ema_to_load(self, state: Any) -> Any:
        if isinstance(self._ema, Mapping):
            return state
        met: set[int] = set()

        def once(tensor: Tensor) -> Tensor:
            # Not all are copied: an average is as large as the model.
            if id(tensor) in met:
                return clone(tensor)
            met.add(id(tensor))
            return tensor

        return copied(state, once)

    def _collect(self, model: dict[str, Any], optimizers: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = {"model": model}
        if self._optimizers:
            if not optimizers:
                names = self._modules.names()
                optimizers = {name: one.state(names) for name, one in self._optimizers.items()}
            state["optimizer"] = _joined(optimizers)
        if self._schedulers:
            told = {name: dict(one.state_dict()) for name, one in self._schedulers.items()}
            state["scheduler"] = _joined(told)
        if self._ema is not None:
            state["ema"] = self._ema_state()
        if self.extra:
            state["extra"] = dict(self.extra)
        return state

    def _ema_state(self) -> Any:
        if self._ema_modules is not None:
            return self._ema_modules.state()
        if isinstance(self._ema, Mapping):
            return self._ema
        return dict(self._ema.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back such a state, filled.

        It is checked first: should it not fit the optimizers, nothing is changed but the elements
        of tensors that were filled in place.
        """
        given, self._given = self._given, None
        aware = given is not None and given() is state_dict
        self._check_parts(state_dict)
        names = self._modules.names() if self._optimizers else {}
        puts = [
            one.prepare(names, _part(state_dict["optimizer"], name), aware)
            for name, one in self._optimizers.items()
        ]
        replaced = self._modules.load(state_dict["model"])
        self._load_ema(state_dict.get("ema"))
        for put in puts:
            put(replaced)
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(dict(_part(state_dict["scheduler"], name)))
        if self.extra:
            told = state_dict["extra"]
            self.extra.update({name: taken_back(told[name]) for name in told})

    def _check_parts(self, state: Mapping[str, Any]) -> None:
        parts = {
            "model": True,
            "optimizer": self._optimizers,
            "scheduler": self._schedulers,
            "ema": self._ema is not None,
            "extra": self.extra,
        }
        missing = [name for name, is_mine in parts.items() if is_mine and name not in state]
        if missing:
            raise MismatchError(f"the state has no {', '.join(missing)}", missing=missing)

    def _load_ema(self, state: Any) -> None:
        if self._ema_modules is not None:
            self._ema_modules.load(state)
        elif isinstance(self._ema, MutableMapping):
            if state is not self._ema:
                self._ema.update(state)
        elif self._ema is not None:
            self._ema.load_state_dict(state)

    def initialise_optimizers(self) -> None:
        """Give new optimizers the state that their first step would make, only to load into.

        Call it right before a load, never to train: a step counts as taken, so that training goes
        otherwise than with new optimizers. `shardkeep.load` needs no such thing. It is for
        libraries that load only into what is there, such as `torch.distributed.checkpoint.load`.
        """
        names: dict[Tensor, list[str]] = self._modules.names()
        for one in self._optimizers.values():
            one.initialise(names)


def _yield(state: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if name in state:
            state[name] = yielding(state[name])


def _check_names(what: str, given: object) -> None:
    """Refuse names of which something would be lost."""
    names = [str(name) for name in given] if isinstance(given, Mapping) else []
    if "" in names:
        raise ValueError(f"{what} has an empty name; every one in a dict needs a name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} has two of the name {names_text(twice)}: names are strings")


def _named(given: Any) -> dict[str, list[Any]]:
    """Optimizers by name; those in a list have one name together."""
    if isinstance(given, Mapping):
        return {str(name): [one] for name, one in given.items()}
    return {"": list(given)}


def _numbered(given: Mapping[str, T] | Iterable[T]) -> dict[str, T]:
    if isinstance(given, Mapping):
        return {str(name): one for name, one in given.items()}
    return {str(number): one for number, one in enumerate(given)}


def _holds(given: object, kind: type) -> bool:
    """Whether it is a container of only such things."""
    if isinstance(given, Mapping):
        return all(isinstance(one, kind) for one in given.values())
    return isinstance(given, (list, tuple)) and all(isinstance(one, kind) for one in given)


def _under(part: str, name: str) -> str:
    return f"{part}.{name}" if name else part


def _joined(named: dict[str, Any]) -> Any:
    """What goes by names; what has none stands for itself."""
    return named.get("", named)


def _part(joined: Any, name: str) -> Any:
    return joined[name] if name else joined
