# SPDX-License-Identifier: Apache-2.0
"""The load driver: the order of steps, and nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from shardkeep.arrays import LocalTarget, SinkPiece
from shardkeep.coordination import Coordinator
from shardkeep.default_load_planner import DefaultLoadPlanner, mismatch_error
from shardkeep.errors import CheckpointError, MismatchError, StorageError, UnsafeCheckpointError
from shardkeep.metadata import Metadata
from shardkeep.planner import LoadPlan, Place, ReadItems
from shardkeep.storage import StorageReader
from shardkeep.wire import decode_load_plan, encode_load_plan

__all__ = ["LoadResult", "run_load"]

log = logging.getLogger("shardkeep")


@dataclass(frozen=True)
class LoadResult:
    """What a load did."""

    state_dict: Any
    """The filled tree: the target itself where it is mutable, rebuilt where it is not."""
    missing: tuple[str, ...]
    """Names the target has and the checkpoint lacks; not filled."""
    unexpected: tuple[str, ...]
    """Names the checkpoint has inside containers of the target, which lacks them."""
    skipped: tuple[str, ...]
    """Names that were not asked for."""
    nbytes: int
    """Payload delivered on this rank."""
    stats: Mapping[str, float]
    """Seconds of each phase."""


class _Names(msgspec.Struct):
    missing: list[str]
    unexpected: list[str]
    skipped: list[str]


def run_load(
    state: object,
    *,
    reader: StorageReader,
    planner: DefaultLoadPlanner,
    coordinator: Coordinator,
    planned: Callable[[int], None] = lambda nbytes: None,
) -> LoadResult:
    """Fill `state` on every rank of the group.

    A checkpoint that is replaced while it is being read is read once more from the start.
    """
    try:
        return _load_once(state, reader, planner, coordinator, planned)
    except StorageError as error:
        if not error.transient:
            raise
        log.warning("reading again: %s", error)
        reader.reset()
        return _load_once(state, reader, planner, coordinator, planned)
    finally:
        reader.close()


def _load_once(
    state: object,
    reader: StorageReader,
    planner: DefaultLoadPlanner,
    coordinator: Coordinator,
    planned: Callable[[int], None],
) -> LoadResult:
    place = Place(coordinator.rank, coordinator.world_size)
    begun = time.perf_counter()
    metadata = _open(reader, coordinator, place)
    opened = time.perf_counter()

    plan, names = _plan(state, metadata, reader, planner, coordinator, place)
    coordinator.agree("check ties", lambda: check_ties(planner.targets(), reader))
    planned(_wanted_bytes(plan))
    ready = time.perf_counter()

    delivered: list[int] = []

    def read() -> None:
        try:
            delivered.append(reader.read_data(plan, planner))
        except (MismatchError, UnsafeCheckpointError):
            raise  # refused while only values had been read
        except CheckpointError as error:
            error.add_note("the contents of the targets are undefined now")
            raise

    coordinator.agree("read", read)
    filled: list[object] = []
    coordinator.agree("fill", lambda: filled.append(planner.fill()))
    done = time.perf_counter()
    stats = {"open_s": opened - begun, "plan_s": ready - opened, "read_s": done - ready}
    return LoadResult(
        filled[0],
        tuple(names.missing),
        tuple(names.unexpected),
        tuple(names.skipped),
        delivered[0],
        stats,
    )


def _open(reader: StorageReader, coordinator: Coordinator, place: Place) -> Metadata:
    """One rank looks the record up; the others take its word and read their part of the index."""
    read: list[Metadata] = []

    def lead() -> bytes:
        read.append(reader.read_metadata())
        return reader.announcement()

    word = coordinator.lead("open", lead)
    if place.world_size > 1:

        def follow() -> None:
            if not place.is_coordinator:
                read.append(reader.read_metadata(word))

        coordinator.agree("open on all ranks", follow)
    reader.set_up_storage_reader(read[0], place)
    return read[0]


def _plan(
    state: object,
    metadata: Metadata,
    reader: StorageReader,
    planner: DefaultLoadPlanner,
    coordinator: Coordinator,
    place: Place,
) -> tuple[LoadPlan, _Names]:
    local: list[LoadPlan] = []

    def make_local() -> bytes:
        planner.set_up_planner(state, metadata, place)
        local.append(reader.prepare_local_plan(planner.create_local_plan()))
        return encode_load_plan(local[0])

    def join(told: list[bytes]) -> Sequence[bytes]:
        reader.prepare_global_plan(
            planner.create_global_plan([decode_load_plan(part) for part in told])
        )
        names = _Names(list(planner.missing), list(planner.unexpected), list(planner.skipped))
        return [msgspec.msgpack.encode(names)] * place.world_size

    answer = coordinator.gather_scatter("plan", make_local, join)
    return planner.finish_plan(local[0]), msgspec.msgpack.decode(answer, type=_Names)


def _wanted_bytes(plan: LoadPlan) -> int:
    items = plan.items
    assert isinstance(items, ReadItems)
    from shardkeep.columns import Boxes

    volumes = Boxes(items.chunks.boxes.start, items.low, items.size).volumes()
    return int((volumes * items.tensors.itemsize[items.chunks.tensor]).sum())


def check_ties(targets: Sequence[tuple[str, LocalTarget]], reader: StorageReader) -> None:
    """Targets that share memory must be filled with the same bytes."""
    pieces = [
        (piece.memory.device, *piece.memory.bounds(), name, piece)
        for name, target in targets
        for piece in target.pieces
        if piece.memory is not None
    ]
    faults: dict[str, str] = {}
    near: list[tuple[str, int, int, str, SinkPiece]] = []
    for item in sorted(pieces, key=lambda item: item[:3]):
        device, low, _, name, piece = item
        near = [other for other in near if other[0] == device and other[2] > low]
        for _, _, _, other, earlier in near:
            if not _same_bytes(name, piece, other, earlier, reader):
                faults[name] = (
                    f"shares memory with {other}, but the two are stored with different contents "
                    "or shapes; untie the target, or leave one out with keys=..."
                )
        near.append(item)
    if faults:
        raise mismatch_error((), (), faults)


def _same_bytes(
    name: str, piece: SinkPiece, other: str, earlier: SinkPiece, reader: StorageReader
) -> bool:
    assert piece.memory is not None
    assert earlier.memory is not None
    if not piece.memory.overlaps(earlier.memory):
        return True
    if piece.memory != earlier.memory or piece.box != earlier.box:
        return False
    return name == other or reader.same_content(name, other)
