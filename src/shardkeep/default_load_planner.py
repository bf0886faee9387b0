# SPDX-License-Identifier: Apache-2.0
"""The default load planner: a target matched with what is stored, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from shardkeep import tree, values
from shardkeep.arrays import HostPlaces, Sink, settle_all
from shardkeep.dtypes import Cast, DType, can_cast
from shardkeep.errors import MismatchError
from shardkeep.hints import mismatch_hint
from shardkeep.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from shardkeep.placing import Placing
from shardkeep.planner import LoadPlan, LoadPlanner, Place, ReadItem, ReadItems
from shardkeep.rank_matching import match_per_rank
from shardkeep.reads import plan_reads
from shardkeep.structure import TENSOR, Structure, dotted, key_identity, key_text
from shardkeep.tables import StateColumns
from shardkeep.targets import Filling, Targets

if TYPE_CHECKING:
    from shardkeep.per_rank import PerRank
    from shardkeep.storage import StorageReader

__all__ = ["DefaultLoadPlanner", "mismatch_error"]


class DefaultLoadPlanner(LoadPlanner):
    """Matches a target with what is stored, by name, and finds which bytes go where."""

    def __init__(
        self,
        *,
        strict: bool = True,
        keys: Sequence[str] | None = None,
        optional: Sequence[str] = (),
        cast: Cast = False,
        allow_pickle: bool = False,
        device: object = None,
    ) -> None:
        """See `shardkeep.load` for what each means."""
        if cast not in (False, True, "widen"):
            raise ValueError(f"cast is {cast!r}; use False, 'widen' or True")
        self.strict = strict
        self.keys = [keys] if isinstance(keys, str) else keys
        self.optional = [optional] if isinstance(optional, str) else optional
        self.cast = cast
        self.allow_pickle = allow_pickle
        self.device = device
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.skipped: tuple[str, ...] = ()
        """On the coordinator after the global plan: names that were not filled or not asked for."""

    def set_up_planner(
        self, state_dict: object, metadata: Metadata, place: Place = Place()
    ) -> None:
        """Take the target apart; abstract arrays are allocated once everything fits."""
        self._state = state_dict
        self._metadata = metadata
        self._place = place
        stored = metadata.state_dict_metadata
        if not isinstance(stored, StateColumns):
            raise TypeError("the default load planner needs metadata over columns")
        self._stored = stored
        self._flat = tree.flatten(
            state_dict,
            rank=place.rank,
            world_size=place.world_size,
            keep_whole=True,
            stored_under=partial(_Under, stored, self._asked),
        )
        there = metadata.planner_data
        if there is not None and there.same(self._flat.structure):
            self._flat.structure = there  # whose names are known
        self.results: list[object] = list(self._flat.values)
        self._loaded: list[int] = []

    def _asked(self, name: str) -> bool:
        return self.keys is None or any(fnmatchcase(name, key) for key in self.keys)

    def create_local_plan(self) -> LoadPlan:
        """What this rank wants; what does not fit is noted, and refused by the global plan."""
        names = self._stored_names()
        ranks = self._ranks = match_per_rank(
            self._flat,
            self._metadata,
            self._place,
            self._asked,
            self._is_optional,
            self.allow_pickle,
        )
        mismatched = dict(ranks.mismatched)
        row_of, others = self._stored.tensors.row_of, self._stored.values_table.row_of
        asked = names if self.keys is None else [name for name in names if self._asked(name)]
        wanted = frozenset(asked).difference([names[number] for number in ranks.settled])
        leaves, rows, value_dest = [], [], []
        every = zip(names, map(row_of.get, names), self._flat.adapters, strict=True)
        for number, (name, row, adapter) in enumerate(every):
            if name not in wanted:
                continue
            if adapter is not None and row is not None:
                leaves.append(number)
                rows.append(row)
            elif adapter is not None:
                if name in others:
                    mismatched[name] = "a plain value is stored, the target is an array"
            elif row is not None:
                kind = type(self._flat.values[number]).__name__
                mismatched[name] = f"an array is stored, the target is a {kind}"
            elif name in others:
                value_dest.append(number)
        mismatched |= self._match(names, leaves, rows)
        value_names = [names[number] for number in value_dest]
        return LoadPlan(
            plan_reads(
                self._stored, self._filling.names, self._filling.boxes, value_names, value_dest
            ),
            wanted=wanted | ranks.missing,
            containers=frozenset(_top_containers(self._flat.structure)),
            mismatched=mismatched,
            whole=frozenset(ranks.whole),
            kept=ranks.kept,
        )

    def _is_optional(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self.optional)

    def _match(self, names: list[str], leaves: list[int], rows: list[int]) -> dict[str, str]:
        """Find out what there is to fill of leaves stored in these rows, and what does not fit."""
        flat, stored = self._flat, self._stored.tensors
        targets = Targets.of(
            [names[leaf] for leaf in leaves],
            [flat.values[leaf] for leaf in leaves],
            [flat.adapters[leaf] for leaf in leaves],  # type: ignore[misc]
        )
        misfits = targets.misfits(stored, rows, partial(can_cast, cast=self.cast))
        mismatched = {
            targets.names[at]: self._fault(rows[at], *targets.signature(at)) for at in misfits
        }
        fitting: Sequence[int] = range(len(leaves))
        if misfits:
            fitting = sorted(set(fitting).difference(misfits))
        self._filling = targets.take(fitting).filling(self.device)
        for at, made in self._filling.allocated():
            self.results[leaves[fitting[at]]] = made
        # What was allocated is among the results; what is not a target does not matter.
        self.staging = settle_all(flat.adapters, self.results)
        return mismatched

    def _fault(self, row: int, shape: tuple[int, ...], dtype: DType) -> str:
        """Why a target of this shape and type does not fit a stored tensor."""
        stored_shape, stored = self._stored.tensors.shape(row), self._stored.tensors.dtype(row)
        faults = []
        if stored_shape != shape:
            faults.append(f"stored shape {stored_shape}, target shape {shape}")
        if not can_cast(stored, dtype, self.cast):
            faults.append(f"stored dtype {stored.name}, target dtype {dtype.name}")
        return "; ".join(faults)

    def _stored_names(self) -> list[str]:
        """The stored name of each target leaf: by name, where names are as unique as paths.

        Where a clash bracketed names, on either side, the typed path decides first: `a.8` may be
        another leaf here than there. What no path matches goes by name, if that is still free.
        """
        own, here = self._flat.structure.names, self._flat.structure
        there = self._metadata.planner_data
        if there is None or there is here or not (_has_brackets(here) or _has_brackets(there)):
            return own
        by_path = {
            tuple(map(key_identity, path)): name
            for path, name in zip(there.paths, there.names, strict=True)
        }
        found = [by_path.get(tuple(map(key_identity, path))) for path in here.paths]
        claimed = set(found)
        return [
            exact if exact is not None else name if name not in claimed else _unmatched(path)
            for exact, name, path in zip(found, own, here.paths, strict=True)
        ]

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Strictness over the union of all ranks: one error that lists everything."""
        wanted = frozenset().union(*(plan.wanted for plan in global_plan))
        containers = frozenset().union(*(plan.containers for plan in global_plan))
        mismatched: dict[str, str] = {}
        kept: dict[str, tuple[int, int]] = {}
        for plan in global_plan:
            mismatched |= plan.mismatched
            kept |= plan.kept
        whole = self._names_in(frozenset().union(*(plan.whole for plan in global_plan)))
        left = self._names_in(kept.values())
        tensors, others = self._stored.tensors.row_of, self._stored.values_table.row_of
        absent = sorted(wanted - tensors.keys() - others.keys() - mismatched.keys())
        per_rank = tuple(f"{name}." for name in mismatched)
        missing = [
            n
            for n in absent
            if not self._is_optional(n) and not (per_rank and n.startswith(per_rank))
        ]
        missing += [
            glob
            for glob in self.keys or ()
            if not any(fnmatchcase(name, glob) for name in wanted | whole | left | kept.keys())
        ]  # a slip, not a request
        unexpected, skipped = self._unasked(wanted | whole, left, containers, per_rank)
        self.missing, self.unexpected, self.skipped = (
            tuple(sorted([*absent, *kept])),
            tuple(unexpected),
            tuple(skipped),
        )
        if mismatched or (self.strict and (missing or unexpected)):
            error = mismatch_error(
                missing if self.strict else (), unexpected if self.strict else (), mismatched
            )
            hint = self._container_hint(missing) or mismatch_hint(wanted, missing, unexpected)
            if self.strict and hint is not None:
                error.args = (f"{error}\n{hint}",)
            raise error
        return global_plan

    def _container_hint(self, missing: Iterable[str]) -> str | None:
        """What to write for one of `keys` that is a container, not a name."""
        for key in sorted(set(missing) & set(self.keys or ())):
            stored = (*self._stored.tensors.row_of, *self._stored.values_table.row_of)
            if any(name.startswith(f"{key}.") for name in stored):
                return (
                    f"keys are globs of whole names: pass {key + '.*'!r} for all that is in {key}."
                )
        return None

    def _names_in(self, leaves: Iterable[tuple[int, int]]) -> frozenset[str]:
        """Stored names, by ranges of their numbers."""
        structure = self._metadata.planner_data
        if structure is None:
            return frozenset()
        return frozenset(name for a, b in leaves for name in structure.names[a:b])

    def _unasked(
        self,
        wanted: frozenset[str],
        left: frozenset[str],
        containers: frozenset[str],
        per_rank: tuple[str, ...],
    ) -> tuple[list[str], list[str]]:
        """Stored names that nobody wants: inside what the target has, and elsewhere."""
        unexpected: list[str] = []
        skipped: list[str] = []
        stored = self._stored
        if stored.tensors.row_of.keys() | stored.values_table.row_of.keys() <= wanted:
            return unexpected, skipped
        tops = containers | {top for top, inner in map(_split_top, wanted) if inner}
        for name, top in self._stored_tops():
            if name in wanted or (per_rank and name.startswith(per_rank)):
                continue
            asked = (top is None or top in tops) and name not in left
            (unexpected if asked and self.keys is None else skipped).append(name)
        return unexpected, skipped

    def _stored_tops(self) -> Iterator[tuple[str, str | None]]:
        """Each stored name and the top-level container it is in; a top-level tensor is in none.

        A top-level value is its own: nobody asks for it but by its name.
        """
        structure = self._metadata.planner_data
        assert structure is not None
        for name, path, kind in zip(structure.names, structure.paths, structure.kinds, strict=True):
            if len(path) > 1:
                yield name, _split_top(key_text(path[0]))[0]
            else:
                yield name, None if kind == TENSOR else f"{name} itself"

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Nothing is left to do."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: bytes) -> None:
        """Decode a value; named tuples and Enums take their class from the target."""
        number = read_item.dest_index.index
        assert number is not None
        target = self._flat.values[number]
        decoded = values.like(target, values.decode(value, allow_pickle=self.allow_pickle))
        if number in self._flat.fixed and not values.same(target, decoded):
            name = read_item.dest_index.fqn
            raise mismatch_error((), (), {name: f"stored {decoded!r}, target {target!r}"})
        self.results[number] = decoded
        self._loaded.append(number)

    def check_values(self) -> None:
        """Ask those objects of the target that look at values before tensors are read."""
        if not self._flat.states:
            return
        found = [
            (dotted(path), one)
            for path, one in tree.find_statefuls(
                self._state, keep_whole=True, rank=self._place.rank
            )
            if isinstance(one, tree.CheckingStateful)
        ]
        names = self._flat.structure.names if found else []
        for where, one in found:
            begin = f"{where}." if where else ""
            one.check_values(
                {
                    names[number][len(begin) :]: self.results[number]
                    for number in self._loaded
                    if names[number].startswith(begin)
                }
            )

    def resolve_tensor(self, read_item: ReadItem) -> Sink:
        """The sink of a wanted box."""
        number = read_item.dest_index.index
        assert number is not None
        return self._filling.sink(number)

    def sinks(self, items: ReadItems) -> Callable[[int], Sink]:
        """As they are asked for, unless a subclass has something to say about each."""
        if type(self).resolve_tensor is not DefaultLoadPlanner.resolve_tensor:
            return super().sinks(items)
        return self._filling.sink

    def places(self, items: ReadItems) -> HostPlaces | None:
        """Those of arrays that are filled in place."""
        asked = type(self).resolve_tensor, type(self).sinks
        if asked != (DefaultLoadPlanner.resolve_tensor, DefaultLoadPlanner.sinks):
            return None  # who knows where its sinks lie
        return self._filling.places()

    def filling(self) -> Filling:
        """Everything that will be filled, once there is a local plan."""
        return self._filling

    def release(self) -> None:
        """Let go of the target and of everything made for it; what was missing stays known."""
        del self._state, self._flat, self._filling, self.results, self._ranks
        del self._metadata, self._stored

    def restore(self, reader: StorageReader) -> int:
        """Read what is restored as it was stored, and resize it; the target stays as it is.

        Returns the payload bytes that took.
        """
        self._ranks.restoring.run(reader)
        return self._ranks.restoring.nbytes

    def fill(self) -> Any:
        """Put what was read into the target; returns the filled tree."""
        placing, restored = Placing(self._filling.overlaps), self._ranks.restoring.values
        for number, path in (self._flat.whole or {}).items():
            old = cast("PerRank[Any]", self._flat.values[number]).value
            self.results[number] = (
                placing.put(old, restored[number], path) if number in restored else old
            )
        return tree.fill(self._state, self._flat, self.results, placing.told)


