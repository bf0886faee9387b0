# SPDX-License-Identifier: Apache-2.0
"""What was saved per rank, read as it was stored: a rank's own, or all of it for a `resize`.

A target says where such a value goes, not what it looks like. So it is built from the stored
structure, in memory of its own, before any array of the target is touched: a `resize` that fails
leaves the target as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, overload

import numpy as np

from shardkeep import values
from shardkeep.arrays import HostSink, Sink, adapter_named
from shardkeep.columns import Boxes
from shardkeep.dtypes import DType
from shardkeep.errors import CheckpointError, MismatchError
from shardkeep.metadata import ChunkStorageMetadata, Metadata
from shardkeep.per_rank import PerRank, Resize
from shardkeep.placing import untold
from shardkeep.planner import LoadPlan, LoadPlanner, Place, ReadItem
from shardkeep.reads import plan_reads
from shardkeep.storage import StorageReader
from shardkeep.structure import Node, Path, Structure, dotted, key_identity
from shardkeep.tables import StateColumns
from shardkeep.tree import is_split_mapping

__all__ = ["Restoring", "SavedRanks", "find_saved_ranks"]


@dataclass(frozen=True, slots=True)
class SavedRanks:
    """What ranks have saved at one place, each its own."""

    path: Path
    """The place."""
    world_size: int
    """How many ranks there were."""
    ranks: tuple[int, ...]
    """Those that saved something here, in order."""
    nodes: tuple[Node, ...]
    """What each saved."""
    leaves: tuple[range, ...]
    """The numbers of its leaves in the stored structure."""

    @property
    def span(self) -> tuple[int, int]:
        """All leaves: the first, and past the last."""
        return (self.leaves[0].start, self.leaves[-1].stop) if self.leaves else (0, 0)


def find_saved_ranks(root: Node) -> dict[tuple[object, ...], SavedRanks]:
    """The outermost per-rank containers of a structure, by the identities of their paths."""
    found: dict[tuple[object, ...], SavedRanks] = {}

    def walk(node: Node, path: Path, at: int) -> int:
        kind, keys, children, extra = node
        if kind == "per_rank":
            ends = list(accumulate(map(_count, children), initial=at))
            ranges = map(range, ends, ends[1:])
            told = sorted(zip(keys, children, ranges, strict=True), key=lambda one: one[0])
            ranks, nodes, leaves = zip(*told, strict=True) if told else ((), (), ())
            found[tuple(map(key_identity, path))] = SavedRanks(path, extra, ranks, nodes, leaves)
            return ends[-1]
        for number, child in enumerate(children):
            if type(child) is int:
                at += 1
            else:
                at = walk(child, (*path, number if keys is None else keys[number]), at)
        return at

    if type(root) is not int:
        walk(root, (), 0)
    return found


def _count(node: Node) -> int:
    """How many leaves."""
    return 1 if type(node) is int else sum(map(_count, node[2]))


def _kinds(node: Node) -> Iterator[str]:
    """Of all containers."""
    if type(node) is not int:
        yield node[0]
        for child in node[2]:
            yield from _kinds(child)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One `PerRank` of the target."""

    name: str
    target: PerRank[Any]
    saved: SavedRanks
    package: str


@dataclass
class Restoring:
    """The values of a target that are restored as they were stored."""

    metadata: Metadata
    """What is stored."""
    place: Place
    """Who asks."""
    allow_pickle: bool
    """Whether pickled values are read."""
    values: dict[int, object] = field(default_factory=dict)
    """After `run`: what goes into the target, by the number of the leaf there."""
    nbytes: int = 0
    """After `run`: elements read, in bytes."""
    _wanted: dict[int, _Wanted] = field(default_factory=dict)

    def want(
        self, number: int, target: PerRank[Any], saved: SavedRanks, package: str
    ) -> str | None:
        """Restore leaf `number` of the target, with arrays of that library; or why it cannot be."""
        kinds = {kind for node in saved.nodes for kind in _kinds(node)}
        if "per_rank" in kinds:
            return "a PerRank within a PerRank has no resize; take one of them away"
        if "parts" in kinds:
            return (
                "a tensor of a class of its own is stored; a PerRank with resize holds plain "
                "tensors and values"
            )
        self._wanted[number] = _Wanted(dotted(saved.path), target, saved, package)
        return None

    def run(self, reader: StorageReader) -> None:
        """Read, and ask each `resize`, in the order of names; changes nothing in the target."""
        for number, one in sorted(self._wanted.items(), key=lambda item: item[1].name):
            self.values[number] = self._restored(one, reader)

    def _restored(self, one: _Wanted, reader: StorageReader) -> object:
        place, saved = self.place, one.saved

        def read(which: Sequence[int]) -> list[Any]:
            return self._read(one, which, reader)

        if saved.world_size == place.world_size:
            own = read([saved.ranks.index(place.rank)])[0]
            if left := untold(one.target.value, own):
                raise _mismatch(one, f"what was saved has no state for {', '.join(left)}")
            return own
        resize, given = one.target.resize, _Values(len(saved.ranks), read)
        assert resize is not None
        try:
            made = resize(given, place.rank, place.world_size)
            _check_made(one.target.value, made)
        except CheckpointError:
            raise  # of reading
        except Exception as error:
            raise _refused(one, resize, place.world_size, error) from error
        finally:
            given.close()
        return made

    def _read(self, one: _Wanted, which: Sequence[int], reader: StorageReader) -> list[Any]:
        """What some ranks saved, by their place among those that did."""
        saved = one.saved
        structure, stored = self.metadata.planner_data, self.metadata.state_dict_metadata
        assert structure is not None
        assert isinstance(stored, StateColumns)
        names = [structure.names[leaf] for at in which for leaf in saved.leaves[at]]
        leaves = _Leaves(stored, names, one.package, self.allow_pickle)
        plan = reader.prepare_local_plan(leaves.create_local_plan())
        reader.read_bytes(plan, leaves)
        self.nbytes += reader.read_data(plan, leaves)
        found = iter(leaves.results)
        return [Structure(saved.nodes[at]).build(lambda _: next(found)) for at in which]


