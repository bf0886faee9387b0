# SPDX-License-Identifier: Apache-2.0
"""Ranks of torch.distributed, on any backend.

Control goes over the job's store, on connections and under a prefix of our own; bulk over a gloo
group of our own. That group is not made with `new_group`: its names count the groups a process is
in, so a group that only some ranks make breaks the next one the user makes, and ranks that are in
different numbers of groups could not make one at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed import distributed_c10d as c10d

from shardkeep.errors import PlanError, RankError
from shardkeep.heartbeats import Patience
from shardkeep.planes import FAILED, Bulk, Helper, Part
from shardkeep.ranks import Ranks

__all__ = ["DESTROYED", "TorchRanks", "find_group", "is_alive"]

T = TypeVar("T")

DESTROYED = (
    "the process group that Shardkeep used was destroyed. Call shardkeep.flush() on every rank "
    "before torch.distributed.destroy_process_group(); to go on without a group, pass no_dist=True"
)

CONNECT_S = 60.0
"""How long a connection may take, to the store or between ranks: names are looked up on the way."""

LATE = 0.1
"""How much later than it comes something may be seen, to how long it was waited for: each look is a
request to one store, which all ranks make."""

LAST_WORD_S = 1.0
"""How long a post to a file may take that was locked for long before."""

_NO_TAG = (1 << 31) - 1
"""Of messages that nobody sends."""

_made: Counter[tuple[int, ...]] = Counter()
"""How often this process has made a coordinator for the same ranks: part of its keys, so that none
reads what an earlier one left in the store."""


def find_group(process_group: object) -> dist.ProcessGroup | None:
    """The process group meant by a caller: a group, a mesh of one dimension, or None for all."""
    if process_group is None:
        return dist.group.WORLD
    if isinstance(process_group, dist.ProcessGroup):
        return process_group
    mesh = getattr(dist, "device_mesh", None)
    if mesh is not None and isinstance(process_group, mesh.DeviceMesh):
        if process_group.ndim != 1:
            raise TypeError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions; pass one of "
                "its groups, mesh[name], or a flattened mesh"
            )
        group: dist.ProcessGroup = process_group.get_group()
        return group
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RankError(
            "process_group is the answer of new_group to a process that is not in the group; only "
            "its members make this call"
        )
    return None


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed."""
    return dist.is_initialized() and group in c10d._world.pg_map


