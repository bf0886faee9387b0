# SPDX-License-Identifier: Apache-2.0
"""The load driver: the order of steps, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from shardkeep.collector import paused_collector
from shardkeep.coordination import Coordinator, check_same, encode_asked
from shardkeep.default_load_planner import DefaultLoadPlanner, mismatch_error
from shardkeep.errors import StorageError
from shardkeep.hosts import name_host, ranks_on_hosts
from shardkeep.memory import Memory
from shardkeep.metadata import ChunkStorageMetadata, Metadata
from shardkeep.planner import LoadPlan, Place, ReadItems
from shardkeep.storage import ReadOnce, StorageReader
from shardkeep.targets import Filling
from shardkeep.wire import decode_load_plan, encode_load_plan
from shardkeep.wording import StatsText, rate

__all__ = ["LoadResult", "run_load"]

log = logging.getLogger("shardkeep")

SOON_READ = 1 << 30
"""Bytes that are read so soon that Python's collector can wait for it."""


@dataclass(frozen=True)
class LoadResult:
    """What a load did."""

    state_dict: Any = field(repr=False)
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
    """Seconds of each phase, and what the storage counted; see `docs/PERFORMANCE.md`."""


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
    options: Mapping[str, Any] | None = None,
    planned: Callable[[int], None] = lambda nbytes: None,
    read_once: ReadOnce = "auto",
) -> LoadResult:
    """Fill `state` on every rank of the group.

    A checkpoint that is replaced while it is being read is read once more from the start.
    """
    try:
        with coordinator.call("load"):
            reader.ranks_on_host = _agree_on(options or {}, coordinator)
            try:
                result = _load_once(state, reader, planner, coordinator, planned, read_once)
            except StorageError as error:
                if not error.transient:
                    raise
                log.warning("reading again: %s", error)
                reader.reset()
                result = _load_once(state, reader, planner, coordinator, planned, read_once)
        log.info("loaded %s: %s", (options or {}).get("checkpoint_id"), StatsText(result.stats))
        return result
    finally:
        reader.close()


def _agree_on(options: Mapping[str, Any], coordinator: Coordinator) -> int:
    """Ranks must have been asked for the same thing; how many of them there are on this host."""
    if coordinator.world_size == 1:
        return 1

    def join(told: list[bytes]) -> list[bytes]:
        asked, counts = ranks_on_hosts(told)
        check_same(asked, "loads")
        answers = {count: str(count).encode() for count in counts}
        return [answers[count] for count in counts]

    def ask() -> bytes:
        return name_host(encode_asked(options))

    return int(coordinator.gather_scatter("set up", ask, join))


def _load_once(
    state: object,
    reader: StorageReader,
    planner: DefaultLoadPlanner,
    coordinator: Coordinator,
    planned: Callable[[int], None],
    read_once: ReadOnce,
) -> LoadResult:
    place = Place(coordinator.rank, coordinator.world_size)
    begun = time.perf_counter()
    with contextlib.ExitStack() as paused:
        # Names and plans are many objects without cycles, gone again before the collector looks.
        paused.enter_context(paused_collector())
        metadata = _open(reader, coordinator, place)
        opened = time.perf_counter()

        def ready(plan: LoadPlan) -> None:
            nbytes = ReadItems.of(plan).nbytes
            if nbytes > SOON_READ:
                paused.close()
            planned(nbytes)

        result, times = _fill(
            state, metadata, reader, planner, coordinator, place, read_once, ready
        )
        planner.release()
    stats = {"open_s": opened - begun, "plan_s": times[0] - opened, "read_s": times[1] - times[0]}
    stats |= {"bytes": result.nbytes, "bytes_per_s": rate(result.nbytes, times[1] - begun)}
    return replace(result, stats={**stats, **reader.stats})


def _fill(
    state: object,
    metadata: Metadata,
    reader: StorageReader,
    planner: DefaultLoadPlanner,
    coordinator: Coordinator,
    place: Place,
    read_once: ReadOnce,
    ready: Callable[[LoadPlan], None],
) -> tuple[LoadResult, tuple[float, float]]:
    """Plan and read; the result, and when each was done."""
    plan, names = _plan(state, metadata, reader, planner, coordinator, place)
    coordinator.agree("check ties", lambda: check_ties(planner.filling(), reader))
    ready(plan)
    planned = time.perf_counter()

    delivered: list[int] = []
    filled: list[object] = []

    def read_values() -> None:
        reader.read_bytes(plan, planner)
        planner.check_values()
        delivered.append(planner.restore(reader))

    # Values first, on all ranks: they are small, and may still refuse the load.
    coordinator.agree("read values", read_values)
    with _undefined_after_errors():
        if read_once and place.world_size > 1 and hasattr(coordinator, "exchange"):
            reader.share_reads(plan, planner, coordinator, read_once)
        coordinator.agree("read", lambda: delivered.append(reader.read_data(plan, planner)))
        coordinator.agree("fill", lambda: filled.append(planner.fill()))
    done = time.perf_counter()
    result = LoadResult(
        filled[0],
        tuple(names.missing),
        tuple(names.unexpected),
        tuple(names.skipped),
        sum(delivered),
        {},
    )
    return result, (planned, done)


@contextlib.contextmanager
def _undefined_after_errors() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note("The contents of the targets are undefined now.")
        raise


def _open(reader: StorageReader, coordinator: Coordinator, place: Place) -> Metadata:
    """One rank looks the record up; the others take its word and read their part of the index."""
    read: list[Metadata] = []

    def lead() -> bytes:
        read.append(reader.read_metadata())
        return reader.announcement() if place.world_size > 1 else b""

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
        return encode_load_plan(local[0]) if place.world_size > 1 else b""

    def join(told: list[bytes]) -> Sequence[bytes]:
        alone = place.world_size == 1
        plans = local[:] if alone else [decode_load_plan(part) for part in told]
        reader.prepare_global_plan(planner.create_global_plan(plans))
        names = _Names(list(planner.missing), list(planner.unexpected), list(planner.skipped))
        return [msgspec.msgpack.encode(names)] * place.world_size

    answer = coordinator.gather_scatter("plan", make_local, join)
    return planner.finish_plan(local.pop()), msgspec.msgpack.decode(answer, type=_Names)


def check_ties(filling: Filling, reader: StorageReader) -> None:
    """Targets that share memory must be filled with the same bytes."""
    groups: dict[tuple[Memory, ChunkStorageMetadata], list[str]] = {}
    for name, memory, box in filling.near_others():
        groups.setdefault((memory, box), []).append(name)
    faults: dict[str, str] = {}
    for names in groups.values():
        for name in names[1:]:
            if name != names[0] and not reader.same_content(names[0], name):
                faults[name] = _tie_text(names[0])
    near: list[tuple[int, Memory, str]] = []
    for (memory, _), names in sorted(
        groups.items(), key=lambda item: (item[0][0].device, *item[0][0].bounds())
    ):
        low, high = memory.bounds()
        near = [n for n in near if n[1].device == memory.device and n[0] > low]
        for _, earlier, other in near:
            if memory.overlaps(earlier):
                faults[names[0]] = _tie_text(other)
        near.append((high, memory, names[0]))
    if faults:
        raise mismatch_error((), (), faults)


def _tie_text(other: str) -> str:
    return (
        f"shares memory with {other}, but the two are stored with different contents or shapes; "
        "untie the target, or leave one out with keys=..."
    )
