# SPDX-License-Identifier: Apache-2.0
"""What a crash may leave of operations on files: a disk that keeps no more than POSIX says.

An fsync of a file makes its contents durable and not its name; one of a directory makes the names
in it durable and not what they point to. All else may be kept or lost in any combination: each
name that came, went or moved, each page of a write, and the size of a file apart from its bytes.
Only a rename is atomic, also between two directories. What is kept of one name or one range takes
effect in the order in which it was done; so every legal reordering is one of these combinations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardkeep.testing.operations import (
    ROOT,
    ContentChange,
    Enter,
    EntryChange,
    Exchange,
    Mark,
    Move,
    Operation,
    Remove,
    Resize,
    State,
    SyncDirectory,
    SyncFile,
    Truncate,
    Write,
)

__all__ = ["CrashPoint", "Disk", "crash_points"]

PAGE = 4096
PIECES = 4
"""Parts of one write that are kept or lost by themselves, at most."""
PAIRS = 100
"""Pairs of pending changes that are looked at for one prefix, at most."""


def _effects(change: EntryChange) -> list[tuple[int, str, int | None]]:
    """Directory, name, and what it names from then on."""
    match change:
        case Enter():
            return [(change.directory, change.name, change.inode)]
        case Remove():
            return [(change.directory, change.name, None)]
        case Move():
            into = change.directory if change.into is None else change.into
            return [(change.directory, change.old, None), (into, change.new, change.inode)]
        case Exchange():
            return [
                (change.directory, change.name, change.other_inode),
                (change.other, change.other_name, change.inode),
            ]


def _written(data: bytes, changes: Iterable[ContentChange]) -> bytes:
    """A file after some changes; bytes that lie beyond its size are not to be seen."""
    result, size = bytearray(data), len(data)
    for change in changes:
        match change:
            case Resize():
                size = max(size, change.size)
            case Truncate():
                size = change.size
                del result[size:]
            case Write():
                end = change.offset + len(change.data)
                result.extend(bytes(max(0, end - len(result))))
                result[change.offset : end] = change.data
    del result[size:]
    return bytes(result) + bytes(size - len(result))


def _units(change: ContentChange, size: int) -> list[ContentChange]:
    """What a crash may keep of a change to a file of this size: each of these, or not."""
    if not isinstance(change, Write):
        return [change]
    end = change.offset + len(change.data)
    units: list[ContentChange] = [Resize(change.inode, end)] if end > size else []
    first, last = change.offset // PAGE, -(-end // PAGE)
    step = max(1, -(-(last - first) // PIECES))
    cuts = [page * PAGE for page in range(first + step, last, step)]
    if not cuts and len(change.data) > 1:
        cuts = [change.offset + len(change.data) // 2]  # within a page: torn between two sectors
    for low, high in itertools.pairwise([change.offset, *cuts, end]):
        part = change.data[low - change.offset : high - change.offset]
        units.append(Write(change.inode, low, part))
    return units


@dataclass(slots=True)
class _File:
    durable: bytes = b""
    pending: list[ContentChange] = field(default_factory=list)
    size: int = 0

    def change(self, change: ContentChange) -> None:
        self.pending += _units(change, self.size)
        match change:
            case Resize():
                self.size = max(self.size, change.size)
            case Truncate():
                self.size = change.size
            case Write():
                self.size = max(self.size, change.offset + len(change.data))


class Disk:
    """What is durable and what is pending, after some operations."""

    def __init__(self, initial: State) -> None:
        """All of `initial` is durable."""
        self.files: dict[int, _File] = {}
        self._directories: dict[int, dict[str, int]] = {ROOT: {}}
        self._pending: list[EntryChange] = []
        self.count = ROOT + 1
        """The number of what is made next."""
        at = {"": ROOT}
        for path, data in initial.entries.items():
            parent, _, name = path.rpartition("/")
            inode = at[path] = self.count
            self.count += 1
            self._directories[at[parent]][name] = inode
            if data is None:
                self._directories[inode] = {}
            else:
                self.files[inode] = _File(data, size=len(data))

    def apply(self, operation: Operation) -> None:
        """Do what was done."""
        match operation:
            case Enter():
                if operation.made == "file":
                    self.files[operation.inode] = _File()
                elif operation.made == "directory":
                    self._directories[operation.inode] = {}
                self.count = max(self.count, operation.inode + 1)
                self._pending.append(operation)
            case Remove() | Move() | Exchange():
                self._pending.append(operation)
            case Write() | Resize() | Truncate():
                self.files[operation.inode].change(operation)
            case SyncFile():
                file = self.files[operation.inode]
                file.durable, file.pending = _written(file.durable, file.pending), []
            case SyncDirectory():
                self._sync(operation.inode)
            case Mark():
                pass

    def _sync(self, directory: int) -> None:
        """All changes in a directory last; so does, of one that is atomic between two, the rest."""
        chosen: set[int] = set()
        places = [{(d, name) for d, name, _ in _effects(change)} for change in self._pending]
        wanted = {place for touched in places for place in touched if place[0] == directory}
        for at in reversed(range(len(places))):  # what comes later asks for what came before
            touched = places[at]
            if touched & wanted:
                chosen.add(at)
                wanted |= touched
        lasting = [c for at, c in enumerate(self._pending) if at in chosen]
        self._directories = self._changed(lasting)
        self._pending = [c for at, c in enumerate(self._pending) if at not in chosen]

    def _changed(self, changes: Iterable[EntryChange]) -> dict[int, dict[str, int]]:
        result = {inode: dict(names) for inode, names in self._directories.items()}
        for change in changes:
            for directory, name, inode in _effects(change):
                if inode is None:
                    result[directory].pop(name, None)
                else:
                    result[directory][name] = inode
        return result

    def now(self, directory: int) -> dict[str, int]:
        """The names that a running process sees."""
        return self._changed(self._pending)[directory]

    def whole(self) -> State:
        """What a running process sees."""
        return self._state(self._pending, {})

    def _state(
        self, names: Iterable[EntryChange], contents: Mapping[int, Sequence[ContentChange]]
    ) -> State:
        """With these changes of names; files with these changes of contents, or with all."""
        directories = self._changed(names)
        entries: dict[str, bytes | None] = {}

        def walk(directory: int, prefix: str) -> None:
            for name, inode in sorted(directories[directory].items()):
                if inode in self.files:
                    file = self.files[inode]
                    changes = contents.get(inode, file.pending)
                    entries[prefix + name] = _written(file.durable, changes)
                else:
                    entries[prefix + name] = None
                    walk(inode, f"{prefix}{name}/")

        walk(ROOT, "")
        return State(entries)

    # --- crashes

    def crashes(
        self, chance: random.Random, samples: int, *, pairs: bool = False, exhaustive: int = 0
    ) -> Iterator[tuple[str, State]]:
        """What a crash now may leave: of few pending changes all combinations, else a choice."""
        names: list[EntryChange | ContentChange] = list(self._pending)
        units = [unit for file in self.files.values() for unit in file.pending]
        items = [*names, *units]
        for text, kept in _choices(items, len(names), chance, samples, pairs, exhaustive):
            yield text, self._keeping(items, kept)

    def _keeping(
        self, items: Sequence[EntryChange | ContentChange], kept: Collection[int]
    ) -> State:
        names: list[EntryChange] = []
        contents: dict[int, list[ContentChange]] = {
            inode: [] for inode, file in self.files.items() if file.pending
        }
        for at, item in enumerate(items):
            if at in kept:
                if isinstance(item, (Write, Resize, Truncate)):
                    contents[item.inode].append(item)
                else:
                    names.append(item)
        return self._state(names, contents)


def _choices(
    items: Sequence[EntryChange | ContentChange],
    names: int,
    chance: random.Random,
    samples: int,
    pairs: bool,
    exhaustive: int,
) -> Iterator[tuple[str, Collection[int]]]:
    """Which of the pending changes, of which the first are of names, a crash keeps."""
    every = frozenset(range(len(items)))
    if len(items) <= exhaustive:
        for number in range(1 << len(items)):
            kept = {at for at in every if number >> at & 1}
            lost = ", ".join(repr(items[at]) for at in sorted(every - kept))
            yield f"without {lost or 'nothing'}", kept
        return
    yield "all kept", every
    if not items:
        return
    named = frozenset(range(names))
    sized = named | {at for at in every if isinstance(items[at], Resize)}
    yield "all lost", ()
    yield "contents lost", named
    yield "contents zero", sized
    yield "names lost", every - named
    for at in range(len(items)):
        change = items[at]
        yield f"without {change}", every - {at}
        yield f"only {change}", ({at} if at < names else named | {at})
        if at < names:
            yield f"without {change}, contents lost", named - {at}
            yield f"only {change}, contents kept", (every - named) | {at}
    for inode in sorted({c.inode for c in items if isinstance(c, (Write, Resize, Truncate))}):
        its = {at for at in every - named if getattr(items[at], "inode", None) == inode}
        yield f"file {inode} lost", every - its
        yield f"file {inode} zero", every - (its - sized)
    if pairs:
        both = list(itertools.combinations(range(len(items)), 2))
        for one, other in both if len(both) <= PAIRS else chance.sample(both, PAIRS):
            yield f"without {items[one]} and {items[other]}", every - {one, other}
            yield f"only {items[one]} and {items[other]}", {one, other}
    for number in range(samples):
        share = chance.choice((0.2, 0.5, 0.8))
        yield f"sample {number}", {at for at in every if chance.random() < share}


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One thing that may be found after one crash."""

    position: int
    """Operations that were done before it."""
    variant: str
    """What became of what was not yet durable."""
    state: State
    """What is left."""


def crash_points(
    initial: State,
    operations: Sequence[Operation],
    *,
    start: int = 0,
    every: int = 1,
    samples: int = 3,
    seed: int = 0,
    pairs: bool = False,
    exhaustive: int = 0,
) -> Iterator[CrashPoint]:
    """What may be left by a crash after each prefix of at least `start` operations.

    Or after one in so many, with `every`; the last is among them.

    Where at most `exhaustive` changes are pending, every combination of them. Else each of them
    lost alone and kept alone, with `pairs` also two by two, and `samples` random combinations.
    """
    disk, chance = Disk(initial), random.Random(seed)
    for position in range(len(operations) + 1):
        if position:
            disk.apply(operations[position - 1])
        if position >= start and (len(operations) - position) % every == 0:
            found = disk.crashes(chance, samples, pairs=pairs, exhaustive=exhaustive)
            for variant, state in found:
                yield CrashPoint(position, variant, state)
