# SPDX-License-Identifier: Apache-2.0
"""The save driver: the order of steps, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardkeep.coordination import Coordinator, check_same, encode_asked
from shardkeep.holding import StalePlan
from shardkeep.hosts import name_host, ranks_on_hosts
from shardkeep.metadata import Metadata, MetadataIndex
from shardkeep.planner import Place, SavePlan, SavePlanner, WriteItems
from shardkeep.planning import PlanMemory, Planning
from shardkeep.storage import StorageWriter, WriteResult
from shardkeep.tables import StateColumns

__all__ = ["SaveResult", "run_save"]

log = logging.getLogger("shardkeep")

_STALE = b""
"""In place of results: a rank found that the plan does not fit its state; nothing is committed."""


@dataclass(frozen=True)
class SaveResult:
    """What a save did; the same on every rank but for `stats`."""

    checkpoint_id: str
    """Where it went."""
    save_id: str
    """The attempt that was committed."""
    digest: str
    """Digest of the commit record: keep it elsewhere to prove later that nothing was changed."""
    nbytes: int
    """Bytes of all tensors in it, replicas and ties counted once."""
    stats: Mapping[str, float]
    """Seconds of each phase, bytes and files of this rank."""
    _read_metadata: Callable[[str], Metadata] = field(repr=False, compare=False, kw_only=True)

    @property
    def metadata(self) -> Metadata:
        """What was stored; opens the index when looked at, while this save is the one there."""
        return self._read_metadata(self.save_id)


class _Start(msgspec.Struct):
    """What the coordinator tells a rank once storage is set up."""

    reuse: bool
    """Whether to try the last plan."""
    ranks_on_host: int
    word: bytes
    """Of the storage, to all ranks."""


class _Committed(msgspec.Struct):
    save_id: str
    digest: str
    nbytes: int


def run_save(
    state: object,
    *,
    checkpoint_id: str,
    writer: StorageWriter,
    planner: SavePlanner,
    coordinator: Coordinator,
    options: Mapping[str, Any],
    read_metadata: Callable[[str], Metadata],
    planned: Callable[[int], None] = lambda nbytes: None,
) -> SaveResult:
    """Save `state` from every rank of the group; returns once it is committed everywhere."""
    given = (state, checkpoint_id, writer, planner, coordinator, options, read_metadata, planned)
    while (result := _attempt(*given)) is None:
        writer.reset(checkpoint_id)
    return result


def _attempt(
    state: object,
    checkpoint_id: str,
    writer: StorageWriter,
    planner: SavePlanner,
    coordinator: Coordinator,
    options: Mapping[str, Any],
    read_metadata: Callable[[str], Metadata],
    planned: Callable[[int], None],
) -> SaveResult | None:
    """One save; None, on all ranks alike, where the plan used again was stale and is forgotten."""
    place = Place(coordinator.rank, coordinator.world_size)
    memory = coordinator.memory.setdefault("plan", PlanMemory())
    planning = Planning(state, writer, planner, coordinator, memory)
    clock = _Clock()
    committing = False
    with coordinator.call("save"):
        try:
            answer = coordinator.gather_scatter(
                "set up",
                lambda: name_host(encode_asked({"checkpoint_id": checkpoint_id, **options})),
                lambda told: _lead_set_up(told, writer, place, planning),
            )
            start = msgspec.msgpack.decode(answer, type=_Start)
            writer.ranks_on_host = start.ranks_on_host
            if place.world_size > 1:
                coordinator.agree("see storage", lambda: _follow_set_up(writer, place, start.word))
            clock.lap("set up")

            plan = planning.plan(start.reuse)
            planned(_item_bytes(plan))
            clock.lap("plan")

            results: list[WriteResult] | None = None

            def write() -> None:
                nonlocal results
                with contextlib.suppress(StalePlan):
                    results = writer.write_data(plan, planner)

            coordinator.agree("write", write)
            clock.lap("write")

            committing = True
            answer = coordinator.gather_scatter(
                "commit",
                lambda: _encode_results(results),
                lambda told: [_commit(told, writer, planning, coordinator)] * place.world_size,
            )
            if answer == _STALE:
                writer.abort()
            else:
                writer.settle()
            clock.lap("commit")
        except BaseException:
            writer.abort(committing=committing)
            raise
    if answer == _STALE:
        planning.forget()
        return None
    assert results is not None
    done = msgspec.msgpack.decode(answer, type=_Committed)
    written = sum(result.size_in_bytes for result in results)
    stats = {**clock.laps, **planning.stats, **writer.stats}
    stats |= {"bytes": written, "files": len(results)}
    log.info("saved %s: %d bytes in %.2f s", checkpoint_id, done.nbytes, sum(clock.laps.values()))
    return SaveResult(
        checkpoint_id,
        done.save_id,
        done.digest,
        done.nbytes,
        stats,
        _read_metadata=read_metadata,
    )


def _lead_set_up(
    told: list[bytes], writer: StorageWriter, place: Place, planning: Planning
) -> list[bytes]:
    """Ranks must have been asked for the same thing."""
    asked, counts = ranks_on_hosts(told)
    check_same(asked, "saves")
    word = writer.set_up_storage_writer(place)
    starts = {
        count: msgspec.msgpack.encode(_Start(planning.may_reuse, count, word)) for count in counts
    }
    return [starts[count] for count in counts]


def _follow_set_up(writer: StorageWriter, place: Place, word: bytes) -> None:
    if not place.is_coordinator:
        writer.set_up_storage_writer(place, word)


def _item_bytes(plan: SavePlan) -> int:
    items = WriteItems.of(plan.items)
    return int(items.chunks.nbytes(items.tensors).sum())


def _encode_results(results: list[WriteResult] | None) -> bytes:
    if results is None:
        return _STALE
    rows = [(r.index.fqn, r.index.offset, r.size_in_bytes, r.storage_data) for r in results]
    return msgspec.msgpack.encode(rows)


def _decode_results(data: bytes) -> list[WriteResult]:
    rows = msgspec.msgpack.decode(data, type=list[tuple[str, tuple[int, ...] | None, int, bytes]])
    return [
        WriteResult(MetadataIndex(fqn, offset), size, extra) for fqn, offset, size, extra in rows
    ]


def _commit(
    told: list[bytes], writer: StorageWriter, planning: Planning, coordinator: Coordinator
) -> bytes:
    if _STALE in told:
        return _STALE
    metadata = planning.metadata
    assert metadata is not None
    if hasattr(writer, "before_commit"):
        writer.before_commit = coordinator.may_commit
    else:
        coordinator.may_commit()
    final = writer.finish(metadata, [_decode_results(part) for part in told])
    meta = final.storage_meta
    save_id = (meta.save_id if meta is not None else None) or ""
    state = metadata.state_dict_metadata
    if isinstance(state, StateColumns) and state.chunks is not None:
        nbytes = int(state.chunks.nbytes(state.tensors).sum())
    else:
        nbytes = sum(r.size_in_bytes for part in told for r in _decode_results(part))
    return msgspec.msgpack.encode(_Committed(save_id, getattr(writer, "digest", ""), nbytes))


class _Clock:
    """Seconds between steps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"{name.replace(' ', '_')}_s"] = now - self._last
        self._last = now
