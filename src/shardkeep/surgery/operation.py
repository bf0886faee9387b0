# SPDX-License-Identifier: Apache-2.0
"""`Surgery`: all that is done to the names and tensors of a state, in order.

First `select` and `exclude` choose, by stored names. Then names change: `mapping`, and `rename` for
all others. Then `rules` join and cut, by the new names, one rule after the other. Then `cast`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardkeep.dtypes import can_cast, dtype_name, lookup
from shardkeep.errors import CheckpointError, PlanError
from shardkeep.surgery.patterns import matching
from shardkeep.surgery.pieces import Composed
from shardkeep.surgery.rules import Change, Rule, parse_rule

__all__ = ["Cast", "Operated", "Rename", "Surgery"]

_SHORT = re.compile(r"(bf|f|i|u|c)(\d+)")
_LONG = {"bf": "bfloat", "f": "float", "i": "int", "u": "uint", "c": "complex"}
# The = of a look-ahead or look-behind is not the one that ends the expression.
_EQUALS = re.compile(r"(?<!\(\?)(?<!\(\?<)=")


@dataclass(frozen=True)
class Rename:
    """What a regular expression finds in names, replaced by something else."""

    expression: str
    """As in Python's `re`."""
    replacement: str
    r"""As in `re.sub`: `\1` is the first group."""

    def __str__(self) -> str:
        return f"rename {self.expression}={self.replacement}"

    def apply(self, name: str) -> str | None:
        """The new name; None where nothing is found."""
        new, count = re.subn(self.expression, self.replacement, name)
        return new if count else None


@dataclass(frozen=True)
class Cast:
    """Elements of one type, as elements of another."""

    old: str
    """Which type."""
    new: str
    """What it becomes."""
    names: str = "*"
    """Of which tensors: a glob."""

    def __str__(self) -> str:
        where = "" if self.names == "*" else f"{self.names}:"
        return f"cast {where}{self.old}={self.new}"


@dataclass
class Operated:
    """A state after surgery, still without its elements."""

    tensors: dict[str, Composed]
    """Every name to what it is made of."""
    values: dict[str, str]
    """Every name of a plain value to the one it is stored under."""
    faults: list[str] = field(default_factory=list)
    """What is wrong with the surgery."""

    def check(self) -> None:
        """Raise everything that is wrong as one error."""
        if self.faults:
            count = len(self.faults)
            raise PlanError(
                f"{count} thing{'s' if count > 1 else ''} cannot be done as asked:\n  "
                + "\n  ".join(self.faults)
                + "\nNothing was written. Names and shapes: shardkeep show."
            )


@dataclass(frozen=True)
class Surgery:
    """What to do with stored tensors and values on their way to somewhere else.

    >>> Surgery(rename=[r"^model\\.="], cast=["f32=bf16"]).is_nothing
    False
    """

    select: Sequence[str] = ()
    """Globs: what of all there is; nothing: everything."""
    exclude: Sequence[str] = ()
    """Globs: what not."""
    rename: Sequence[Any] = ()
    """`"REGEX=REPLACEMENT"`, or a pair of the two, applied one after the other."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """Whole names to new ones."""
    rules: Sequence[Any] = ()
    """`"fuse A, B = C @ 0"` and the like, or `Fuse`, `Split`, `Stack`, `Unstack`."""
    cast: Any = ()
    """`"f32=bf16"`, or `"GLOB:f32=bf16"` for some tensors; or a dict of old to new types.

    Elements are rounded. One that the new type does not hold (an integer out of its range, a number
    that would be infinite or NaN) is an `UnsupportedValueError` that names the tensor, when it is
    read."""

    def __post_init__(self) -> None:
        """Read everything that is given as text; a `ValueError` names what cannot be read."""
        for name in ("select", "exclude", "rename", "rules"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise TypeError(f"{name} is {given!r}; give a list of them")
        casts = self.cast.items() if isinstance(self.cast, Mapping) else self.cast
        casts = [casts] if isinstance(casts, str) else casts
        put = object.__setattr__
        put(self, "select", tuple(self.select))
        put(self, "exclude", tuple(self.exclude))
        put(self, "mapping", dict(self.mapping or {}))
        put(self, "rename", tuple(_rename(one) for one in self.rename))
        put(self, "rules", tuple(parse_rule(r) if isinstance(r, str) else r for r in self.rules))
        put(self, "cast", tuple(_cast(one) for one in casts or ()))

    @property
    def is_nothing(self) -> bool:
        """Whether everything stays as it is."""
        asked = (self.select, self.exclude, self.mapping, self.rename, self.rules, self.cast)
        return not any(asked)

    def operate(self, tensors: Mapping[str, Composed], values: Iterable[str]) -> Operated:
        """What becomes of stored tensors and values."""
        kinds = {**dict.fromkeys(tensors, True), **dict.fromkeys(values, False)}
        faults: list[str] = []
        names = _renamed(self, _chosen(self, list(kinds), faults), faults)
        out = Operated(
            {new: tensors[old] for old, new in names.items() if kinds[old]},
            {new: old for old, new in names.items() if not kinds[old]},
            faults,
        )
        for rule in self.rules:
            _apply(rule, out)
        faults += [
            f"a name would be {name!r}, which is not valid Unicode"
            for name in (*out.tensors, *out.values)
            if name not in kinds and not _is_text(name)
        ]
        _cast_all(self.cast, out)
        return out


def _is_text(name: str) -> bool:
    """Whether files can hold it: half of a surrogate pair has no bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _chosen(surgery: Surgery, names: list[str], faults: list[str]) -> list[str]:
    def find(globs: Sequence[str], what: str) -> set[str]:
        found: set[str] = set()
        for glob in globs:
            hit = matching(names, glob)
            if not hit:
                faults.append(f"{what} {glob}: no name matches")
            found.update(hit)
        return found

    selected = find(surgery.select, "select") if surgery.select else set(names)
    left_out = find(surgery.exclude, "exclude")
    kept = [name for name in names if name in selected and name not in left_out]
    if names and not kept and not faults:
        faults.append("select and exclude leave nothing")
    return kept