def _refused(one: _Wanted, resize: Resize, world_size: int, error: Exception) -> MismatchError:
    called = getattr(resize, "__qualname__", None) or type(resize).__qualname__
    return _mismatch(
        one,
        f"saved per rank by {one.saved.world_size} ranks, loading on {world_size}; its resize, "
        f"{called}, gave an error: {type(error).__name__}: {error}",
        "Give it another resize=, or leave it out with keys=...",
    )


def _mismatch(one: _Wanted, how: str, then: str = "Leave it out with keys=...") -> MismatchError:
    return MismatchError(
        f"{one.name}: {how}\nNothing was changed in the target. {then}", mismatched={one.name: how}
    )


def _check_made(target: object, made: object) -> None:
    """A function that forgot its `return` is found here, not by the program that goes on."""
    if is_split_mapping(target) and not isinstance(made, Mapping):
        raise TypeError(f"it returned a {type(made).__qualname__} where the target has a dict")
    if made is None and target is not None:
        raise TypeError("it returned None")
    if left := untold(target, made):
        raise TypeError(f"it returned no state for {', '.join(left)}")


class _Values(Sequence[Any]):
    """What ranks have saved, read when somebody looks: at one, or at all in one go."""

    def __init__(self, count: int, read: Callable[[Sequence[int]], list[Any]]) -> None:
        self._count = count
        self._read: Callable[[Sequence[int]], list[Any]] | None = read
        self._known: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        which = range(self._count)[index]
        if isinstance(which, range):
            return self._all(which)
        return self._all([which])[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all(range(self._count)))

    def _all(self, which: Sequence[int]) -> list[Any]:
        new = [at for at in which if at not in self._known]
        if new:
            if self._read is None:
                raise RuntimeError("resize has ended; look at its values before")
            self._known.update(zip(new, self._read(new), strict=True))
        return [self._known[at] for at in which]

    def close(self) -> None:
        self._read = None


class _Leaves(LoadPlanner):
    """Reads whole tensors and values, by name, into memory of their own."""

    def __init__(
        self, stored: StateColumns, names: Sequence[str], package: str, allow_pickle: bool
    ) -> None:
        self._stored = stored
        self._names = names
        self._package = package
        self._allow_pickle = allow_pickle
        self.results: list[Any] = [None] * len(names)

    def set_up_planner(
        self, state_dict: object, metadata: Metadata, place: Place = Place()
    ) -> None:
        """There is no target."""

    def create_local_plan(self) -> LoadPlan:
        tensors = self._stored.tensors
        self._sinks: list[Sink] = []
        names, boxes = [], []
        for at, name in enumerate(self._names):
            row = tensors.row_of.get(name)
            if row is None:
                continue
            shape, dtype = tensors.shape(row), tensors.dtype(row)
            bits = np.empty(shape, dtype.bits())
            self.results[at] = self._array(bits, dtype)
            if bits.size:
                names.append(name)
                boxes.append(ChunkStorageMetadata((0,) * len(shape), shape))
                self._sinks.append(HostSink(bits, dtype))
        others = [at for at, name in enumerate(self._names) if name not in tensors.row_of]
        value_names = [self._names[at] for at in others]
        return LoadPlan(plan_reads(self._stored, names, Boxes.of(boxes), value_names, others))

    def _array(self, bits: np.ndarray[Any, Any], dtype: DType) -> object:
        if self._package == "numpy":
            return bits.view(dtype.to_numpy())
        return adapter_named(self._package).from_numpy(bits, dtype)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: bytes) -> None:
        number = read_item.dest_index.index
        assert number is not None
        self.results[number] = values.decode(value, allow_pickle=self._allow_pickle)

    def resolve_tensor(self, read_item: ReadItem) -> Sink:
        number = read_item.dest_index.index
        assert number is not None
        return self._sinks[number]
