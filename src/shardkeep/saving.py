# SPDX-License-Identifier: Apache-2.0
"""The save driver: the order of steps, and nothing else."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from shardkeep.coordination import Coordinator, check_same, encode_asked
from shardkeep.default_planner import DefaultSavePlanner
from shardkeep.metadata import Metadata, MetadataIndex
from shardkeep.planner import Place, SavePlan, SavePlanner
from shardkeep.storage import StorageWriter, WriteResult
from shardkeep.tables import StateColumns
from shardkeep.wire import (
    PlanDecoder,
    decode_final_plan,
    encode_final_plan,
    encode_local_plan,
)

__all__ = ["SaveResult", "run_save"]

log = logging.getLogger("shardkeep")


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
    place = Place(coordinator.rank, coordinator.world_size)
    clock = _Clock()
    committing = False
    with coordinator.call("save"):
        try:
            word = coordinator.gather_scatter(
                "set up",
                lambda: encode_asked({"checkpoint_id": checkpoint_id, **options}),
                lambda told: [_lead_set_up(told, writer, place)] * place.world_size,
            )
            if place.world_size > 1:
                coordinator.agree("see storage", lambda: _follow_set_up(writer, place, word))
            clock.lap("set up")

            plan, metadata = _plan(state, writer, planner, coordinator, place)
            planned(sum(_item_bytes(plan)))
            clock.lap("plan")

            results: list[WriteResult] = []
            coordinator.agree("write", lambda: results.extend(writer.write_data(plan, planner)))
            clock.lap("write")

            committing = True
            answer = coordinator.gather_scatter(
                "commit",
                lambda: _encode_results(results),
                lambda told: [_commit(told, writer, metadata, coordinator)] * place.world_size,
            )
            writer.settle()
            clock.lap("commit")
        except BaseException:
            writer.abort(committing=committing)
            raise
    done = msgspec.msgpack.decode(answer, type=_Committed)
    written = sum(result.size_in_bytes for result in results)
    stats = {**clock.laps, "bytes": written, "files": len(results)}
    log.info("saved %s: %d bytes in %.2f s", checkpoint_id, done.nbytes, sum(clock.laps.values()))
    return SaveResult(
        checkpoint_id,
        done.save_id,
        done.digest,
        done.nbytes,
        stats,
        _read_metadata=read_metadata,
    )


def _lead_set_up(told: list[bytes], writer: StorageWriter, place: Place) -> bytes:
    """Ranks must have been asked for the same thing."""
    check_same(told, "saves")
    return writer.set_up_storage_writer(place)


def _follow_set_up(writer: StorageWriter, place: Place, word: bytes) -> None:
    if not place.is_coordinator:
        writer.set_up_storage_writer(place, word)


def _plan(
    state: object,
    writer: StorageWriter,
    planner: SavePlanner,
    coordinator: Coordinator,
    place: Place,
) -> tuple[SavePlan, Metadata | None]:
    """This rank's share of the global plan, and on the coordinator the metadata of it all."""
    local: list[SavePlan] = []
    whole: list[Metadata] = []

    def make_local() -> bytes:
        planner.set_up_planner(state, writer.storage_meta(), place)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
        return encode_local_plan(local[0]) if place.world_size > 1 else b""

    def join(told: list[bytes]) -> list[bytes]:
        decoder = PlanDecoder()
        plans = [decoder.decode(part) for part in told] if place.world_size > 1 else local[:1]
        plans, metadata = planner.create_global_plan(plans)
        whole.append(metadata)
        plans = writer.prepare_global_plan(plans, metadata)
        renamed = planner.renamed if isinstance(planner, DefaultSavePlanner) else []
        return [
            encode_final_plan(plan, renamed[rank] if renamed else {})
            for rank, plan in enumerate(plans)
        ]

    message = coordinator.gather_scatter("plan", make_local, join)
    plan = planner.finish_plan(decode_final_plan(message, local[0]))
    return plan, whole[0] if whole else None


def _item_bytes(plan: SavePlan) -> list[int]:
    from shardkeep.planner import WriteItems

    items = WriteItems.of(plan.items)
    return items.chunks.nbytes(items.tensors).tolist()  # type: ignore[no-any-return]


def _encode_results(results: list[WriteResult]) -> bytes:
    rows = [(r.index.fqn, r.index.offset, r.size_in_bytes, r.storage_data) for r in results]
    return msgspec.msgpack.encode(rows)


def _decode_results(data: bytes) -> list[WriteResult]:
    rows = msgspec.msgpack.decode(data, type=list[tuple[str, tuple[int, ...] | None, int, bytes]])
    return [
        WriteResult(MetadataIndex(fqn, offset), size, extra) for fqn, offset, size, extra in rows
    ]


def _commit(
    told: list[bytes], writer: StorageWriter, metadata: Metadata | None, coordinator: Coordinator
) -> bytes:
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
