# SPDX-License-Identifier: Apache-2.0
"""An opened checkpoint: lazy, sliceable, no model and no ranks needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from shardkeep import values
from shardkeep.arrays import HostSink, Sink, adapter_named
from shardkeep.columns import Boxes
from shardkeep.dtypes import DType
from shardkeep.errors import FormatError, StorageError, UnsupportedValueError
from shardkeep.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from shardkeep.planner import ReadItems
from shardkeep.reads import plan_reads
from shardkeep.structure import Structure, dotted, key_identity
from shardkeep.tables import StateColumns

if TYPE_CHECKING:
    import torch

    from shardkeep.formats.native.verifying import VerifyReport

__all__ = ["Checkpoint", "SubView", "TensorView"]

Array = npt.NDArray[Any]
As = Literal["numpy", "torch"]
MAX_PICKED = 1 << 16
"""Rows picked one by one; more are read as the range they lie in."""


class OpenReader(Protocol):
    """What an open checkpoint asks of the reader under it."""

    checkpoint_id: str
    """The name the caller gave."""

    @property
    def system(self) -> str:
        """Who wrote the checkpoint."""

    @property
    def digest(self) -> str | None:
        """Of the record, if there is one."""

    @property
    def save_id(self) -> str | None:
        """The save that wrote it, if that has a name."""

    @property
    def user_metadata(self) -> Mapping[str, Any]:
        """What was kept beside the state."""

    @property
    def root(self) -> Path:
        """Where it lies, absolute."""

    def read_metadata(self) -> Metadata:
        """What is stored."""

    def read_values(self, names: Sequence[str], deliver: Callable[[int, bytes], None]) -> None:
        """Read values by name; `deliver(i, data)` gets the encoding of the i-th."""

    def read_tensors(self, items: ReadItems, sink: Callable[[int], Sink]) -> int:
        """Read every region into its sink."""

    def close(self) -> None:
        """Let go of files."""


class TensorView:
    """One stored tensor; nothing is read before it is indexed."""

    def __init__(self, checkpoint: Checkpoint, name: str, row: int) -> None:
        """Made by `Checkpoint`."""
        tensors = checkpoint._state.tensors
        self._checkpoint = checkpoint
        self.name = name
        self.shape: tuple[int, ...] = tensors.shape(row)
        self._dtype: DType = tensors.dtype(row)

    @property
    def dtype(self) -> str:
        """Name of the element type."""
        return self._dtype.name

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self._dtype.itemsize

    @property
    def metadata(self) -> TensorStorageMetadata:
        """Its properties and stored boxes."""
        found = self._checkpoint._state[self.name]
        assert isinstance(found, TensorStorageMetadata)
        return found

    def __len__(self) -> int:
        """Extent of the first dimension."""
        if not self.shape:
            raise TypeError("a 0-d tensor has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        """What it is, not what it holds."""
        return f"TensorView({self.name!r}, shape={self.shape}, dtype={self.dtype})"

    def numpy(self) -> Array:
        """All of it."""
        return self[...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """For `np.asarray(view)`."""
        return self[...] if dtype is None else self[...].astype(dtype)

    def torch(self, index: Any = ...) -> torch.Tensor:
        """All of it, or the part `index` selects, as a torch tensor of the stored dtype."""
        part = np.asarray(self[index])
        bits = np.ascontiguousarray(part).view(self._dtype.bits())
        # numpy makes a contiguous 0-d array 1-d.
        made = adapter_named("torch").from_numpy(bits.reshape(part.shape), self._dtype)
        return made  # type: ignore[return-value]

    def __getitem__(self, index: Any) -> Array:
        """Read a part: integers, slices, `...`, or a list of indices in one dimension."""
        picks, squeeze = _picks(index, self.shape)
        out = np.empty([len(p) for p in picks], self._dtype.to_numpy())
        sink = HostSink(out.view(self._dtype.bits()), self._dtype)
        if out.size:
            self._checkpoint._read(_wanted(self.name, picks, sink))
        done = out[tuple(0 if dim in squeeze else slice(None) for dim in range(self.ndim))]
        return done


def _picks(index: Any, shape: Sequence[int]) -> tuple[list[Sequence[int]], set[int]]:
    """For each dimension the indices wanted, and which dimensions vanish."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if sum(part is Ellipsis for part in parts) > 1 or any(part is None for part in parts):
        raise IndexError("an index may hold one ... and no None")
    given = len(parts) - (Ellipsis in [p for p in parts if not isinstance(p, (list, np.ndarray))])
    if given > len(shape):
        raise IndexError(f"{given} indices for {len(shape)} dimensions")
    filler = [slice(None)] * (len(shape) - given)
    full: list[Any] = []
    for part in parts:
        full += filler if part is Ellipsis else [part]
    full += [slice(None)] * (len(shape) - len(full))
    picks: list[Sequence[int]] = []
    squeeze = set()
    for dim, (part, n) in enumerate(zip(full, shape, strict=True)):
        if isinstance(part, slice):
            picks.append(range(*part.indices(n)))
        elif isinstance(part, (list, np.ndarray)):
            if isinstance(part, np.ndarray) and part.ndim != 1:
                raise IndexError(f"dimension {dim}: an array of indices must have one dimension")
            picks.append([_checked_index(i, n, dim) for i in part])
        else:
            picks.append([_checked_index(part, n, dim)])
            squeeze.add(dim)
    lists = sum(isinstance(p, list) and d not in squeeze for d, p in enumerate(picks))
    if lists > 1 or (lists and squeeze):
        # numpy's order of dimensions is hard to foresee there: better to ask for less.
        raise IndexError("a list of indices goes with slices only, and in one dimension")
    return picks, squeeze


