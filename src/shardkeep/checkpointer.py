# SPDX-License-Identifier: Apache-2.0
"""The `Checkpointer`: what outlives a call lives here."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import shardkeep
from shardkeep.background import Background, OnOverlap, SnapshotKind, WriterKind, wait_turn
from shardkeep.behind import Handover
from shardkeep.closing import Closing
from shardkeep.coordination import Coordinator
from shardkeep.default_load_planner import DefaultLoadPlanner
from shardkeep.default_planner import CheckReplicas, DefaultSavePlanner
from shardkeep.dtypes import Cast
from shardkeep.engine.budget import Spares, checked_budget
from shardkeep.engine.process import can_start
from shardkeep.errors import CorruptionError, PlanError, StorageError, UnsupportedValueError
from shardkeep.foreign.reader import ForeignReader
from shardkeep.formats.huggingface.writer import HuggingFaceWriter
from shardkeep.formats.native.reader import NativeReader
from shardkeep.formats.native.record import checked_user_metadata
from shardkeep.formats.native.writer import NativeWriter
from shardkeep.groups import coordinator_for
from shardkeep.handles import SaveHandle
from shardkeep.loading import LoadResult, run_load
from shardkeep.metadata import Metadata
from shardkeep.planner import LoadPlanner, SavePlanner
from shardkeep.preemption import is_preempted
from shardkeep.progress import Progress, tracked
from shardkeep.ranks import Ranks
from shardkeep.saving import SaveResult, Saving, run_save
from shardkeep.storage import (
    CheckpointId,
    ReadOnce,
    StorageReader,
    StorageWriter,
    find_reader,
    find_writer,
)
from shardkeep.surgery.operation import Surgery
from shardkeep.surgery.reading import OperatedReader

__all__ = ["Checkpointer", "refuse_pin"]


class Checkpointer(Closing):
    """Saves and loads for one group of processes; closable, and a context manager."""

    def __init__(
        self,
        *,
        process_group: object = None,
        no_dist: bool = False,
        writer: WriterKind = "thread",
        memory_budget: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`memory_budget` bounds the payload buffers of this process; at least 8 MiB.

        `writer` says who writes what `async_save` has staged: a thread of this process, or a
        process that has nothing to do with the program but the memory it writes from.
        """
        if writer not in ("thread", "process"):
            raise ValueError(f"writer is {writer!r}; use 'thread' or 'process'")
        if writer == "process" and not can_start():
            raise ValueError(
                "writer='process' needs memory that processes share by a descriptor, and a Python "
                f"that can be started; this program on {sys.platform} does not have both. Use "
                "'thread'."
            )
        checked_budget(memory_budget)
        self._coordinator = coordinator_for(process_group, no_dist, timeout_s)
        self._memory_budget = memory_budget
        self._writer: WriterKind = writer
        self._background: Background | None = None
        self._lock = threading.Lock()

    def save(
        self,
        state_dict: object,
        checkpoint_id: CheckpointId | None = None,
        *,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        overwrite: bool = False,
        base: CheckpointId | None = None,
        allow_pickle: bool = False,
        check_replicas: CheckReplicas = "sample",
        user_metadata: Mapping[str, Any] | None = None,
        memory_budget: int | None = None,
        progress: Progress = None,
    ) -> SaveResult:
        """Save a nested state; see `shardkeep.save`."""
        wait_turn(self._coordinator)
        # What is refused on this rank alone, before the first step, reaches the others too.
        with (
            self._coordinator.call("save"),
            self._begun(
                self._coordinator,
                state_dict,
                checkpoint_id,
                storage_writer,
                planner,
                overwrite,
                base,
                allow_pickle,
                check_replicas,
                user_metadata,
                memory_budget,
                progress,
            ) as saving,
        ):
            return run_save(saving, self._coordinator)

    def async_save(
        self,
        state_dict: object,
        checkpoint_id: CheckpointId | None = None,
        *,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        overwrite: bool = False,
        base: CheckpointId | None = None,
        allow_pickle: bool = False,
        check_replicas: CheckReplicas = "sample",
        user_metadata: Mapping[str, Any] | None = None,
        snapshot: SnapshotKind = "eager",
        on_overlap: OnOverlap = "wait",
        memory_budget: int | None = None,
        progress: Progress = None,
    ) -> SaveHandle:
        """Save a nested state in the background; see `shardkeep.async_save`."""
        if snapshot not in ("eager", "lazy"):
            raise ValueError(f"snapshot is {snapshot!r}; use 'eager' or 'lazy'")
        if on_overlap not in ("wait", "skip", "error"):
            raise ValueError(f"on_overlap is {on_overlap!r}; use 'wait', 'skip' or 'error'")
        begun = time.perf_counter()
        background = self._behind()
        with background.turn, Handover() as inside:
            if self._overlaps(background, on_overlap):
                handle = SaveHandle("" if checkpoint_id is None else os.fspath(checkpoint_id))
                handle.skipped = True
                handle.end(None)
                return handle
            background.wait()
            coordinator = background.coordinator
            inside.stack.enter_context(coordinator.call("async_save"))
            saving = inside.stack.enter_context(
                self._begun(
                    coordinator,
                    state_dict,
                    checkpoint_id,
                    storage_writer,
                    planner,
                    overwrite,
                    base,
                    allow_pickle,
                    check_replicas,
                    user_metadata,
                    memory_budget,
                    progress,
                )
            )
            return background.start(saving, inside, snapshot, begun)

    def prewarm(self, state_dict: object, *, planner: SavePlanner | None = None) -> None:
        """Take now what the first `async_save` of such a state would have to wait for: memory of
        its size, known to the device, and the plan. Collective; nothing is written.
        """
        background = self._behind()
        with background.turn:
            background.wait()
            self._prewarm(background, state_dict, planner)

    def _prewarm(
        self, background: Background, state_dict: object, planner: SavePlanner | None
    ) -> None:
        with background.coordinator.call("prewarm"):
            background.prewarm(state_dict, planner or DefaultSavePlanner(), NativeWriter("prewarm"))

    def should_stop(self) -> bool:
        """Whether any rank was told to stop (`shardkeep.catch_preemption`): the same on all ranks.

        Collective: to be asked at a step boundary, by every rank.
        """

        def join(told: list[bytes]) -> list[bytes]:
            return [b"stop" if b"stop" in told else b""] * len(told)

        wait_turn(self._coordinator)
        mine = b"stop" if is_preempted() else b""
        return self._coordinator.gather_scatter("should stop", lambda: mine, join) == b"stop"

    @property
    def coordinator(self) -> Coordinator:
        """The group it saves and loads for, free for a step of the caller's own."""
        wait_turn(self._coordinator)
        return self._coordinator

    def _behind(self) -> Background:
        with self._lock:
            if self._background is None or not self._background.is_ours:
                self._background = Background(self._coordinator, self._writer)
        wait_turn(self._coordinator)
        theirs = self._background.coordinator
        if isinstance(self._coordinator, Ranks) and isinstance(theirs, Ranks):
            theirs.timeout_s = self._coordinator.timeout_s  # as it is now
        return self._background

    def _raise_unseen(self) -> None:
        """What failed behind this one's back, or behind that of the module functions."""
        for keeper in (self, *self._coordinator.memory.values()):
            if isinstance(keeper, Checkpointer) and keeper._background is not None:
                keeper._background.raise_unseen()

    def _overlaps(self, background: Background, on_overlap: OnOverlap) -> bool:
        """Whether a save is running that this one does not wait for; the same on all ranks."""
        if on_overlap == "wait":
            return False
        answer = self._coordinator.gather_scatter(
            "look for another save",
            lambda: on_overlap.encode() + (b"!" if background.is_busy else b"."),
            _decide_overlap,
        )
        if answer == b"error":
            raise PlanError(
                f"the save of {background.where} is still running on some rank; wait for it, or "
                "pass on_overlap='wait' or 'skip'"
            )
        return answer == b"skip"

    @contextlib.contextmanager
    def _begun(
        self,
        coordinator: Coordinator,
        state_dict: object,
        checkpoint_id: CheckpointId | None,
        storage_writer: StorageWriter | None,
        planner: SavePlanner | None,
        overwrite: bool,
        base: CheckpointId | None,
        allow_pickle: bool,
        check_replicas: CheckReplicas,
        user_metadata: Mapping[str, Any] | None,
        memory_budget: int | None,
        progress: Progress,
    ) -> Iterator[Saving]:
        """A save with all that it needs, while it lasts."""
        _refuse_torch(planner, SavePlanner, "planner")
        _refuse_torch(storage_writer, StorageWriter, "storage_writer")
        _refuse_scalar(state_dict)
        budget = self._memory_budget if memory_budget is None else memory_budget
        checked_budget(budget)
        beside = checked_user_metadata(user_metadata)
        writer = storage_writer
        if writer is None:
            if checkpoint_id is None:
                raise ValueError("pass checkpoint_id=..., or a storage_writer that knows where")
            writer = find_writer(checkpoint_id)()
        if beside and not isinstance(writer, NativeWriter):
            raise UnsupportedValueError(
                f"{type(writer).__qualname__} keeps no user_metadata; put it into the state"
            )
        # Another save may not have ended: it would go on with what this one does to them.
        with _used(writer, "storage_writer"), _used(planner, "planner"):
            writer.reset(checkpoint_id)
            where = _where(checkpoint_id, writer)
            if isinstance(writer, NativeWriter):
                if not where:
                    raise ValueError("pass checkpoint_id=..., or a storage_writer that knows where")
                overwrite = overwrite or writer.overwrite
                base = writer.base if base is None else base
            elif isinstance(writer, HuggingFaceWriter):
                overwrite = overwrite or writer.overwrite
            if base is not None and not isinstance(writer, NativeWriter):
                raise ValueError(f"base: {type(writer).__name__} uses nothing of other checkpoints")
            if planner is None:
                planner = DefaultSavePlanner(
                    check_replicas=check_replicas, allow_pickle=allow_pickle
                )
            # Compared with in the background, when the program may be in another directory.
            place = None if base is None else os.path.abspath(base)
            options = {
                "overwrite": overwrite,
                "base": None if base is None else os.fspath(base),
                "check_replicas": check_replicas,
                "allow_pickle": allow_pickle,
                "version": shardkeep.__version__,
            }
            with (
                tracked(progress, "saving") as counter,
                self._lent(
                    coordinator,
                    writer,
                    counter,
                    budget,
                    overwrite=overwrite,
                    base=place,
                    user_metadata=beside,
                    spares=coordinator.memory.setdefault("buffers", Spares()),
                ),
            ):
                saving = Saving(
                    state_dict,
                    checkpoint_id=where,
                    writer=writer,
                    planner=planner,
                    coordinator=coordinator,
                    options=options,
                    read_metadata=_metadata_of(where),
                    planned=counter.expect,
                    look_back=self._raise_unseen,
                )
                del state_dict  # it may go before the save ends
                yield saving

    def load(
        self,
        state_dict: object,
        checkpoint_id: CheckpointId | None = None,
        *,
        storage_reader: StorageReader | None = None,
        planner: DefaultLoadPlanner | None = None,
        strict: bool = True,
        keys: Sequence[str] | None = None,
        optional: Sequence[str] = (),
        cast: Cast = False,
        surgery: Surgery | None = None,
        verify: bool = True,
        expect_digest: str | None = None,
        allow_pickle: bool = False,
        device: object = None,
        read_once: ReadOnce = "auto",
        memory_budget: int | None = None,
        progress: Progress = None,
    ) -> LoadResult:
        """Fill a nested state; see `shardkeep.load`."""
        options = {
            "strict": strict,
            "keys": keys if keys is None or isinstance(keys, str) else list(keys),
            "optional": optional if isinstance(optional, str) else list(optional),
            "cast": cast,
            "verify": verify,
            "expect_digest": expect_digest,
            "allow_pickle": allow_pickle,
            "read_once": read_once,
            "surgery": repr(surgery),
            "version": shardkeep.__version__,
        }
        wait_turn(self._coordinator)
        with self._coordinator.call("load"):
            if planner is None:
                planner = DefaultLoadPlanner(
                    strict=strict,
                    keys=keys,
                    optional=optional,
                    cast=cast,
                    allow_pickle=allow_pickle,
                    device=device,
                )
            return self._load(
                state_dict,
                checkpoint_id,
                storage_reader,
                planner,
                surgery,
                options,
                memory_budget,
                progress,
            )

    def _load(
        self,
        state_dict: object,
        checkpoint_id: CheckpointId | None,
        storage_reader: StorageReader | None,
        planner: DefaultLoadPlanner,
        surgery: Surgery | None,
        options: dict[str, Any],
        memory_budget: int | None,
        progress: Progress,
    ) -> LoadResult:
        _refuse_torch(planner, LoadPlanner, "planner")
        _refuse_torch(storage_reader, StorageReader, "storage_reader")
        budget = self._memory_budget if memory_budget is None else memory_budget
        checked_budget(budget)
        reader = storage_reader
        if reader is None:
            if checkpoint_id is None:
                raise ValueError("pass checkpoint_id=..., or a storage_reader that knows where")
            reader = find_reader(checkpoint_id)()
        reader.reset(checkpoint_id)
        if isinstance(reader, ForeignReader):
            refuse_pin(options["expect_digest"], checkpoint_id)
        if isinstance(reader, NativeReader):
            if not getattr(reader, "checkpoint_id", ""):
                raise ValueError("pass checkpoint_id=..., or a storage_reader that knows where")
            # What the reader was made with holds too: a pin is not lost, nor a wish not to verify.
            options["verify"] = options["verify"] and reader.verify
            options["expect_digest"] = options["expect_digest"] or reader.expect_digest
        pinned = {k: options[k] for k in ("verify", "expect_digest") if hasattr(reader, k)}
        kept = self._coordinator.memory.get("buffers")
        with (
            tracked(progress, "loading") as counter,
            self._lent(
                self._coordinator,
                reader,
                counter,
                budget,
                kept=kept,
                planned=counter.expect,
                **pinned,
            ),
        ):
            return run_load(
                state_dict,
                reader=reader if surgery is None else OperatedReader(reader, surgery),
                planner=planner,
                coordinator=self._coordinator,
                options={"checkpoint_id": _where(checkpoint_id, reader), **options},
                planned=counter.expect,
                read_once=options["read_once"],
            )

    @contextlib.contextmanager
    def _lent(
        self,
        coordinator: Coordinator,
        storage: object,
        counter: Callable[[int], None],
        budget: int | None,
        **settings: Any,
    ) -> Iterator[None]:
        """Give our own storage the settings of this call; a caller's object gets its own back."""
        ours = (NativeWriter, HuggingFaceWriter, NativeReader, ForeignReader)
        if not isinstance(storage, ours):
            yield
            return
        settings = {key: value for key, value in settings.items() if hasattr(storage, key)}
        shown = storage.progress

        def count(nbytes: int) -> None:
            # To the user, and to the ranks that wait for this one.
            coordinator.advance(nbytes)
            counter(nbytes)
            if shown is not None:
                shown(nbytes)

        def worked() -> None:
            coordinator.advance(1)
            count(0)  # somebody may want to stop it

        settings["progress"] = count
        if isinstance(storage, NativeWriter):
            settings["worked"] = worked
        settings["memory_budget"] = storage.memory_budget if budget is None else budget
        before = {key: getattr(storage, key) for key in settings}
        try:
            for key, value in settings.items():
                setattr(storage, key, value)
            yield
        finally:
            for key, value in before.items():
                setattr(storage, key, value)

    def close(self) -> None:
        """Wait for the save in the background, and let go of everything that outlives a call.

        An error of that save which nobody has looked at is raised. Groups of processes are shared
        by all that use them; `shardkeep.flush` lets go of those.
        """
        background = self._background
        if background is not None:
            background.close()
            self._background = None
            background.raise_unseen()