def _renamed(surgery: Surgery, names: list[str], faults: list[str]) -> dict[str, str]:
    """Old names to new ones."""
    known = set(names)
    faults += [f"mapping: there is no {old}" for old in surgery.mapping if old not in known]
    out = {name: surgery.mapping.get(name, name) for name in names}
    for rename in surgery.rename:
        hit = False
        for old in names:
            new = None if old in surgery.mapping else rename.apply(out[old])
            if new is not None:
                out[old], hit = new, True
        if not hit:
            faults.append(f"{rename}: no name matches")
    taken: dict[str, list[str]] = {}
    for old, new in out.items():
        taken.setdefault(new, []).append(old)
    for new, olds in taken.items():
        if not new and any(olds):
            faults.append(f"{', '.join(filter(None, olds))} would have no name")
        elif len(olds) > 1:
            faults.append(f"{' and '.join(olds)} would have one name, {new}")
    return out


def _apply(rule: Rule, state: Operated) -> None:
    changes: list[Change] = []
    found = False
    for change in rule.changes(state.tensors):
        found = True
        if isinstance(change, str):
            state.faults.append(change)
        else:
            changes.append(change)
    if not found:
        state.faults.append(f"{rule}: no tensor matches")
    gone = Counter(name for change in changes for name in change.old)
    for name, times in gone.items():
        if times > 1:
            state.faults.append(f"{rule}: {name} would be used {times} times")
        state.tensors.pop(name)
    for change in changes:
        for new, made in change.new.items():
            if new in state.tensors or new in state.values:
                state.faults.append(f"{rule}: there is a {new} already")
            state.tensors[new] = made


def _cast_all(casts: Sequence[Cast], state: Operated) -> None:
    """A tensor is cast by the first that fits it."""
    done: set[str] = set()
    for cast in casts:
        hit = False
        if not can_cast(lookup(cast.old), lookup(cast.new), True):
            state.faults.append(f"{cast}: there is no cast between these types")
            continue
        for name in matching(state.tensors, cast.names):
            tensor = state.tensors[name]
            if tensor.dtype == cast.old or name in done:
                hit = True
            if tensor.dtype == cast.old and name not in done:
                done.add(name)
                state.tensors[name] = replace(tensor, dtype=cast.new)
        if not hit:
            state.faults.append(f"{cast}: no tensor of that type matches")


def _rename(given: Any) -> Rename:
    if isinstance(given, Rename):
        return given
    if isinstance(given, str):
        parts = _EQUALS.split(given, maxsplit=1)
        if len(parts) != 2:
            raise ValueError(f"{given!r} is not a rename; write REGEX=REPLACEMENT")
        given = parts
    rename = Rename(*given)
    try:
        compiled = re.compile(rename.expression)
        _check_replacement(compiled, rename.replacement)
    except (re.error, IndexError) as error:
        raise ValueError(f"{rename}: {error}") from error
    return rename


def _check_replacement(expression: re.Pattern[str], replacement: str) -> None:
    """Parse it now, and not at the first name that matches."""
    whole = re.compile(f"(?:{expression.pattern})|", expression.flags)
    whole.sub(replacement, "")


def _cast(given: Any) -> Cast:
    if isinstance(given, Cast):
        return given
    names = "*"
    if isinstance(given, str):
        text = given
        front, _, given = given.rpartition(":")
        names = front or names
        given = given.split("=")
        if len(given) != 2:
            raise ValueError(f"{text!r} is not a cast; write f32=bf16, or GLOB:f32=bf16")
    old, new = given
    try:
        return Cast(_dtype(old), _dtype(new), names)
    except CheckpointError as error:
        raise ValueError(f"cast {old}={new}: {error}") from error


def _dtype(text: object) -> str:
    """A name of an element type, or its short form: f32, bf16, i8, u4, c64."""
    short = _SHORT.fullmatch(text.strip()) if isinstance(text, str) else None
    return dtype_name(f"{_LONG[short[1]]}{short[2]}" if short else text)
