# SPDX-License-Identifier: Apache-2.0
"""What optimizers keep, by the names of parameters instead of their numbers.

    state.<parameter>.<key>              what is kept of it: moments, a step
    param_groups.<parameter>.options     the options of the group it is in, as pairs
    param_groups.<parameter>.state       which keys are kept of it
    param_groups.<parameter>.class       the class of its optimizer, and those it derives from

Options are told per parameter, because how parameters are grouped is this process's business: a
stage of a pipeline has only some of them, and another program may group them otherwise.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardkeep.errors import MismatchError, UnsupportedValueError
from shardkeep.torch.first_steps import Kept, first_states
from shardkeep.torch.options import (
    OptionsOfGroups,
    OptionsToLoad,
    apply_options,
    by_name,
    differing,
    same,
)
from shardkeep.torch.supported import check_state, class_names, is_akin
from shardkeep.tree import Stored
from shardkeep.wording import names_text

__all__ = ["Optimizers", "Owned", "StoredNames", "on_its_device"]


@dataclass(frozen=True, slots=True)
class Owned:
    """A named parameter in the hands of an optimizer."""

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    key: Any
    """The parameter itself; where it lies in a flat one, its name there."""
    names: Sequence[str]
    """Several where it is tied; it is saved under the first."""
    kept: Kept
    """What the optimizer keeps of it."""


class StoredNames:
    """Names that are stored, and quickly those under one of them."""

    def __init__(self, stored: Stored, under: str) -> None:
        """Those that begin so, without that beginning."""
        self._stored = stored
        self._under = under
        self._names = sorted(name[len(under) :] for name in stored if name.startswith(under))

    def __contains__(self, name: str) -> bool:
        at = bisect.bisect_left(self._names, name)
        return at < len(self._names) and self._names[at] == name

    def below(self, name: str) -> Stored:
        """What is stored below a name; by the rest of the names."""
        begin = f"{name}."
        rest = []
        for at in range(bisect.bisect_left(self._names, begin), len(self._names)):
            if not self._names[at].startswith(begin):
                break
            rest.append(self._names[at][len(begin) :])
        return _Below(self._stored, self._under + begin, rest)


class _Below(Mapping[str, Any]):
    """Looked up when somebody looks: mostly only whether there is anything."""

    def __init__(self, stored: Stored, begin: str, rest: list[str]) -> None:
        self._stored = stored
        self._begin = begin
        self._rest = rest

    def __getitem__(self, name: str) -> Any:
        return self._stored[self._begin + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rest)

    def __len__(self) -> int:
        return len(self._rest)


class Optimizers:
    """Optimizers that share one space of names, each parameter being in the hands of one."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], keep_options: Collection[str] = ()
    ) -> None:
        """`keep_options` names those that stay what this program made them."""
        self.optimizers = optimizers
        self._keep = keep_options
        self._asked: list[Owned] | None = None
        """The parameters that the load under way is for."""

    def owned(self, names: Mapping[Tensor, Sequence[str]]) -> list[Owned]:
        """Every parameter of every group."""
        found: dict[Tensor, Owned] = {}
        for optimizer in self.optimizers:
            check_state(optimizer)
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if parameter not in names:
                        raise UnsupportedValueError(
                            f"group {number} of {type(optimizer).__qualname__} has a parameter of "
                            f"shape {tuple(parameter.shape)} that is in none of the models; pass "
                            "the model it belongs to as well"
                        )
                    if parameter in found:
                        raise UnsupportedValueError(
                            f"two optimizers have the parameter {names[parameter][0]}; pass a dict "
                            "of optimizers by name"
                        )
                    kept = optimizer.state.get(parameter) or {}
                    found[parameter] = Owned(optimizer, group, parameter, names[parameter], kept)
        return list(found.values())

    def state(self, names: Mapping[Tensor, Sequence[str]]) -> dict[str, Any]:
        """What is kept now: nothing of parameters that have not been stepped."""
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        options = OptionsOfGroups()
        for one in self.owned(names):
            if one.kept:
                state[one.names[0]] = dict(one.kept)
            told = options.of(one.group, one.kept)
            groups[one.names[0]] = {**told, "class": class_names(one.optimizer)}
        return {"state": state, "param_groups": groups}

    def state_to_load(
        self, names: Mapping[Tensor, Sequence[str]], stored: StoredNames
    ) -> dict[str, Any]:
        """What to load into, for what is stored: nothing is kept of a parameter that had nothing.

        A parameter whose options are not stored is left alone, and so reported as missing.
        """
        state: dict[str, Any] = {}
        groups: dict[str, Any] = {}
        options = OptionsToLoad()
        self._asked = None  # of a load that failed
        owned = self.owned(names)
        there = {
            one.key: [n for n in one.names if f"param_groups.{n}.options" in stored]
            for one in owned
        }
        below = {n: stored.below(f"state.{n}") for found in there.values() for n in found}
        made = self._first_states(
            {
                one.key: (one, next(below[n] for n in there[one.key] if below[n]))
                for one in owned
                if not one.kept and any(below[n] for n in there[one.key])
            }
        )
        for one in owned:
            kept = one.kept or made.get(one.key, {})
            for name in there[one.key] or one.names[:1]:
                groups[name] = options.of(one.group, kept)
                if f"param_groups.{name}.class" in stored:  # not so in older checkpoints
                    groups[name]["class"] = class_names(one.optimizer)
                if below.get(name):
                    state[name] = dict(kept)
        self._asked = [one for one in owned if there[one.key]]
        return {"state": state, "param_groups": groups}

    def _first_states(self, empty: Mapping[Any, tuple[Owned, Stored]]) -> dict[Any, Kept]:
        """What a first step would have kept of parameters of which nothing is kept yet."""
        made: dict[Any, Kept] = {}
        for optimizer in self.optimizers:
            mine = {key: there for key, (one, there) in empty.items() if one.optimizer is optimizer}
            if mine:
                made |= first_states(optimizer, mine)
        return made

    def initialise(self, names: Mapping[Tensor, Sequence[str]]) -> None:
        """Have everything kept that a first step of all trainable parameters would."""
        nothing: Stored = {}
        owned = {one.key: one for one in self.owned(names)}
        empty = {k: (o, nothing) for k, o in owned.items() if not o.kept and k.requires_grad}
        for parameter, kept in self._first_states(empty).items():
            if kept:
                owned[parameter].optimizer.state[parameter] = kept

    def check_values(self, values: Mapping[str, Any], under: str) -> None:
        """Refuse what `prepare` would, as far as plain values tell; `under` begins their names."""
        faults: list[MismatchError] = []
        first: dict[int, tuple[str, dict[str, Any]]] = {}
        for one in self._asked or ():
            for name in one.names:
                told = {
                    key: values[f"{under}{name}.{key}"]
                    for key in ("options", "class")
                    if f"{under}{name}.{key}" in values
                }
                if "options" not in told:
                    continue
                try:
                    _check_class(name, told.get("class", ()), class_names(one.optimizer))
                except MismatchError as fault:
                    faults.append(fault)
                mine = by_name(told, self._keep)
                other, theirs = first.setdefault(id(one.group), (name, mine))
                if not same(theirs, mine):
                    faults.append(differing(other, theirs, name, mine))
        if faults:
            raise _all_of(faults)

    def prepare(
        self, names: Mapping[Tensor, Sequence[str]], filled: Mapping[str, Any], aware: bool
    ) -> Callable[[Mapping[Tensor, Tensor]], None]:
        """Check a filled state; what is returned puts it in place, and does not stop half-way.

        `aware` says whether the state is one that `state_to_load` gave. Parameters that others
        took the place of meanwhile are for the function to be told.
        """
        states: list[tuple[Owned, Kept]] = []
        loaded: dict[int, tuple[dict[str, Any], dict[str, Any], str]] = {}
        asked, self._asked = self._asked, None
        for one in asked if aware and asked is not None else self.owned(names):
            name = next((name for name in one.names if name in filled["param_groups"]), None)
            if name is None:
                raise MismatchError(
                    f"the state has no options of {one.names[0]}", missing=[one.names[0]]
                )
            told = filled["param_groups"][name]
            kept = dict(filled["state"].get(name) or {})
            _check_class(name, told.get("class", ()), class_names(one.optimizer))
            _check_keys(name, told["state"], kept)
            states.append((one, kept))
            _, first, first_name = loaded.setdefault(id(one.group), (one.group, told, name))
            mine, theirs = by_name(first, self._keep), by_name(told, self._keep)
            if first is not told and not same(mine, theirs):
                raise differing(first_name, mine, name, theirs)
        options = [(group, told) for group, told, _ in loaded.values()]
        return lambda replaced: self._put(states, options, replaced)

    def _put(
        self,
        states: Sequence[tuple[Owned, Kept]],
        options: Sequence[tuple[dict[str, Any], Mapping[str, Any]]],
        replaced: Mapping[Tensor, Tensor],
    ) -> None:
        filled: dict[Tensor, Any] = {}
        for group, told in options:
            apply_options(group, told, self._keep, filled)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["params"] = [replaced.get(p, p) for p in group["params"]]
        self._put_states(states, replaced)
        for optimizer in self.optimizers:
            # What torch does after a load: it completes what older versions did not keep.
            state = {"state": optimizer.state, "param_groups": optimizer.param_groups}
            optimizer.__setstate__(state)

    def _put_states(
        self, states: Sequence[tuple[Owned, Kept]], replaced: Mapping[Tensor, Tensor]
    ) -> None:
        for one, kept in states:
            one.optimizer.state.pop(one.key, None)
            parameter = replaced.get(one.key, one.key)
            if kept:
                one.optimizer.state[parameter] = on_its_device(one.group, parameter, kept)