class _Under(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """What is stored under a name, and asked for; by the rest of the names."""

    def __init__(self, stored: StateColumns, asked: Callable[[str], bool], name: str) -> None:
        self._stored = stored
        self._asked = asked
        self._prefix = f"{name}." if name else ""

    def __getitem__(self, rest: str) -> TensorStorageMetadata | BytesStorageMetadata:
        if rest not in self:
            raise KeyError(rest)
        return self._stored[self._prefix + rest]

    def __contains__(self, rest: object) -> bool:
        name = f"{self._prefix}{rest}"
        # Not by looking it up: that would read where its chunks lie.
        tensors, others = self._stored.tensors.row_of, self._stored.values_table.row_of
        return (name in tensors or name in others) and self._asked(name)

    def __iter__(self) -> Iterator[str]:
        begin, after = self._prefix, len(self._prefix)
        for name in self._stored:
            if name.startswith(begin) and self._asked(name):
                yield name[after:]

    def __len__(self) -> int:
        return sum(1 for _ in self)


def mismatch_error(
    missing: Sequence[str], unexpected: Sequence[str], mismatched: Mapping[str, str]
) -> MismatchError:
    """One error that names everything which does not fit."""
    lines = ["the target does not fit the checkpoint; nothing was read"]
    if mismatched:
        lines.append(f"  {len(mismatched)} mismatched:")
        lines += [f"    {name}: {how}" for name, how in sorted(mismatched.items())]
    for what, names in (("missing from the checkpoint", missing), ("unexpected in it", unexpected)):
        if names:
            lines.append(f"  {len(names)} {what}:")
            lines += [f"    {name}" for name in names]
    advice = ["Load into a matching target", "narrow the request with keys=..."]
    if any("stored dtype" in how for how in mismatched.values()):
        advice.append("allow other dtypes with cast=...")
    if missing:
        advice.append("allow names to be absent with optional=...")
    if missing or unexpected:
        advice.append("pass strict=False")
    comma = "," if len(advice) > 2 else ""
    stop = "" if advice[-1].endswith(".") else "."
    lines.append(f"{', '.join(advice[:-1])}{comma} or {advice[-1]}{stop}")
    return MismatchError(
        "\n".join(lines), missing=missing, unexpected=unexpected, mismatched=mismatched
    )


def _unmatched(path: tuple[Any, ...]) -> str:
    """A name for a leaf whose own name is stored for another path: `a["8"]` beside `a.8`."""
    return f"{dotted(path[:-1])}[{path[-1]!r}]"


def _has_brackets(structure: Structure) -> bool:
    return "[" in "".join(structure.names) and any(
        name != dotted(path) for name, path in zip(structure.names, structure.paths, strict=True)
    )


def _split_top(name: str) -> tuple[str, bool]:
    """The first component of a name, and whether there are more."""
    ends = [at for at in (name.find("."), name.find("[", 1)) if at >= 0]
    return (name[: min(ends)], True) if ends else (name, False)


def _top_containers(structure: Structure) -> list[str]:
    root = structure.root
    if type(root) is int or root[1] is None:
        return []
    pairs = zip(root[1], root[2], strict=True)
    return [_split_top(str(key))[0] for key, child in pairs if type(child) is not int]