def _checked_index(index: Any, n: int, dim: int) -> int:
    if isinstance(index, (bool, np.bool_)) or not hasattr(index, "__index__"):
        raise IndexError(
            f"index {index!r} in dimension {dim}: integers, slices, ... and lists of integers work"
        )
    at = index.__index__()
    if not -n <= at < n:
        raise IndexError(f"index {at} is out of range for dimension {dim} of size {n}")
    return int(at % n)


def _runs(picks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut the wanted indices of a dimension into (first index, length, place in the result)."""
    if isinstance(picks, range) and picks.step == 1:
        return [(picks.start, len(picks), 0)] if len(picks) else []
    runs: list[tuple[int, int, int]] = []
    for place, index in enumerate(picks):
        if runs and runs[-1][0] + runs[-1][1] == index:
            first, length, at = runs[-1]
            runs[-1] = (first, length + 1, at)
        else:
            runs.append((index, 1, place))
    return runs


def _wanted(
    name: str, picks: Sequence[Sequence[int]], sink: HostSink
) -> list[tuple[str, ChunkStorageMetadata, Sink]]:
    """Boxes that cover the selection: stepped dimensions are cut into runs."""
    boxes: list[tuple[list[int], list[int], list[slice]]] = [([], [], [])]
    for pick in picks:
        boxes = [
            ([*low, first], [*size, length], [*place, slice(at, at + length)])
            for low, size, place in boxes
            for first, length, at in _runs(pick)
        ]
        if len(boxes) > MAX_PICKED:
            raise IndexError(
                f"this index picks more than {MAX_PICKED} separate pieces; read a range and index "
                "the result"
            )
    return [
        (
            name,
            ChunkStorageMetadata(tuple(low), tuple(size)),
            HostSink(sink.array[tuple(place)] if place else sink.array, sink.dtype),
        )
        for low, size, place in boxes
    ]


class SubView(Mapping[Any, Any]):
    """A container of the stored state: keys to tensors, values and further containers."""

    def __init__(self, checkpoint: Checkpoint, path: tuple[Any, ...]) -> None:
        """Made by `Checkpoint`."""
        self._checkpoint = checkpoint
        self._path = path
        self._keys = checkpoint._children(path)

    def __getitem__(self, key: Any) -> Any:
        """One child."""
        return self._checkpoint._at((*self._path, key))

    def __iter__(self) -> Iterator[Any]:
        """Keys in their stored order."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Number of children."""
        return len(self._keys)

    def __repr__(self) -> str:
        """Its keys, at most a few."""
        shown = ", ".join(map(repr, self._keys[:6]))
        return f"SubView({dotted(self._path)!r}: {shown}{', ...' * (len(self) > 6)})"

    def state_dict(self, as_: As = "numpy") -> Any:
        """This part of the state, with its exact nesting."""
        return self._checkpoint._build(self._path, as_)


class Checkpoint(Mapping[str, Any]):
    """A committed checkpoint, read lazily. A mapping from name to tensor view or value."""

    def __init__(self, reader: OpenReader, *, allow_pickle: bool = False) -> None:
        """Made by `shardkeep.open`."""
        self._reader = reader
        self._allow_pickle = allow_pickle
        self.metadata: Metadata = reader.read_metadata()
        state = self.metadata.state_dict_metadata
        assert isinstance(state, StateColumns)
        self._state = state
        structure = self.metadata.planner_data
        assert structure is not None
        structure.look()
        self.structure = structure

    # --- what there is

    @property
    def system(self) -> str:
        """Who wrote it: `"Shardkeep"`, or the name of another system."""
        return self._reader.system

    @property
    def digest(self) -> str | None:
        """Digest of the commit record; keep it elsewhere to pin this checkpoint.

        None for those of other systems, which have none.
        """
        return self._reader.digest

    @property
    def save_id(self) -> str | None:
        """The save that wrote it; None for those of other systems."""
        return self._reader.save_id

    @property
    def user_metadata(self) -> Mapping[str, Any]:
        """What `save(..., user_metadata=...)` was given, or another system kept beside a state."""
        return self._reader.user_metadata

    @property
    def path(self) -> str:
        """Where it lies."""
        return self._reader.checkpoint_id

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, ties counted once."""
        tensors = self._state.tensors
        stored = tensors.alias_of < 0
        return int((tensors.volumes * tensors.itemsize)[stored].sum())

    def __iter__(self) -> Iterator[str]:
        """Every name, in the order of the saved state."""
        return iter(self.structure.names)

    def __len__(self) -> int:
        """Number of names."""
        return len(self.structure.names)

    def __contains__(self, key: object) -> bool:
        """Whether a name, or a container, is there."""
        if isinstance(key, tuple):
            try:
                self._node(key)
            except KeyError:
                return False
            return True
        known = key in self._state.tensors.row_of or key in self._state.values_table.row_of
        return known or key in self._containers

    def find(self, pattern: str) -> list[str]:
        """Names that match a glob such as `"model.*.weight"`."""
        return [name for name in self if fnmatchcase(name, pattern)]

    def __getitem__(self, key: Any) -> Any:
        """By name: a `TensorView`, a value, or a `SubView`; by path: `ckpt["model", 7]`."""
        if isinstance(key, tuple):
            return self._at(key)
        row = self._state.tensors.row_of.get(key)
        if row is not None:
            return TensorView(self, key, row)
        if key in self._state.values_table.row_of:
            return self._value(key)
        return SubView(self, self._containers[key])

    def state_dict(self, as_: As = "numpy") -> Any:
        """Everything, with its exact nesting; what was `PerRank` comes as a dict by rank."""
        return self._build((), as_)

    def verify(self) -> VerifyReport:
        """Read every byte of every file and check it; see `VerifyReport`."""
        from shardkeep.formats.native.verifying import verify_checkpoint

        if self.digest is None:
            raise FormatError(
                f"{self.path} was written by {self.system}, which keeps no digests that could be "
                "compared; shardkeep convert makes a checkpoint that has them"
            )
        report = verify_checkpoint(self._reader.root)
        if report.ok and report.digest != self.digest:
            raise StorageError(f"{self.path} was replaced since it was opened; open it again")
        return report

    def close(self) -> None:
        """Let go of files."""
        self._reader.close()

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Where it is and how much."""
        return f"Checkpoint({self.path!r}, {len(self)} names, {self.nbytes} bytes)"

    # --- for the views

    @cached_property
    def _nodes(self) -> dict[tuple[Any, ...], Any]:
        """Every container and leaf by the identities of its path."""
        nodes: dict[tuple[Any, ...], Any] = {}
        pending: list[tuple[tuple[Any, ...], Any]] = [((), self.structure.root)]
        while pending:
            path, node = pending.pop()
            nodes[path] = node
            if type(node) is not int:
                keys = range(len(node[2])) if node[1] is None else node[1]
                pairs = zip(keys, node[2], strict=True)
                pending += [((*path, key_identity(key)), child) for key, child in pairs]
        return nodes

    @cached_property
    def _containers(self) -> dict[str, tuple[Any, ...]]:
        """Dotted name of each container to its path; the first one where several share it."""
        found: dict[str, tuple[Any, ...]] = {}
        pending: deque[tuple[tuple[Any, ...], Any]] = deque([((), self.structure.root)])
        while pending:
            path, node = pending.popleft()
            if type(node) is not int:
                if path:
                    found.setdefault(dotted(path), path)
                keys = range(len(node[2])) if node[1] is None else node[1]
                pending += [((*path, k), c) for k, c in zip(keys, node[2], strict=True)]
        return found

    def _node(self, path: tuple[Any, ...]) -> Any:
        try:
            return self._nodes[tuple(map(key_identity, path))]
        except UnsupportedValueError:
            raise KeyError(path) from None

    def _children(self, path: tuple[Any, ...]) -> list[Any]:
        _, keys, children, _ = self._node(path)
        return list(range(len(children))) if keys is None else list(keys)

    def _at(self, path: tuple[Any, ...]) -> Any:
        node = self._node(path)
        if type(node) is not int:
            return SubView(self, path)
        return self[self._name_of(path)]

    @cached_property
    def _paths(self) -> dict[tuple[Any, ...], str]:
        """Typed path of each leaf to its name."""
        pairs = zip(self.structure.paths, self.structure.names, strict=True)
        return {tuple(map(key_identity, path)): name for path, name in pairs}

    def _name_of(self, path: tuple[Any, ...]) -> str:
        return self._paths[tuple(map(key_identity, path))]

    def _value(self, name: str) -> object:
        found: list[bytes] = []
        self._reader.read_values([name], lambda _, data: found.append(data))
        return values.decode(found[0], allow_pickle=self._allow_pickle)

    def _read(self, wanted: Sequence[tuple[str, ChunkStorageMetadata, Sink]]) -> None:
        names, boxes = [name for name, _, _ in wanted], [box for _, box, _ in wanted]
        items = plan_reads(self._state, names, Boxes.of(boxes))
        self._reader.read_tensors(items, lambda number: wanted[number][2])

    def _build(self, path: tuple[Any, ...], as_: As) -> Any:
        """Read a part of the tree in one go."""
        if as_ not in ("numpy", "torch"):
            raise ValueError(f"as_ is {as_!r}; use 'numpy' or 'torch'")
        adapter = adapter_named(as_)
        part = Structure(self._node(path))
        names = [self._name_of((*path, *inner)) for inner in part.paths] if path else list(self)
        tensors = self._state.tensors
        arrays: dict[int, Any] = {}
        wanted: list[tuple[str, ChunkStorageMetadata, Sink]] = []
        value_names = []
        for name in names:
            row = tensors.row_of.get(name)
            if row is None:
                value_names.append(name)
                continue
            stored = tensors.stored_row(row)
            if stored in arrays:
                continue
            dtype, shape = tensors.dtype(stored), tensors.shape(stored)
            bits = np.empty(shape, dtype.bits())
            if as_ == "torch":
                arrays[stored] = adapter.from_numpy(bits, dtype)
            else:
                arrays[stored] = bits.view(dtype.to_numpy())
            if bits.size:
                box = ChunkStorageMetadata((0,) * len(shape), shape)
                wanted.append((tensors.names[stored], box, HostSink(bits, dtype)))
        decoded: dict[str, object] = {}
        self._reader.read_values(
            value_names,
            lambda at, data: decoded.__setitem__(
                value_names[at], values.decode(data, allow_pickle=self._allow_pickle)
            ),
        )
        self._read(wanted)

        def leaf(number: int) -> object:
            row = tensors.row_of.get(names[number])
            return decoded[names[number]] if row is None else arrays[tensors.stored_row(row)]

        return part.build(leaf)