def _check_class(name: str, stored: Sequence[str], mine: Sequence[str]) -> None:
    if not is_akin(stored, mine):
        raise MismatchError(
            f"{name} was in the hands of {stored[0]} when it was saved, now it is in those of "
            f"{mine[0]}, which would make something else of its state and options. Load with the "
            "same kind of optimizer, or only the model: AppState(model), or keys=['model.*']",
            mismatched={name: f"{stored[0]} stored, {mine[0]} here"},
        )


def _all_of(faults: Sequence[MismatchError]) -> MismatchError:
    """One error for all, with the words of the first."""
    mismatched = {name: how for fault in faults for name, how in fault.mismatched.items()}
    more = [name for name in mismatched if name not in faults[0].mismatched]
    also = f". So it is with {names_text(more)}" if more else ""
    return MismatchError(f"{faults[0]}{also}", mismatched=mismatched)


def _check_keys(name: str, told: Sequence[str], kept: Kept) -> None:
    found = sorted(map(str, kept))
    if found != list(told):
        raise MismatchError(
            f"the optimizer kept {names_text(list(told)) or 'nothing'} of {name} when it was "
            f"saved; loaded was {names_text(found) or 'nothing'}. Load with shardkeep.load, or "
            "call initialise_optimizers() before another library loads into this AppState",
            mismatched={name: "optimizer state"},
        )


def on_its_device(group: Mapping[str, Any], parameter: Tensor, kept: Kept) -> Kept:
    """Steps are counted on the device only by optimizers that read them there."""
    step = kept.get("step")
    if type(step) is Tensor and "capturable" in group and not parameter.is_meta:
        there = bool(group["capturable"] or group.get("fused"))
        kept["step"] = step.to(parameter.device if there else "cpu")
    return kept
