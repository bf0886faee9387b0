# SPDX-License-Identifier: Apache-2.0
"""Rules that join and cut tensors, written `VERB OLD = NEW @ DIM`.

    fuse *.q.weight, *.k.weight, *.v.weight = *.qkv.weight @ 0
    split *.qkv.weight = *.q.weight:4096, *.k.weight:1024, *.v.weight:1024 @ 0
    stack *.experts.#.w1 = *.experts.w1 @ 0
    unstack *.experts.w1 = *.experts.#.w1 @ 0

`*` is any text, the same in all names of a rule; `#` is a number from 0 up. `@ 0/8` fuses or splits
within each of 8 equal groups of the dimension, as interleaved heads lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from shardkeep.surgery.patterns import Found, Pattern
from shardkeep.surgery.pieces import Composed

__all__ = ["Change", "Fuse", "Rule", "Split", "Stack", "Unstack", "parse_rule"]

Tensors: TypeAlias = Mapping[str, Composed]

MOST = 1_000_000
"""Tensors that one is taken apart into: each takes some hundred bytes of memory, also in a dry
run, and a shape that is empty elsewhere may claim any number of them."""


@dataclass(frozen=True)
class Change:
    """Some tensors that become others."""

    old: tuple[str, ...]
    """Names that are gone then."""
    new: Mapping[str, Composed]
    """What there is in their place."""


class Rule(Protocol):
    """Joins or cuts tensors."""

    def changes(self, tensors: Tensors) -> Iterator[Change | str]:
        """Everything it does to these; text for what it cannot do."""


@dataclass(frozen=True)
class Fuse:
    """Several tensors, joined along a dimension."""

    old: Sequence[str]
    """Their names, in order."""
    new: str
    """What they become."""
    dim: int = 0
    """Along which dimension."""
    groups: int = 1
    """Into how many equal parts each is cut first; the first parts of all come first, and so on."""

    def __post_init__(self) -> None:
        _check_names(self, self.old, [self.new])

    def __str__(self) -> str:
        return f"fuse {', '.join(self.old)} = {self.new} @ {_where(self.dim, self.groups)}"

    def changes(self, tensors: Tensors) -> Iterator[Change | str]:
        """One for every text that the stars can be."""
        patterns = [Pattern(text) for text in self.old]
        groups: dict[Found, dict[int, str]] = {}
        for at, pattern in enumerate(patterns):
            for found, name in _matches(pattern, tensors):
                groups.setdefault(found, {})[at] = name
        for found, names in groups.items():
            missing = [p.fill(found) for at, p in enumerate(patterns) if at not in names]
            if missing:
                have = ", ".join(names.values())
                yield f"{self}: {have} is there, and {', '.join(missing)} is not"
                continue
            ordered = [names[at] for at in range(len(patterns))]
            made = _fused(self, {name: tensors[name] for name in ordered})
            new = Pattern(self.new).fill(found)
            yield made if isinstance(made, str) else Change(tuple(ordered), {new: made})


def _fused(rule: Fuse, parts: Mapping[str, Composed]) -> Composed | str:
    names, tensors = list(parts), list(parts.values())
    fault = _unlike(names, tensors, rule.dim)
    if fault:
        return f"{rule}: {fault}"
    dim = rule.dim % len(tensors[0].shape)
    for name, tensor in parts.items():
        if tensor.shape[dim] % rule.groups:
            return (
                f"{rule}: {name} has {tensor.shape[dim]} indices in dimension {dim}, which do not "
                f"go into {rule.groups} groups"
            )
    cut = []
    for group in range(rule.groups):
        for tensor in tensors:
            length = tensor.shape[dim] // rule.groups
            cut.append(tensor.narrow(dim, group * length, length))
    return Composed.joined(tensors if rule.groups == 1 else cut, dim)


@dataclass(frozen=True)
class Split:
    """A tensor, cut along a dimension."""

    old: str
    """Its name."""
    new: Sequence[str]
    """What its parts become, in order."""
    sizes: Sequence[int] = ()
    """Indices of each part; nothing: parts of equal size."""
    dim: int = 0
    """Along which dimension."""
    groups: int = 1
    """Of how many equal parts each is cut so; `sizes` are those of all together."""

    def __post_init__(self) -> None:
        _check_names(self, [self.old], self.new)
        if self.sizes and len(self.sizes) != len(self.new):
            raise ValueError(f"{self}: {len(self.new)} names, and sizes for {len(self.sizes)}")
        if any(size < 0 for size in self.sizes):
            raise ValueError(f"{self}: a size is negative")

    def __str__(self) -> str:
        sized = zip(self.new, self.sizes, strict=False)
        parts = [f"{name}:{size}" for name, size in sized] or list(self.new)
        return f"split {self.old} = {', '.join(parts)} @ {_where(self.dim, self.groups)}"

    def changes(self, tensors: Tensors) -> Iterator[Change | str]:
        """One for each tensor of such a name."""
        for found, name in _matches(Pattern(self.old), tensors):
            parts = self._parts(name, tensors[name])
            if isinstance(parts, str):
                yield f"{self}: {parts}"
            else:
                names = [Pattern(text).fill(found) for text in self.new]
                yield _apart(self, name, names, parts)

    def _parts(self, name: str, tensor: Composed) -> list[Composed] | str:
        dim = _dim(self.dim, len(tensor.shape))
        if dim is None:
            return f"{name} has shape {tensor.shape}, and no dimension {self.dim}"
        extent, count = tensor.shape[dim], len(self.new)
        sizes = self.sizes or [extent // count] * count
        if sum(sizes) != extent or any(size % self.groups for size in sizes):
            groups = f" in {self.groups} groups" if self.groups > 1 else ""
            wanted = "+".join(map(str, self.sizes)) if self.sizes else f"{count} equal parts"
            return f"{name} has {extent} indices in dimension {dim}, not {wanted}{groups}"
        out = []
        for at, size in enumerate(sizes):
            first, length = sum(sizes[:at]) // self.groups, size // self.groups
            step = extent // self.groups
            cut = [tensor.narrow(dim, g * step + first, length) for g in range(self.groups)]
            out.append(Composed.joined(cut, dim))
        return out


@dataclass(frozen=True)
class Stack:
    """Numbered tensors, one behind the other along a new dimension."""

    old: str
    """Their names, with `#` for the number."""
    new: str
    """What they become."""
    dim: int = 0
    """The new dimension."""

    def __post_init__(self) -> None:
        _check_names(self, [self.old], [self.new], numbered_old=True)

    def __str__(self) -> str:
        return f"stack {self.old} = {self.new} @ {self.dim}"

    def changes(self, tensors: Tensors) -> Iterator[Change | str]:
        """One for every text that the stars can be."""
        groups: dict[tuple[str, ...], dict[int, str]] = {}
        for found, name in _matches(Pattern(self.old), tensors):
            groups.setdefault(found.texts, {})[found.number] = name
        for texts, names in groups.items():
            if max(names) >= len(names):
                missing = next(number for number in range(len(names)) if number not in names)
                gap = Pattern(self.old).fill(Found(texts, missing))
                yield f"{self}: {gap} is missing, and {names[max(names)]} is there"
                continue
            ordered = [names[number] for number in range(len(names))]
            made = self._stacked({name: tensors[name] for name in ordered})
            new = Pattern(self.new).fill(Found(texts))
            yield made if isinstance(made, str) else Change(tuple(ordered), {new: made})

    def _stacked(self, parts: Mapping[str, Composed]) -> Composed | str:
        names, tensors = list(parts), list(parts.values())
        dim = _dim(self.dim, len(tensors[0].shape) + 1)
        if dim is None:
            return f"{self}: {names[0]} has shape {tensors[0].shape}; there is no such dimension"
        fault = _unlike(names, tensors, None)
        if fault:
            return f"{self}: {fault}"
        return Composed.joined([tensor.inserted(dim) for tensor in tensors], dim)


@dataclass(frozen=True)
class Unstack:
    """A tensor, taken apart index by index along a dimension."""

    old: str
    """Its name."""
    new: str
    """What its slices become, with `#` for the index."""
    dim: int = 0
    """Along which dimension; the slices do not have it."""

    def __post_init__(self) -> None:
        _check_names(self, [self.old], [self.new], numbered_new=True)

    def __str__(self) -> str:
        return f"unstack {self.old} = {self.new} @ {self.dim}"

    def changes(self, tensors: Tensors) -> Iterator[Change | str]:
        """One for each tensor of such a name."""
        for found, name in _matches(Pattern(self.old), tensors):
            tensor = tensors[name]
            dim = _dim(self.dim, len(tensor.shape))
            if dim is None:
                yield f"{self}: {name} has shape {tensor.shape}, and no dimension {self.dim}"
                continue
            count = tensor.shape[dim]
            if not 0 < count <= MOST:
                wanted = f"there can be up to {MOST:,}" if count else "nothing would be left of it"
                yield f"{self}: {name} has {count or 'no'} indices in dimension {dim}; {wanted}"
                continue
            new = Pattern(self.new)
            names = [new.fill(Found(found.texts, at)) for at in range(count)]
            yield _apart(self, name, names, tensor.apart(dim))


def _apart(rule: object, name: str, names: list[str], parts: list[Composed]) -> Change | str:
    if len(set(names)) < len(names):
        return f"{rule}: {name} would become {names[0]} more than once"
    return Change((name,), dict(zip(names, parts, strict=True)))


def _matches(pattern: Pattern, tensors: Tensors) -> Iterator[tuple[Found, str]]:
    for name in tensors:
        found = pattern.match(name)
        if found is not None:
            yield found, name


def _where(dim: int, groups: int) -> str:
    return f"{dim}/{groups}" if groups > 1 else str(dim)


def _dim(dim: int, ndim: int) -> int | None:
    return dim % ndim if -ndim <= dim < ndim else None


def _unlike(names: Sequence[str], tensors: Sequence[Composed], dim: int | None) -> str:
    """Why tensors cannot be joined along a dimension, or stacked; empty if they can."""
    first = tensors[0]
    if dim is not None and _dim(dim, len(first.shape)) is None:
        return f"{names[0]} has shape {first.shape}, and no dimension {dim}"
    at = None if dim is None else dim % len(first.shape)
    for name, other in zip(names, tensors, strict=True):
        if other.dtype != first.dtype:
            return f"{names[0]} is {first.dtype} and {name} is {other.dtype}"
        same = len(other.shape) == len(first.shape) and all(
            a == b for d, (a, b) in enumerate(zip(first.shape, other.shape, strict=True)) if d != at
        )
        if not same:
            return f"{names[0]} has shape {first.shape} and {name} {other.shape}"
    return ""


def _check_names(
    rule: object,
    old: Sequence[str],
    new: Sequence[str],
    numbered_old: bool = False,
    numbered_new: bool = False,
) -> None:
    """The holes of all names must be the same, so that each says which text goes where."""
    patterns = [Pattern(text) for text in (*old, *new)]
    if not old or not new or not all(pattern.text for pattern in patterns):
        raise ValueError(f"{rule}: a name is missing")
    if len(set(old)) < len(old) or len(set(new)) < len(new):
        raise ValueError(f"{rule}: a name is there twice")
    if len({pattern.stars for pattern in patterns}) > 1:
        raise ValueError(f"{rule}: all names need the same number of *")
    for names, numbered in ((old, numbered_old), (new, numbered_new)):
        for text in names:
            if Pattern(text).numbers != int(numbered):
                needs = "needs one #, for the number" if numbered else "cannot have a #"
                raise ValueError(f"{rule}: {text} {needs}")
    if getattr(rule, "groups", 1) < 1:
        raise ValueError(f"{rule}: there must be at least one group")


_RULE = re.compile(r"(\w+)\s+(.*?)\s*=\s*(.*?)(?:\s*@\s*(-?\d+)(?:\s*/\s*(\d+))?)?\s*", re.DOTALL)
_SIZED = re.compile(r"(.*):(\d+)", re.DOTALL)


def parse_rule(text: str) -> Rule:
    """A rule as it is written.

    >>> parse_rule("fuse *.q, *.k = *.qk @ 0")
    Fuse(old=('*.q', '*.k'), new='*.qk', dim=0, groups=1)
    >>> parse_rule("split *.qk = *.q:6, *.k:2")
    Split(old='*.qk', new=('*.q', '*.k'), sizes=(6, 2), dim=0, groups=1)
    """
    found = _RULE.fullmatch(text.strip())
    verbs: dict[str, Callable[[list[str], list[str], int, int], Rule]] = {
        "fuse": lambda old, new, dim, groups: Fuse(tuple(old), _one(new, text), dim, groups),
        "split": lambda old, new, dim, groups: _split(_one(old, text), new, dim, groups, text),
        "stack": lambda old, new, dim, groups: Stack(_one(old, text), _one(new, text), dim),
        "unstack": lambda old, new, dim, groups: Unstack(_one(old, text), _one(new, text), dim),
    }
    if found is None or found[1] not in verbs or re.search(r"\s@", found[2] + found[3]):
        raise ValueError(
            f"{text!r} is not a rule; write 'fuse A, B = C @ 0', 'split C = A:2, B:4 @ 0', "
            "'stack A.# = B @ 0' or 'unstack B = A.# @ 0'"
        )
    verb, old, new, dim, groups = found.groups()
    if groups and verb in ("stack", "unstack"):
        raise ValueError(f"{text!r}: only fuse and split have groups")
    return verbs[verb](_names(old), _names(new), int(dim or 0), int(groups or 1))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _one(names: list[str], text: str) -> str:
    if len(names) != 1:
        raise ValueError(f"{text!r}: there must be one name on the one side of the =")
    return names[0]


def _split(old: str, new: list[str], dim: int, groups: int, text: str) -> Split:
    sized = [_SIZED.fullmatch(name) for name in new]
    if any(sized) and not all(sized):
        raise ValueError(f"{text!r}: give all sizes, or none for equal parts")
    names = [found[1] if found else name for found, name in zip(sized, new, strict=True)]
    return Split(old, tuple(names), tuple(int(f[2]) for f in sized if f), dim, groups)