def _is_file(store: Any) -> bool:
    """Whether nobody hosts the store."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return isinstance(store, FileStore)


class TorchRanks(Ranks):
    """The ranks of a process group. Rank is the one within the group.

    Made by all of its processes in the same order; belongs to one thread at a time.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        patience: Patience = Patience(),
    ) -> None:
        """Nothing is sent before the first call."""
        group = dist.group.WORLD if process_group is None else process_group
        assert group is not None
        self._group = weakref.ref(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        names = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        session = f"shardkeep/{names}.{_made[ranks]}"
        _made[ranks] += 1
        self._line = _StoreLine(c10d._get_default_store(), session, ranks, patience.gone_s)
        rank = ranks.index(dist.get_rank())
        super().__init__(rank, len(ranks), self._line, self._connect_gloo, timeout_s, patience)

    def call(self, what: str) -> AbstractContextManager[None]:
        """As for any ranks, while there is a group; a call that has begun can do without."""
        group = self._group()
        if self._call is None and (group is None or not is_alive(group)):
            raise PlanError(DESTROYED)
        since = time.monotonic()
        self._line.open()  # with the store in this process, others cannot join while it is stopped
        return self._in_call(since)

    def twin(self) -> TorchRanks:
        """With connections and a gloo group of its own."""
        group = self._group()
        if group is None or not is_alive(group):
            raise PlanError(DESTROYED)
        other = TorchRanks(group, self.timeout_s, self.patience)
        other.memory = self.memory
        return other

    def _connect_gloo(self, name: str) -> Bulk:
        store = self._line.connection(f"bulk/{name}")
        return _GlooBulk(store, self.rank, self.world_size, self.timeout_s)


@dataclass(eq=False)
class _Connections:
    """To the store, from one look for it to the next."""

    asking: Any
    """For what waits for an answer."""
    posting: Any
    lost: Exception | None = None
    """Why it does not answer any more: of these alone, as threads of an earlier call may still wait
    in those before."""

    def hang_up(self) -> None:
        """At once: an error that somebody keeps has frames which have this, and is in here too."""
        self.asking = self.posting = self.lost = None


class _StoreLine:
    """The control plane: two connections to the job's store.

    One is for what waits: its calls run on a thread, because the store's client has no deadline
    when its host is stopped. The other is for posts, which do not wait for an answer. Neither is
    the user's, whose threads may block theirs for half an hour.

    A store that is a file has no host, but a lock that any rank may hold when it is stopped: posts
    run on a thread too.
    """

    def __init__(self, store: Any, session: str, ranks: Sequence[int], gone_s: float) -> None:
        """`ranks` are those of ours among all of the job, whose first holds the store."""
        self._job_store = store
        self._is_file = _is_file(store)
        self._session = session
        self._host = ranks.index(0) if 0 in ranks and not self._is_file else None
        self._gone_s = gone_s
        self._quickest = max(0.001, len(ranks) * 5e-5)
        self._slowest = max(0.05, len(ranks) * 1e-4)
        self._helper = Helper()
        self._poster = Helper(in_order=True) if self._is_file else None
        self._store: _Connections | None = None
        self._known: set[str] = set()

    def connection(self, prefix: str = "") -> Any:
        """A connection of its own to the store, under a prefix."""
        store = self._job_store
        # A clone of a file waits for the lock once more when it is let go of, and all threads of
        # the process with it. An exotic store cannot be cloned.
        if not self._is_file:
            with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
                store = store.clone()
        prefix = f"{self._session}/{prefix}" if prefix else self._session
        return c10d.PrefixStore(prefix, store)

    # --- calls with a deadline

    def open(self) -> None:
        """Connect, the first time and after the store did not answer."""
        if self._store is not None and self._store.lost is None:
            return
        try:
            found = _run_within(
                max(CONNECT_S, self._gone_s),
                lambda: _Connections(self.connection(), self.connection()),
                self._helper,
            )
        except (RuntimeError, OSError) as error:
            raise self._gone(error) from error
        if self._store is not None:
            self._store.hang_up()
        self._store = found

    def _ask(self, work: Callable[[Any], T]) -> T:
        store = self._opened()
        if store.lost is not None:
            raise self._gone(store.lost)
        try:
            return _run_within(self._gone_s, lambda: work(store.asking), self._helper)
        except (RuntimeError, OSError) as error:
            raise self._lose(store, error) from error

    def _opened(self) -> _Connections:
        assert self._store is not None, "there is a connection in every call"
        return self._store

    def _lose(self, store: _Connections, error: Exception) -> RankError:
        store.lost = error
        return self._gone(error)

    def _gone(self, error: Exception) -> RankError:
        who = "global rank 0 (store host)"
        if self._host is not None:
            who = f"rank {self._host} (store host)"
        elif self._is_file:
            who = "a rank that has locked the file of the job's store"
        lost = RankError(
            f"{who} is gone: the job's store does not answer",
            failures={} if self._host is None else {self._host: "gone: store host"},
        )
        lost.add_note(f"{type(error).__qualname__}: {error}")
        return lost

    # --- the plane

    def set(self, key: str, value: bytes) -> None:
        """Post without waiting for an answer; to a store that is lost too, which may come back."""
        store = self._opened()
        try:
            if self._poster is None:
                store.posting.set(key, value)
                return
            # In order: an old beat must not follow the last one once the lock is free.
            post = functools.partial(store.posting.set, key, value)
            _run_within(self._gone_s if store.lost is None else LAST_WORD_S, post, self._poster)
        except (RuntimeError, OSError) as error:
            raise self._lose(store, error) from error

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """Look at growing intervals; the store's own waits write to the user's terminal."""
        for _ in self._until(timeout_s):
            if self._ask(lambda store: store.check([key])):
                return self._ask(lambda store: bytes(store.get(key)))
        return None

    def _until(self, timeout_s: float) -> Any:
        begun = time.monotonic()
        while True:
            yield
            waited = time.monotonic() - begun
            if waited >= timeout_s:
                return
            pause = min(max(self._quickest, LATE * waited), self._slowest)
            time.sleep(min(pause, timeout_s - waited))

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """One request for what is known to exist, one for each other key."""

        def read(store: Any) -> list[bytes | None]:
            self._known.update(k for k in keys if k not in self._known and store.check([k]))
            there = [key for key in keys if key in self._known]
            values = store.multi_get(there) if there else []
            found = dict(zip(there, map(bytes, values), strict=True))
            return [found.get(key) for key in keys]

        return self._ask(read)

    def claim(self, key: str, value: bytes) -> bytes:
        """Atomic on every store."""

        def settle(store: Any) -> bytes | None:
            if store.add(f"{key}?", 1) == 1:
                store.set(key, value)
                return value
            return None

        mine = self._ask(settle)
        if mine is not None:
            return mine
        standing = self.get(key, self._gone_s)
        if standing is None:
            lost = TimeoutError(f"{key} was claimed but not posted")
            raise self._lose(self._opened(), lost)
        return standing

    def add(self, key: str, amount: int) -> int:
        """Counters of the store are 64 bits wide."""
        return self._ask(lambda store: int(store.add(key, amount)))

    def count(self, key: str, enough: int, timeout_s: float) -> int:
        """Look at growing intervals."""
        total = 0
        for _ in self._until(timeout_s):
            total = self.add(key, 0)
            if total % FAILED >= enough:
                break
        return total

    def forget(self, keys: Sequence[str]) -> None:
        """Where the store can; others grow."""

        def delete(store: Any) -> None:
            with contextlib.suppress(NotImplementedError):
                for key in keys:
                    store.delete_key(key)
                    store.delete_key(f"{key}?")

        self._known.difference_update(keys)
        self._ask(delete)

    def close(self) -> None:
        """Hang up; `open` begins anew."""
        self._helper.stop()
        if self._poster is not None:
            self._poster.stop()
        if self._store is not None:
            self._store.hang_up()
        self._store = None


def _run_within(limit_s: float, work: Callable[[], T], helper: Helper) -> T:
    deadline = time.monotonic() + limit_s
    waited = 0.0
    tick_s = min(1.0, limit_s / 6)

    def tick() -> None:
        # Counted in ticks: a process that was itself stopped has not waited.
        nonlocal waited
        waited += tick_s
        if waited >= limit_s and time.monotonic() >= deadline:
            raise TimeoutError(f"no answer within {limit_s:g} s")

    return helper.run(work, tick, tick_s)


def _waiting(work: Callable[..., T]) -> Callable[..., T]:
    """Of a group, what may wait for other ranks. After an error nobody knows who still does."""

    @functools.wraps(work)
    def wait(bulk: _GlooBulk, *args: Any) -> T:
        bulk._is_busy = True
        result = work(bulk, *args)
        bulk._is_busy = False
        return result

    return wait


class _GlooBulk:
    """The bulk plane: a gloo group that torch's registry of groups does not know."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._rank = rank
        self._world = world_size
        self._group: Any = dist.ProcessGroupGloo(
            # Heartbeats find who is gone or stuck; this is for a network that loses bytes.
            store,
            rank,
            world_size,
            timedelta(seconds=max(timeout_s, CONNECT_S)),
        )
        self._tags = itertools.count()
        self._is_busy = False
        """Whether somebody waits in it."""

    @_waiting
    def gather(self, data: bytes) -> list[bytes] | None:
        """Sizes, then bytes, each rank to the coordinator."""
        if self._rank != 0:
            self._send(data, [0])
            return None
        received = self._receive(range(1, self._world))
        return [data, *received]

    @_waiting
    def scatter(self, parts: Sequence[bytes] | None) -> bytes:
        """Sizes, then bytes, from the coordinator to each rank."""
        if self._rank != 0:
            return self._receive([0])[0]
        assert parts is not None
        size_tag, tag = next(self._tags), next(self._tags)
        sizes = [torch.tensor([len(part)]) for part in parts]
        tensors = [_tensor(part) for part in parts]
        works = []
        for rank in range(1, self._world):
            works.append(self._group.send([sizes[rank]], rank, size_tag))
            if len(parts[rank]):
                works.append(self._group.send([tensors[rank]], rank, tag))
        for work in works:
            work.wait()
        return parts[0]

    def _send(self, data: bytes, to: Sequence[int]) -> None:
        size_tag, tag = next(self._tags), next(self._tags)
        size, tensor = torch.tensor([len(data)]), _tensor(data)
        for rank in to:
            self._group.send([size], rank, size_tag).wait()
            if len(data):
                self._group.send([tensor], rank, tag).wait()

    def _receive(self, sources: Sequence[int]) -> list[bytes]:
        size_tag, tag = next(self._tags), next(self._tags)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in sources]
        works = [
            self._group.recv([size], rank, size_tag)
            for size, rank in zip(sizes, sources, strict=True)
        ]
        for work in works:
            work.wait()
        tensors = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
        works = [
            self._group.recv([tensor], rank, tag)
            for tensor, rank in zip(tensors, sources, strict=True)
            if tensor.numel()
        ]
        for work in works:
            work.wait()
        return [tensor.numpy().tobytes() for tensor in tensors]

    @_waiting
    def broadcast(self, data: bytes | None) -> bytes:
        """Down a tree."""
        size = torch.tensor([0 if data is None else len(data)])
        self._group.broadcast([size], _from_first()).wait()
        tensor = _tensor(data) if data is not None else torch.empty(int(size), dtype=torch.uint8)
        if tensor.numel():
            self._group.broadcast([tensor], _from_first()).wait()
        return data if data is not None else tensor.numpy().tobytes()

    @_waiting
    def exchange(self, parts: Sequence[Part], sizes: Sequence[int]) -> list[Part]:
        """Only between ranks that have something for each other; no bytes are copied here."""
        tag = next(self._tags)
        others = [rank for rank in range(self._world) if rank != self._rank]
        come = {rank: torch.empty(sizes[rank], dtype=torch.uint8) for rank in others}
        works = [self._group.recv([come[rank]], rank, tag) for rank in others if sizes[rank]]
        works += [
            self._group.send([torch.from_numpy(parts[rank])], rank, tag)
            for rank in others
            if len(parts[rank])
        ]
        for work in works:
            work.wait()
        return [
            parts[rank] if rank == self._rank else come[rank].numpy() for rank in range(self._world)
        ]

    def close(self) -> None:
        """End the group; whoever waits in it gets an error."""
        # Not kept: the traceback of an error, which may be kept for long, leads here.
        group, self._group = self._group, None
        if self._is_busy:
            # `abort` wakes nobody who waits for a rank that is stopped. A wait that runs out of
            # time does: gloo then closes all connections of the group. One for a rank that has
            # hung up fails before that, and closes nothing.
            nothing = torch.empty(1, dtype=torch.uint8)
            for other in range(self._world):
                if other != self._rank:
                    with contextlib.suppress(Exception):
                        group.recv([nothing], other, _NO_TAG).wait(timedelta(milliseconds=1))
        with contextlib.suppress(Exception):
            group.abort()


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