def refuse_pin(expect_digest: str | None, checkpoint_id: CheckpointId | None) -> None:
    """Another system's checkpoint is not the one that was pinned."""
    if expect_digest is not None:
        raise CorruptionError(
            f"{checkpoint_id} has no record whose digest could be {expect_digest}: it was written "
            "by another system; this is not the checkpoint that was pinned"
        )


def _where(checkpoint_id: CheckpointId | None, storage: StorageWriter | StorageReader) -> str:
    if checkpoint_id is not None:
        return os.fspath(checkpoint_id)
    return str(getattr(storage, "checkpoint_id", ""))


def _metadata_of(where: str) -> Callable[[str], Metadata]:
    """Reads the metadata of the save with an id, also after `chdir`; never another save's."""
    place = where if "://" in where else os.path.abspath(where)

    def read(save_id: str) -> Metadata:
        reader = find_reader(place)()
        reader.reset(place)
        metadata = reader.read_metadata()
        meta = metadata.storage_meta
        if meta is not None and (meta.save_id or "") != save_id:
            raise StorageError(f"{place} was replaced by another save since", transient=False)
        return metadata

    return read


_in_use: set[int] = set()
_looking = threading.Lock()


@contextlib.contextmanager
def _used(given: object, keyword: str) -> Iterator[None]:
    """One save at a time uses a storage or a planner."""
    if given is None:
        yield
        return
    with _looking:
        if id(given) in _in_use:
            raise PlanError(
                f"the {keyword} is still used by a save that has not ended; wait for its handle, "
                "or pass another one"
            )
        _in_use.add(id(given))
    try:
        yield
    finally:
        _in_use.discard(id(given))


def _decide_overlap(told: list[bytes]) -> list[bytes]:
    """On the coordinator: what becomes of a save, given who is busy."""
    if len({word[:-1] for word in told}) != 1:
        raise PlanError("ranks were asked for saves with different on_overlap")
    busy = any(word.endswith(b"!") for word in told)
    return [told[0][:-1] if busy else b""] * len(told)


def _refuse_scalar(state_dict: object) -> None:
    if not isinstance(state_dict, Mapping) and not hasattr(state_dict, "state_dict"):
        raise UnsupportedValueError(
            f"the state is a {type(state_dict).__qualname__}; save a mapping, such as "
            "{'model': ..., 'step': 1}"
        )


def _refuse_torch(given: Any, expected: type, keyword: str) -> None:
    if given is None or isinstance(given, expected):
        return
    raise TypeError(
        f"{keyword} is a {type(given).__module__}.{type(given).__qualname__}, expected a "
        f"shardkeep.{expected.__name__}; torch's own planner and storage objects do not work under "
        "shardkeep's driver. Under torch's driver they do: see shardkeep.torch.StorageWriter"
    )
