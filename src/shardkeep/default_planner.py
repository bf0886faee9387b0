# SPDX-License-Identifier: Apache-2.0
"""The default save planner: what a nested state means in boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from shardkeep import tree, values
from shardkeep.arrays import HostSource, Source, settle_all
from shardkeep.columns import Boxes, Ints, order_by
from shardkeep.dtypes import lookup
from shardkeep.global_plan import join_plans
from shardkeep.holding import Holding, Look
from shardkeep.memory import Addresses, Spans
from shardkeep.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from shardkeep.planner import (
    BytesWriteData,
    Place,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItems,
)
from shardkeep.sharing import Shared
from shardkeep.tables import ChunkTable, StateColumns

__all__ = ["CheckReplicas", "DefaultSavePlanner"]

CheckReplicas: TypeAlias = Literal["sample", "full", "off"]

FULL_DIGEST_BYTES = 1 << 20
SAMPLE_BYTES = 64 << 10
_UNIT = 1 << 20


class DefaultSavePlanner(SavePlanner):
    """Takes any nested state apart; joins the plans of all ranks as columns."""

    def __init__(
        self, *, check_replicas: CheckReplicas = "sample", allow_pickle: bool = False
    ) -> None:
        """`check_replicas` says how plain tensors under one name on several ranks are compared."""
        if check_replicas not in ("sample", "full", "off"):
            raise ValueError(f"check_replicas is {check_replicas!r}; use 'sample', 'full' or 'off'")
        self.check_replicas = check_replicas
        self.allow_pickle = allow_pickle
        self.waits = True
        """Whether to wait for devices before planning; else what this thread copies comes after."""
        self._pickled = False
        self.renamed: list[dict[int, str]] = []
        """On the coordinator after the global plan: names that changed, by rank and leaf."""
        self.shared: Shared | None = None
        """On the coordinator after the global plan: what undeclared replicas must be compared."""
        self._place = Place()
        self._holding = Holding.of(tree.flatten({}))
        self._values: list[bytes] = []

    def set_up_planner(
        self, state_dict: object, storage_meta: StorageMeta | None = None, place: Place = Place()
    ) -> None:
        """Take this rank's state apart, on the caller's thread."""
        self._place = place
        flat = tree.flatten(state_dict, rank=place.rank, world_size=place.world_size)
        self._holding = Holding.of(flat)
        self._values = []
        self._pickled = False

    @property
    def features(self) -> frozenset[str]:
        """`"pickle"` where a value of this rank had to be pickled."""
        return frozenset({"pickle"} if self._pickled else ())

    def create_local_plan(self) -> SavePlan:
        """Name every box and value this rank holds."""
        holding, structure = self._holding, self._holding.flat.structure
        names = structure.names
        holding.look_closely(self._place)
        self.settle()
        self.encode_values()
        return SavePlan(holding.columns(names, self._place.rank), structure)

    @property
    def look(self) -> Look:
        """What the local plan follows from; holds no array."""
        return self._holding.look

    def recognise(self, state_dict: object, place: Place, look: Look) -> bool:
        """In place of `set_up_planner` and `create_local_plan`: the plan of an earlier save again.

        False where the state does not look as it did then; the planner is set up in any case.
        Elements may then raise `StalePlan`: arrays recognised by identity are looked at when asked.
        """
        self._place, self._pickled = place, False
        found = Holding.recognise(state_dict, look)
        if found is None:
            self.set_up_planner(state_dict, None, place)
            if not self._holding.looks_like(look):
                return False
            self._holding.take_trace(state_dict)
        else:
            self._holding = found
        self.settle()
        self.encode_values()
        return True

    @property
    def is_trusting(self) -> bool:
        """Whether the arrays were only recognised, and not looked at."""
        return self._holding.trusted

    def take_trace(self, state_dict: object) -> None:
        """Make the look remember the objects of this state, to recognise them later."""
        self._holding.take_trace(state_dict)

    def settle(self) -> None:
        """Wait until nothing computes with the arrays of this state any more, or copy behind it."""
        flat = self._holding.flat
        self.staging = settle_all(flat.adapters, flat.values, self.waits)

    def encode_values(self) -> None:
        """Encode the plain values of this rank."""
        flat = self._holding.flat
        names = flat.structure.names
        self._values = []
        for leaf in self._holding.look.value_leaf:
            encoded = values.encode_value(
                flat.values[leaf], where=names[leaf], allow_pickle=self.allow_pickle
            )
            self._pickled |= encoded.pickled
            self._values.append(encoded.data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Join all plans; see `shardkeep.global_plan`."""
        joined = join_plans(all_plans, compare_tensors=self.check_replicas != "off")
        world = len(all_plans)
        chunks = joined.chunks.take(order_by(joined.chunks.rank, world))
        edges = np.searchsorted(chunks.rank, np.arange(world + 1))
        slots = np.lexsort((joined.values.slot, joined.values.rank))
        value_edges = np.searchsorted(joined.values.rank[slots], np.arange(world + 1))
        plans = []
        for rank in range(world):
            mine = slots[value_edges[rank] : value_edges[rank + 1]]
            items = WriteItems(
                joined.tensors,
                chunks.part(int(edges[rank]), int(edges[rank + 1])),
                [joined.values.names[row] for row in mine.tolist()],
                joined.value_source[mine].tolist(),
            )
            plans.append(SavePlan(items, all_plans[rank].planner_data))
        self.renamed = joined.renamed
        self.shared = joined.shared
        first_chunk = np.searchsorted(joined.chunks.tensor, np.arange(len(joined.tensors) + 1))

        def chunks_of(row: int) -> ChunkTable:
            return joined.chunks.part(int(first_chunk[row]), int(first_chunk[row + 1]))

        state = StateColumns(joined.tensors, joined.values, chunks_of, joined.chunks)
        return plans, Metadata(state, joined.structure)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Nothing is left to do."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Source | bytes:
        """The hint of the item is the number of the piece or value on this rank."""
        number = write_item.index.index
        assert number is not None
        data = write_item.data
        if isinstance(data, BytesWriteData):
            return self._values[number]
        if 0 in data.chunk.sizes:  # no piece: there is nothing to write
            return HostSource(np.zeros(data.chunk.sizes, lookup(data.properties.dtype).bits()))
        return self.source_of(number, data.chunk)

    def source_of(self, number: int, box: ChunkStorageMetadata) -> Source:
        """A piece, or the part of it that lies in `box`."""
        return self._holding.sources(np.array([number]), Boxes.of((box,)))[0]

    def check_sources(self, items: WriteItems, rows: Ints) -> None:
        """`StalePlan`, where an array is not what it was."""
        self._holding.check(items.chunks.source[rows])

    def addresses(self, items: WriteItems, rows: Ints) -> Addresses:
        """As the adapters say, unless a derived planner has a way of its own to elements."""
        if any(
            getattr(type(self), name) is not getattr(DefaultSavePlanner, name)
            for name in ("resolve_data", "sources")
        ):
            return super().addresses(items, rows)
        return self._holding.addresses(items.chunks.source[rows], items.chunks.boxes.take(rows))

    def sources(self, items: WriteItems, rows: Ints) -> Sequence[Source]:
        """For many at once, which costs far less for each."""
        if type(self).resolve_data is not DefaultSavePlanner.resolve_data:
            return super().sources(items, rows)  # a derived planner may have a way of its own
        return self._holding.sources(items.chunks.source[rows], items.chunks.boxes.take(rows))

    def deferrable(
        self, items: WriteItems, rows: Ints
    ) -> tuple[npt.NDArray[np.bool_], Spans, Callable[[], list[str]]]:
        """Which chunks only an optimizer's step changes, where each begins, and what names those
        that were changed since."""
        holding, pieces = self._holding, items.chunks.source[rows]
        stepped = holding.stepped()
        tensor = holding.look.tensor[pieces]
        which = np.array(stepped.which, np.bool_)[tensor]
        stored = [items.tensors.names[row] for row in items.chunks.tensor[rows[which]].tolist()]
        # By what they are here: the names they are stored under may be others.
        names = dict(zip(tensor[which].tolist(), stored, strict=True))

        def changed() -> list[str]:
            now = stepped.changed()
            return sorted(name for row, name in names.items() if now[row])

        places = stepped.spans[tensor]
        if holding.are_whole(pieces, items.chunks.boxes.take(rows)):
            begin = places[:, 0]
            places[:, 1] = np.where(stepped.begins[tensor], begin + np.uint64(1), places[:, 1])
        return which, places, changed

    def release(self) -> None:
        """Let go of the state; its elements are somewhere else."""
        self._holding = Holding.of(tree.flatten({}))
        self._values = []

    def digests(
        self, pieces: Sequence[int], values: Sequence[int], in_full: Sequence[bool]
    ) -> list[bytes]:
        """What undeclared replicas are compared by: first of these pieces, then of these values.

        `in_full` says of which pieces every byte counts, whatever `check_replicas` says.
        """
        held = self._holding.pieces(np.array(pieces, np.int64))
        found = [self._digest(*one, full) for one, full in zip(held, in_full, strict=True)]
        return found + [xxhash.xxh3_128_digest(self._values[number]) for number in values]

    def _digest(self, source: Source, nbytes: int, itemsize: int, full: bool) -> bytes:
        """All bytes of a small piece; of a large one all, or its two ends and its middle."""
        if full or nbytes <= FULL_DIGEST_BYTES or self.check_replicas == "full":
            spans = [(at, min(at + _UNIT, nbytes)) for at in range(0, nbytes, _UNIT)]
        else:
            middle = nbytes // 2 // SAMPLE_BYTES * SAMPLE_BYTES
            last = (nbytes - SAMPLE_BYTES) // itemsize * itemsize
            spans = [(at, at + SAMPLE_BYTES) for at in (0, middle)] + [(last, nbytes)]
        state = xxhash.xxh3_128()
        for low, high in spans:
            buffer = np.empty(high - low, np.uint8)
            source.read_into(low // itemsize, high // itemsize, buffer)
            state.update(buffer.data)
        return state.digest()
