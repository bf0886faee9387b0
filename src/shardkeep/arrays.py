# SPDX-License-Identifier: Apache-2.0
"""The seam between the core and the array libraries.

An adapter says what this rank holds of an array (`form`, `sources`), and where loaded bytes go
(`target`). Between the two there are only boxes, dtypes, sources and sinks. Adapters are found by
the module an array's class comes from and imported on first need: the core imports no framework.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from operator import add, is_not
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from shardkeep.boxes import flat_range_boxes
from shardkeep.dtypes import DType
from shardkeep.memory import Addresses, Memory, Spans, address_of
from shardkeep.metadata import ChunkStorageMetadata, TensorProperties

__all__ = [
    "YIELDING",
    "ArrayAdapter",
    "ArrayForm",
    "ArrayParts",
    "FlatSink",
    "HostPlaces",
    "HostSink",
    "HostSource",
    "LocalTarget",
    "NotComposite",
    "PartSink",
    "Sink",
    "SinkPiece",
    "Source",
    "StagedSink",
    "StagedSource",
    "Staging",
    "Stepped",
    "TargetsApart",
    "Unstepped",
    "adapter_of",
    "adapters_of",
    "ask_each",
    "region",
    "settle_all",
    "source_parts",
]

Bytes = npt.NDArray[np.uint8]


SMALL_STAGED = 512 << 10
"""Bytes up to which arrays on a device travel together: a copy takes less than to ask for it."""


class Staging(Protocol):
    """How elements on a device travel: through which memory, and when they have arrived."""

    def allocate(self, nbytes: int) -> Bytes:
        """Memory of whole pages that the device copies from and to."""

    def release(self, buffer: Bytes) -> None:
        """Take back what `allocate` gave and nothing copies from or to, for who asks next."""

    def begin_gather(self, sources: Sequence[StagedSource], out: Bytes) -> None:
        """`begin_read` of the whole of many small sources, which fill `out` end to end."""

    def begin_scatter(self, data: Bytes, parts: Sequence[SmallPart]) -> Sequence[SmallPart]:
        """`begin_put` of many small parts of `data`; gives back those that cannot."""

    def fence(self) -> Callable[[], None]:
        """A wait, to be called on any thread, for the copies that this thread has begun so far."""

    def arrival(self) -> Callable[[], bool]:
        """Says whether all that this thread has begun so far is there.

        Asks the device nothing, so that it can be called at any time on any thread.
        """

    def here(self) -> Callable[[], None]:
        """What to call on another thread, to have its copies come after what this one waits for."""

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """Make memory known to the device until what is returned is called."""

    def be_quiet(self) -> None:
        """What this thread asks of the device must not disturb what other threads ask of it."""

    def duplicate(
        self, sources: Sequence[StagedSource], beside: Sequence[StagedSource] = ()
    ) -> Sequence[StagedSource] | None:
        """The same elements, elsewhere on the device: done on return. None if there is no room.

        `beside` are such as were made for the same save.
        """


class HostPlaces(NamedTuple):
    """Where sinks lie that are row-major host memory; known without making any of them."""

    address: Addresses
    """Of the first byte of each sink; 0 for a sink that is something else."""
    kind: npt.NDArray[np.int64]
    """Row of `dtype` for each."""
    dtype: Sequence[DType]
    """The element types that occur."""


class SmallPart(NamedTuple):
    """Some bytes, and where on a device they go."""

    begin: int
    """Where in the data they begin."""
    end: int
    """Where they end."""
    sink: StagedSink
    """What they are a part of."""
    at: int
    """The first of its bytes, were they row-major."""
    dtype: DType
    """What the bytes mean."""
    row: int
    """Which part it is, to whoever made it."""


def region(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Any, ...]:
    """A box as an index into an array; always a view, also with no dimensions."""
    return (*(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True)), Ellipsis)


class Source(Protocol):
    """Elements to be stored, wherever they live."""

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        """Copy the row-major elements [start, stop) into `out`, which is exactly as long."""

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Source:
        """A box of these elements, as a source of its own."""


@runtime_checkable
class StagedSource(Source, Protocol):
    """Elements on a device, which bring themselves over while something else is done."""

    def begin_read(self, start: int, stop: int, out: Bytes) -> None:
        """`read_into`, but only begun; `Staging.fence` says when it is done."""


def source_parts(
    source: Source, shape: tuple[int, ...], regions: Sequence[ChunkStorageMetadata]
) -> Sequence[Source]:
    """Regions of a source of this shape; the whole of it is the source itself."""
    return [
        source if region.sizes == shape else source.part(region.offsets, region.sizes)
        for region in regions
    ]


class Sink(Protocol):
    """Memory that loaded elements go to, wherever it lives."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Copy a block of stored elements to the place that starts at `offsets`.

        `block` has the bits of `dtype`. May be called from any thread.
        """


@runtime_checkable
class StagedSink(Sink, Protocol):
    """Memory on a device, to which elements travel while something else is done."""

    def begin_put(
        self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType
    ) -> None:
        """`put`, but only begun: `block` must not change before `Staging.fence` says so."""


TILE = 64
"""Columns copied together where the memory they come from runs along another dimension."""


def _copy_strided(place: npt.NDArray[np.generic], part: npt.NDArray[np.generic]) -> None:
    """Copy into contiguous memory; what is transposed goes tile by tile.

    Row by row every element would fetch a cache line of its own, and again for the next row.
    """
    steps = [abs(step) for step, n in zip(part.strides, part.shape, strict=True) if n > 1]
    if not steps or min(steps) == abs(part.strides[-1]) or part.size <= TILE * TILE:
        np.copyto(place, part)
        return
    near = next(
        dim
        for dim, (step, n) in enumerate(zip(part.strides, part.shape, strict=True))
        if n > 1 and abs(step) == min(steps)
    )
    if part.ndim > 2 and part.shape[near] * part.shape[-1] >= TILE * TILE // 4:
        # One plane after the other: along the memory, and along what is to be contiguous.
        order = [*(dim for dim in range(part.ndim - 1) if dim != near), near, part.ndim - 1]
        place, part = place.transpose(order), part.transpose(order)
        planes = list(np.ndindex(part.shape[:-2]))
    else:
        planes = [()]
    for plane in planes:
        to, source = place[plane], part[plane]
        for low in range(0, part.shape[-1], TILE):
            np.copyto(to[..., low : low + TILE], source[..., low : low + TILE])


@dataclass(frozen=True, slots=True)
class HostSource:
    """Elements in host memory: any strides, a dtype whose copies keep every bit."""

    array: npt.NDArray[np.generic]
    """A view of the caller's memory, never a copy."""

    def read_into(self, start: int, stop: int, out: Bytes) -> None:
        """Copy without a temporary, also from strided memory."""
        array = self.array
        typed = out.view(array.dtype.newbyteorder("<"))
        if array.flags.c_contiguous:
            np.copyto(typed, array.reshape(-1)[start:stop])
            return
        at = 0
        for offsets, sizes in flat_range_boxes(array.shape, start, stop):
            part = array[region(offsets, sizes)]
            _copy_strided(typed[at : at + part.size].reshape(part.shape), part)
            at += part.size

    def part(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> HostSource:
        """A view of a box."""
        return HostSource(self.array[region(offsets, sizes)])


def lies_within(source: Source, low: int, high: int) -> bool:
    """Whether elements lie in some stretch of memory; not known of every kind of source."""
    if isinstance(source, HostSource):
        return low <= address_of(source.array) < high
    at: int | None = getattr(source, "address", None)
    return at is None or low <= at < high


CAST_PART = 1 << 16
"""Elements of a cast that are on their way at a time."""


def _cast(block: npt.NDArray[np.generic], place: npt.NDArray[np.generic], dtype: DType) -> None:
    """Copy between element types of one kind; small ones that know not each other meet halfway."""
    with np.errstate(all="ignore"):
        if np.can_cast(block.dtype, place.dtype, "unsafe"):
            np.copyto(place, block, casting="unsafe")
            return
        half_way = np.dtype(np.int64 if dtype.kind == "int" else np.float64)
        # Part by part: all of it would be many times what is stored.
        for stored, wanted in np.nditer(
            [block, place],
            ["external_loop", "buffered", "zerosize_ok"],
            [["readonly"], ["writeonly"]],
            [half_way, half_way],
            casting="unsafe",
            buffersize=CAST_PART,
        ):
            wanted[...] = stored


@dataclass(frozen=True, slots=True)
class HostSink:
    """Host memory of the target; casts where its dtype differs from what is stored."""

    array: npt.NDArray[np.generic]
    """A writable view of the caller's memory, as bits of `dtype`."""
    dtype: DType
    """What the bits mean."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Copy by strides; equal dtypes as bits, which frees the GIL and keeps every NaN."""
        place = self.array[region(offsets, block.shape)]
        if dtype is self.dtype:
            np.copyto(place, block.view(place.dtype.newbyteorder("<")))
            return
        order = self.array.dtype.byteorder
        typed = place.view(self.dtype.to_numpy().newbyteorder(order))
        _cast(block.view(dtype.to_numpy()), typed, dtype)


@dataclass(slots=True)  # not frozen, which would cost more than all else: every array has one
class FlatSink:
    """Host memory of the target that lies row-major, as bytes: mostly nobody asks for more."""

    bytes: Bytes
    """All bytes of the caller's memory, writable."""
    shape: tuple[int, ...]
    """Extent of the array they are."""
    dtype: DType
    """What they mean."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """As into the array they are."""
        array = self.bytes.view(self.dtype.bits()).reshape(self.shape)
        HostSink(array, self.dtype).put(offsets, block, dtype)


@dataclass(frozen=True, slots=True)
class PartSink:
    """A part of a larger sink."""

    sink: Sink
    """The larger one."""
    offsets: tuple[int, ...]
    """Where in it the part begins."""

    def put(self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType) -> None:
        """Hand on, with offsets counted from the start of the larger sink."""
        self.sink.put(tuple(map(add, self.offsets, offsets)), block, dtype)

    def begin_put(
        self, offsets: tuple[int, ...], block: npt.NDArray[np.generic], dtype: DType
    ) -> None:
        """Hand on, begun only where the larger sink can."""
        begin = self.sink.begin_put if isinstance(self.sink, StagedSink) else self.sink.put
        begin(tuple(map(add, self.offsets, offsets)), block, dtype)


@dataclass(frozen=True, slots=True)
class SinkPiece:
    """One box this rank wants."""

    box: ChunkStorageMetadata
    """Where it sits in the whole tensor."""
    sink: Sink
    """Where its elements go, offsets counted from the box's start."""
    memory: Memory | None = None
    """What the destination occupies, where known: finds targets that share memory."""

    def part(self, local: ChunkStorageMetadata, box: ChunkStorageMetadata) -> SinkPiece:
        """The region `local` of this destination, which is `box` of the whole tensor."""
        if local.sizes == self.box.sizes:
            return SinkPiece(box, self.sink, self.memory)
        memory = None if self.memory is None else self.memory.part(local)
        return SinkPiece(box, PartSink(self.sink, local.offsets), memory)

    def sink_in(self, whole: Sink) -> Sink:
        """The sink of the same piece in the memory of another target."""
        sink = self.sink
        return PartSink(whole, sink.offsets) if isinstance(sink, PartSink) else whole


YIELDING: Final = ("yields",)
"""The `replicas` of a form that gives way to the same boxes on ranks that do not say so."""


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """What one rank holds of one tensor, but for the elements; many tensors share one form."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: DType
    """Element type."""
    properties: TensorProperties
    """What is recorded of it."""
    boxes: tuple[ChunkStorageMetadata, ...]
    """The boxes held here; may be none."""
    replicas: tuple[Hashable, ...] = ()
    """Who else is declared to hold the same boxes; `()` = nothing is declared."""


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """What one rank wants of one tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: DType
    """Element type wanted."""
    pieces: Sequence[SinkPiece]
    """The boxes wanted here."""
    result: object
    """The filled array: the target itself, or what was allocated for an abstract one."""
    memory: Memory | None = None
    """All that it occupies, where its pieces are parts of one array which is not empty."""


@dataclass(frozen=True, slots=True)
class ArrayParts:
    """A composite array, stored as the arrays it is made of."""

    kind: str
    """Class name; must be the same on load."""
    parts: Mapping[str, object]
    """Inner arrays by name."""
    attributes: Mapping[str, object]
    """What else makes it what it is: plain values that must be the same on load."""


class NotComposite:
    """For adapters whose arrays are stored as they are, never as arrays they are made of."""

    def is_composite(self, kind: type) -> bool:
        """Never."""
        return False

    def parts(self, value: Any) -> ArrayParts | None:
        """None are."""
        return None

    def any_composite(self, values: Sequence[Any]) -> bool:
        """None is."""
        return False


@dataclass(frozen=True, eq=False)
class Stepped:
    """Which of some arrays only an optimizer's step changes. As long as this is held, their memory
    is nobody else's."""

    which: Sequence[bool]
    """For each array, whether that is so, as far as is known."""
    spans: Spans
    """Where those lie."""
    changed: Callable[[], Sequence[bool]]
    """Says of each array whether it was changed in place since, as far as anybody counts."""
    begins: npt.NDArray[np.bool_]
    """Of which it is known that all that is stored of them begins where they do."""


class Unstepped:
    """For adapters whose arrays no optimizer is known to own, and that are looked at one by one."""

    def host_addresses(self, values: Sequence[Any], nbytes: Sequence[int]) -> Sequence[int]:
        """Nothing quick is known."""
        return [0] * len(values)

    def stepped(self, values: Sequence[Any]) -> Stepped:
        """None is."""
        none = [False] * len(values)
        spans = np.zeros((len(values), 2), np.uint64)
        return Stepped(none, spans, lambda: none, np.zeros(len(values), np.bool_))


class TargetsApart:
    """For adapters whose targets are asked for one by one."""

    def target_glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """Nothing quick is known."""
        return [None] * len(values)

    def target_addresses(
        self, values: Sequence[Any], names: Sequence[str], reach: Sequence[int]
    ) -> Sequence[int]:
        """Nobody asks."""
        raise TypeError("these arrays have no glances as targets")

    def sink(self, value: Any, dtype: DType) -> Sink:
        """Nobody asks."""
        raise TypeError("these arrays have no glances as targets")


class ArrayAdapter(Protocol):
    """One array library."""

    def claims(self, kind: type) -> bool:
        """Whether values of this type are arrays of this library."""

    def glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """For each value, what its form follows from, as something quick to compare.

        Values with equal glances have equal forms; None says nothing. Never raises: what is wrong
        with a value is for `form` to say.
        """

    def form(self, value: Any, where: str) -> ArrayForm:
        """What this rank holds, or `UnsupportedValueError` naming `where`."""

    def sources(self, value: Any, where: str) -> Sequence[Source]:
        """The elements of each box of the form."""

    def addresses(self, values: Sequence[Any]) -> Sequence[int]:
        """A number for each value: arrays that may be tied have equal ones; 0 = surely not tied."""

    def tie(self, value: Any) -> Hashable:
        """Equal for exactly tied arrays: same memory, strides and dtype."""

    def signature(self, value: object, where: str) -> tuple[tuple[int, ...], DType]:
        """Shape of the whole tensor and element type of a load target; allocates nothing."""

    def target(self, value: object, where: str, device: object) -> LocalTarget:
        """Where loaded bytes go; allocates abstract targets on `device`."""

    def target_glances(self, values: Sequence[Any]) -> Sequence[Hashable | None]:
        """For each value, what its target follows from, but for where its memory begins.

        Targets of equal glances are pieces of one sink each, alike in all but their addresses;
        None says nothing. Never raises: what is wrong with a value is for `target` to say.
        """

    def target_addresses(
        self, values: Sequence[Any], names: Sequence[str], reach: Sequence[int]
    ) -> Sequence[int]:
        """Where the memory of each begins, of values that have glances and are filled in place.

        `reach` says how many bytes from there on will be written. `UnsupportedValueError` names
        the first value whose memory does not go that far.
        """

    def sink(self, value: Any, dtype: DType) -> Sink:
        """All memory of such a value. May be called from any thread."""

    def settle(self, values: Iterable[Any], wait: bool = True) -> Staging | None:
        """Wait until nothing computes with these arrays any more, on whatever device.

        Without `wait`, only copies that this thread begins come after it. Returns how their
        elements are best copied; None where they are in host memory.
        """

    def host_addresses(self, values: Sequence[Any], nbytes: Sequence[int]) -> Sequence[int]:
        """Where the elements of each value begin, if what this rank holds of it lies row-major in
        host memory, as it is stored, and is exactly so many bytes; else 0."""

    def stepped(self, values: Sequence[Any]) -> Stepped:
        """Which values only an optimizer's step changes."""

    def is_composite(self, kind: type) -> bool:
        """Whether arrays of this type may be stored as the arrays they are made of."""

    def parts(self, value: Any) -> ArrayParts | None:
        """The arrays that an array of such a type is stored as; None where that is itself."""

    def any_composite(self, values: Sequence[Any]) -> bool:
        """Whether any of these, which are of such a type, is stored as others. Quick."""

    def from_numpy(self, array: npt.NDArray[np.generic], dtype: DType) -> object:
        """An array of this library over the given memory."""


ADAPTERS: dict[str, str] = {
    "numpy": "shardkeep.adapters.numpy_arrays",
    "torch": "shardkeep.adapters.torch_tensors",
    "torch.distributed": "shardkeep.adapters.torch_dtensors",
    "shardkeep": "shardkeep.adapters.sharded_arrays",
}
"""Package of an array's class to the module whose `ADAPTER` handles it; the longest name wins."""

SHARD_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""What makes a value of any class a part of a tensor; see `shardkeep.adapters.shard_protocol`."""


@cache
def adapter_of_type(kind: type) -> ArrayAdapter | None:
    """The adapter for values of this type, or None where they are not arrays."""
    if _declares_shards(kind):
        return _adapter_in("shardkeep.adapters.shard_protocol")
    return library_adapter(kind)


def library_adapter(kind: type) -> ArrayAdapter | None:
    """The adapter of the library this type comes from, whatever else it declares to be."""
    for cls in kind.__mro__[:-1]:
        package = cls.__module__
        while package:
            module = ADAPTERS.get(package)
            if module is not None:
                adapter = _adapter_in(module)
                if adapter.claims(kind):
                    return adapter
            package = package.rpartition(".")[0]
    return None


def _declares_shards(kind: type) -> bool:
    """Whether instances have the shard fields: as attributes of the class, or annotated there."""
    found = [vars(cls).get("__annotations__") for cls in kind.__mro__]
    annotated = [names for names in found if isinstance(names, dict)]  # functions have a descriptor
    return all(
        hasattr(kind, field) or any(field in names for names in annotated) for field in SHARD_FIELDS
    )


def adapter_of(value: object) -> ArrayAdapter | None:
    """The adapter for this value, or None where it is not an array."""
    adapter = adapter_of_type(type(value))  # type: ignore[arg-type]
    if adapter is not None and getattr(value, SHARD_FIELDS[0], None) is not None:
        return _adapter_in("shardkeep.adapters.shard_protocol")
    return adapter


def any_sets_shard_fields(values: Sequence[object]) -> bool:
    """Whether shard fields are set on one of these arrays itself, as on a plain torch tensor."""
    # Not by looking into `__dict__`: asked for it, every tensor would get one.
    found = map(getattr, values, repeat(SHARD_FIELDS[0]), repeat(None))
    return any(map(is_not, found, repeat(None)))


def adapters_of(values: Sequence[object]) -> list[ArrayAdapter | None]:
    """The adapter of each; mostly they are alike, and that costs little for each."""
    if any_sets_shard_fields(values):
        return list(map(adapter_of, values))
    kinds = list(map(type, values))
    known = {kind: adapter_of_type(kind) for kind in set(kinds)}
    return list(map(known.__getitem__, kinds))


def ask_each(
    adapters: Sequence[ArrayAdapter],
    columns: Sequence[Sequence[Any]],
    ask: Callable[..., Sequence[Any]],
) -> list[Any]:
    """Ask every adapter once, about all of its arrays; answers in the order of the arrays.

    `ask` gets the adapter, and its rows of each of the columns.
    """
    rows: dict[int, list[int]] = {}
    if len(set(map(id, adapters))) == 1:
        return list(ask(adapters[0], *columns))
    for row, adapter in enumerate(adapters):
        rows.setdefault(id(adapter), []).append(row)
    out: list[Any] = [None] * len(adapters)
    for mine in rows.values():
        parts = [[column[row] for row in mine] for column in columns]
        for row, answer in zip(mine, ask(adapters[mine[0]], *parts), strict=True):
            out[row] = answer
    return out


def settle_all(
    adapters: Sequence[ArrayAdapter | None], values: Sequence[object], wait: bool = True
) -> Staging | None:
    """`settle` for the arrays of a state, each by its adapter."""
    found = None
    for adapter in {id(one): one for one in adapters if one is not None}.values():
        # Made as they are asked for: mostly there is no device, and nobody asks.
        mine = (value for one, value in zip(adapters, values, strict=True) if one is adapter)
        answer = adapter.settle(mine, wait)
        found = answer if found is None else found
    return found


def _adapter_in(module: str) -> ArrayAdapter:
    adapter: ArrayAdapter = importlib.import_module(module).ADAPTER
    return adapter


def adapter_named(package: str) -> ArrayAdapter:
    """The adapter of an array library, by its package's name."""
    return _adapter_in(ADAPTERS[package])
