# SPDX-License-Identifier: Apache-2.0
"""Loads of `torch.distributed.checkpoint` from the native format."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as dcp_planner
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.filesystem import FileSystem

from shardkeep.collector import CollectorPause, paused_collector
from shardkeep.coordination import Coordinator
from shardkeep.engine.budget import checked_budget
from shardkeep.engine.passing import pass_on
from shardkeep.engine.read_once import make_window
from shardkeep.engine.reading import Reading
from shardkeep.engine.shares import Share, plan_shares
from shardkeep.engine.windows import Window
from shardkeep.errors import CheckpointNotFoundError, StorageError
from shardkeep.formats.native.reader import NativeReader
from shardkeep.groups import coordinator_for
from shardkeep.planner import ReadItems
from shardkeep.storage import ReadOnce
from shardkeep.torch.announcing import Intent, SharedReads, take_word
from shardkeep.torch.neighbours import ranks_on_host, world_size
from shardkeep.torch.objects import decode_object, stream_of
from shardkeep.torch.reading import Targets, read_items
from shardkeep.torch.stored import stored_metadata

__all__ = ["StorageReader"]

_TENSOR = dcp_planner.LoadItemType.TENSOR


class StorageReader(dcp_storage.StorageReader):
    """Reads the native format under torch's own `load`, whoever saved it.

    Takes the place of `torch.distributed.checkpoint.FileSystemReader`. Every byte is checked, and
    nothing that is stored is run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        verify: bool = True,
        expect_digest: str | None = None,
        memory_budget: int | None = None,
        read_once: ReadOnce = "auto",
        process_group: Any = None,
    ) -> None:
        """`verify`, `expect_digest` and `memory_budget` as in `shardkeep.load`.

        What several ranks of one machine want is read by one of them, where that is worth it; with
        `read_once=False` never. With `True` always, also between machines, over a group of our own:
        all ranks of `process_group`, which must be the one that `load` is given, take part.
        `_extension_registry` is torch's and changes nothing: the native format has no extensions.
        """
        super().__init__()
        self.fs = FileSystem()
        self.path = Path(path)
        self.verify = verify
        self.expect_digest = expect_digest
        self.memory_budget = memory_budget
        self.read_once = read_once
        self.process_group = process_group
        self.stats: dict[str, float] = {}
        """What the last load read, as in `LoadResult.stats`."""
        self.load_id = str(uuid.uuid4())
        self.storage_data: Any = {}
        self.rank: int | None = None
        self.use_collectives = True
        self._native: NativeReader | None = None
        self._metadata: dcp.Metadata | None = None
        self._planned: str | None = None  # the record that the plan is about, by its digest
        self._alone = False
        self._window: Window | None = None  # through which others will see what this rank reads
        self._looked_up: tuple[list[dcp_planner.ReadItem], ReadItems] | None = None
        self._planning = CollectorPause()
        """While torch plans: an object or two for each tensor, on each rank."""

    def __getstate__(self) -> dict[str, Any]:
        """Without open files."""
        gone = dict.fromkeys(("_native", "_metadata", "_window", "_looked_up"))
        return {**self.__dict__, **gone, "storage_data": {}}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """Where it reads."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path; not a URL."""
        return "://" not in os.fspath(checkpoint_id) and FileSystem.validate_checkpoint_id(
            checkpoint_id
        )

    # --- the calls of torch's driver, in order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load."""
        self._planning.end()
        self._native = self._metadata = None  # whoever has the metadata may still look at it
        self._planned, self._alone = None, False
        self._looked_up = None
        self._close_window()
        self.storage_data = {}
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """What is stored; chunks become objects when a planner looks at them."""
        if kwargs.get("rank") is not None:
            # Torch's driver asks when the checkpoint itself cannot be read; see its other error.
            raise CheckpointNotFoundError(f"{self.path} holds no checkpoint of one rank alone")
        self.reset()
        native = NativeReader(
            self.path,
            verify=self.verify,
            expect_digest=self.expect_digest,
            memory_budget=self.memory_budget,
        )
        with paused_collector():
            metadata = stored_metadata(native.read_metadata(), native.close)
        self._native, self._metadata = native, metadata
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take this rank's place."""
        self.storage_data = metadata.storage_data
        self.rank = kwargs.get("rank")
        self.use_collectives = kwargs.get("use_collectives", True)
        self._planning.begin()

    def prepare_local_plan(self, plan: dcp_planner.LoadPlan) -> dcp_planner.LoadPlan:
        """Say which record this rank has opened, and what it will read."""
        native = self._native
        if native is None:
            return plan
        self._planned = native.record.digest
        wants = self._wants(native, plan) if self.read_once == "auto" and world_size() > 1 else b""
        return dataclasses.replace(plan, storage_data=Intent(self._planned, wants))

    def _wants(self, native: NativeReader, plan: dcp_planner.LoadPlan) -> bytes:
        """For `plan_shares`, with a window through which others see what this rank reads."""
        budget = checked_budget(self.memory_budget, ranks_on_host(world_size()))
        self._window = make_window(budget)
        if self._window is None:
            return b""
        items = _tensor_items(plan)
        read = read_items(items, native.index.state)
        self._looked_up = items, read
        return native.wants(read, budget, self._window.address)

    def prepare_global_plan(self, plans: list[dcp_planner.LoadPlan]) -> list[dcp_planner.LoadPlan]:
        """Refuse ranks that have opened different records; plan what ranks read for each other."""
        self._alone = len(plans) == 1  # also with `no_dist`, whatever group there is
        told = {
            rank: plan.storage_data
            for rank, plan in enumerate(plans)
            if isinstance(plan.storage_data, Intent)  # a planner may drop it
        }
        first = min(told, default=0)
        others = [rank for rank, one in told.items() if one.digest != told[first].digest]
        if others:
            raise self._replaced(
                f"rank {others[0]} has opened another save than rank {first} "
                f"({len(others)} of {len(plans)} ranks have). Ranks that load checkpoints of "
                "their own do so with no_dist=True"
            )
        wants = [one.wants for one in told.values() if one.wants]
        if self._alone or len(wants) < len(plans):
            shares = [b""] * len(plans)
        else:
            shares = plan_shares(wants, "auto", messages=False)
        return [
            dataclasses.replace(plan, storage_data=SharedReads(share))
            for plan, share in zip(plans, shares, strict=True)
        ]

    def _replaced(self, how: str) -> StorageError:
        return StorageError(
            f"{self.path} was replaced while being read; load again: {how}", transient=True
        )

    def read_data(
        self, plan: dcp_planner.LoadPlan, planner: dcp_planner.LoadPlanner
    ) -> torch.futures.Future[None]:
        """Objects first: they are small, and may still refuse the load. Then all tensors."""
        try:
            share = self._share(take_word(SharedReads, plan.storage_data))
            if self.read_once is True and world_size() > 1 and not self._alone:
                coordinator = coordinator_for(self.process_group)
                with coordinator.call("load"):
                    self._read(plan, planner, coordinator, None)
            else:
                self._read(plan, planner, None, share)
        finally:
            self._planning.end_soon()
            self._close_window()  # others need not wait for what it would have shown
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    def _share(self, word: SharedReads | None) -> Callable[[Reading], None] | None:
        """Takes what others have read, and passes on what this rank has to read for them."""
        window = self._window
        if word is None or not word.share or window is None:
            return None
        share = Share.decode(word.share)
        if not share.rounds or share.windows[share.member] != window.address:
            return None  # nothing to share, or a word about another load
        return lambda reading: pass_on(share, reading, window)

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            window.close()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[NativeReader]:
        """What the plan is about; opened again where it was let go of."""
        planned, alone = self._planned, self._alone
        if self._native is None:
            window, self._window = self._window, None
            self.read_metadata()
            self._planned, self._alone, self._window = planned, alone, window
        native, held = self._native, self._metadata  # with the metadata, the index would be closed
        self._native = self._metadata = None
        assert native is not None
        native.ranks_on_host = ranks_on_host(world_size())
        try:
            if planned not in (None, native.record.digest):
                raise self._replaced("it is another save than the one that was planned")
            yield native
        finally:
            self.stats = dict(native.stats)
            native.release()
            del held

    def _read(
        self,
        plan: dcp_planner.LoadPlan,
        planner: dcp_planner.LoadPlanner,
        coordinator: Coordinator | None,
        passing: Callable[[Reading], None] | None,
    ) -> None:
        items = _tensor_items(plan)
        made: list[tuple[NativeReader, ReadItems, list[torch.Tensor], Targets]] = []
        with contextlib.ExitStack() as stack:

            @torch.no_grad()
            @paused_collector()  # targets are many objects without cycles
            def prepare() -> None:
                native = stack.enter_context(self._opened())
                self._read_objects(native, plan, planner)
                made.append((native, *_targets(native, items, self._where(native, items), planner)))

            if coordinator is None:
                prepare()
            else:
                coordinator.agree("prepare", prepare)  # or others would wait for who could not
            native, read, tensors, targets = made[0]
            native.read_tensors(
                read,
                targets.sink,
                targets.places,
                targets.staging,
                coordinator,
                self.read_once,
                passing,
            )
            for item, tensor in zip(items, tensors, strict=True):
                planner.commit_tensor(item, tensor)

    def _where(self, native: NativeReader, items: list[dcp_planner.ReadItem]) -> ReadItems:
        """Which chunks the items are of; mostly this was looked up while all ranks planned."""
        known, self._looked_up = self._looked_up, None
        if known is not None and known[0] == items:
            return known[1]
        return read_items(items, native.index.state)

    def _read_objects(
        self,
        native: NativeReader,
        plan: dcp_planner.LoadPlan,
        planner: dcp_planner.LoadPlanner,
    ) -> None:
        items = [item for item in plan.items if item.type != _TENSOR]
        targets = getattr(planner, "state_dict", None)
        known = targets if isinstance(targets, dict) else {}

        def deliver(at: int, data: bytes) -> None:
            item = items[at]
            value = decode_object(data, item.storage_index.fqn, known.get(item.dest_index.fqn))
            planner.load_bytes(item, stream_of(value))

        native.read_values([item.storage_index.fqn for item in items], deliver)


def _tensor_items(plan: dcp_planner.LoadPlan) -> list[dcp_planner.ReadItem]:
    """Nothing is read for an empty tensor."""
    return [item for item in plan.items if item.type == _TENSOR and 0 not in item.lengths]


def _targets(
    native: NativeReader,
    items: list[dcp_planner.ReadItem],
    read: ReadItems,
    planner: dcp_planner.LoadPlanner,
) -> tuple[ReadItems, list[torch.Tensor], Targets]:
    """What is read, and the planner's tensors it goes to."""
    tensors = [planner.resolve_tensor(item).detach() for item in items]
    for item, tensor in zip(items, tensors, strict=True):
        if tensor.size() != item.lengths:
            raise AssertionError(
                f"{item.dest_index.fqn}: the planner asks for shape {tuple(item.lengths)} and "
                f"gives a tensor of shape {tuple(tensor.size())}: mismatch sizes"
            )
    targets = Targets(items, tensors, read)
    targets.check_ties(native.same_content)
    return read, tensors, targets
