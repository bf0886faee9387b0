# SPDX-License-Identifier: Apache-2.0
"""HyperParallel's present layout: safetensors, packed values, and one metadata pickle of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardkeep.dtypes import TABLE
from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.layout import Elements, OutFile, Outline, OutTensor, Segment
from shardkeep.foreign.layout import Literal as Known
from shardkeep.foreign.nesting import items_by_text
from shardkeep.foreign.pickling import Pickling, Written
from shardkeep.foreign.safetensors_header import lay_out_entries
from shardkeep.formats.hyper_parallel.metadata_files import GLOBAL

__all__ = ["Platform", "lay_out_all"]

Platform = Literal["torch", "mindspore"]
Key = str | int

_METADATA = "hyper_parallel.core.distributed_checkpoint.metadata"
_STORAGE = "hyper_parallel.core.distributed_checkpoint.storage"
_MINDSPORE = {
    "bool": "Bool", "int8": "Int8", "uint8": "UInt8", "int16": "Int16", "uint16": "UInt16",
    "int32": "Int32", "uint32": "UInt32", "int64": "Int64", "uint64": "UInt64",
    "float16": "Float16", "bfloat16": "BFloat16", "float32": "Float32", "float64": "Float64",
    "complex64": "Complex64",
}  # fmt: skip
"""What MindSpore calls the types that safetensors has."""


@dataclass(frozen=True, eq=False)
class _Object(Written):
    """An object of one of HyperParallel's classes."""

    module: str
    name: str
    state: dict[str, Any]

    def write(self, pickling: Pickling) -> None:
        """Its class, and its attributes if it has any."""
        pickling.instance(self.module, self.name, self.state)


@dataclass
class _Leaf:
    path: tuple[Key, ...]
    value: Any


@dataclass
class _Storage:
    """What is stored where, as the metadata tells it."""

    infos: dict[_Object, _Object] = field(default_factory=dict)

    def add(self, name: str, at: tuple[int, ...], index: int | None, **info: Any) -> None:
        key = {"fqn": name, "offset": at, "index": index}
        self.infos[_Object(_METADATA, "MetadataIndex", key)] = _Object(
            _STORAGE, "StorageInfo", info
        )


def lay_out_all(outline: Outline, *, platform: Platform, max_nbytes: int) -> list[OutFile]:
    """Tensor files of at most `max_nbytes` where tensors allow it, values, metadata."""
    leaves = _flattened(outline.state)
    tensors = {name: leaf.value for name, leaf in leaves.items() if _is_tensor(leaf.value)}
    values = {name: leaf.value for name, leaf in leaves.items() if not _is_tensor(leaf.value)}
    dtypes = {name: _dtype(name, tensor, platform) for name, tensor in tensors.items()}
    storage = _Storage()
    packed = _packed(values, storage)
    files = list(_tensor_files(tensors, storage, platform, max_nbytes))
    table: dict[str, _Object] = {
        name: _Object(_METADATA, "BytesStorageMetadata", {}) for name in values
    }
    table |= {name: _tensor_metadata(dtypes[name], tensor) for name, tensor in tensors.items()}
    paths = {name: leaf.path for name, leaf in leaves.items()}
    state = {
        "state_dict_metadata": table,
        "planner_data": paths,
        "storage_data": storage.infos,
        "version": "1.0",
    }
    metadata = _pickled(_Object(_METADATA, "Metadata", state), GLOBAL)
    if packed:
        files.append(OutFile("_rank0_.bytes", len(packed), [Known(0, packed)]))
    # Its presence is what makes the checkpoint exist: a writer that keeps the order ends with it.
    return [*files, OutFile(GLOBAL, len(metadata), [Known(0, metadata)])]


def _is_tensor(value: object) -> bool:
    return isinstance(value, OutTensor)


def _flattened(state: Any) -> dict[str, _Leaf]:
    """Every leaf by the name that HyperParallel gives it: keys as text, with dots between them."""
    out: dict[str, _Leaf] = {}
    if not isinstance(state, Mapping):
        raise UnsupportedValueError("HyperParallel stores a dict of names, not a list")
    for path, value in _walk(state, ()):
        name = ".".join(map(str, path))
        if name in out:
            raise UnsupportedValueError(
                f"two entries are both called {name} in HyperParallel's checkpoints, which keep "
                "names with dots and keys as text; rename one"
            )
        out[name] = _Leaf(path, value)
    return out


def _walk(value: Any, path: tuple[Key, ...]) -> Iterator[tuple[tuple[Key, ...], Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key in value:
            if type(key) not in (str, int):
                raise UnsupportedValueError(
                    f"{'.'.join(map(str, path))} has the key {key!r}; HyperParallel keeps keys as "
                    "text"
                )
        for below, inner in items_by_text(value, path, "HyperParallel"):
            yield from _walk(inner, below)
    elif type(value) in (list, tuple) and _splits(value):
        for row, inner in enumerate(value):
            yield from _walk(inner, (*path, row))
    else:
        yield path, value


def _splits(value: Any) -> bool:
    return any(
        isinstance(item, (OutTensor, Mapping)) or (type(item) in (list, tuple) and _splits(item))
        for item in value
    )


def _dtype(name: str, tensor: OutTensor, platform: Platform) -> str:
    if platform == "torch" and TABLE[tensor.dtype].torch:
        return f"torch.{tensor.dtype}"
    if platform == "mindspore" and tensor.dtype in _MINDSPORE:
        return _MINDSPORE[tensor.dtype]
    raise UnsupportedValueError(
        f"{name} has elements of type {tensor.dtype}, which {platform} lacks; convert it first, or "
        "leave it out"
    )


def _tensor_metadata(dtype: str, tensor: OutTensor) -> _Object:
    chunk = {"offsets": (0,) * len(tensor.shape), "sizes": tensor.shape}
    properties = {"dtype": dtype, "requires_grad": tensor.requires_grad, "memory_format": None}
    state = {
        "properties": _Object(_METADATA, "TensorProperties", properties),
        "size": tensor.shape,
        "chunks": [_Object(_METADATA, "ChunkStorageMetadata", chunk)],
    }
    return _Object(_METADATA, "TensorStorageMetadata", state)


def _tensor_files(
    tensors: Mapping[str, OutTensor], storage: _Storage, platform: Platform, max_nbytes: int
) -> Iterator[OutFile]:
    metadata = {"format": "ms"} if platform == "mindspore" else None
    for rank, names in enumerate(_dealt(tensors, max_nbytes)):
        file = f"_rank{rank}_.safetensors"
        rows = [(name, tensors[name].dtype, tensors[name].shape) for name in names]
        header, starts, size = lay_out_entries(rows, metadata)
        segments: list[Segment] = [Known(0, header)]
        for name in sorted(names, key=starts.__getitem__):
            tensor = tensors[name]
            zeros = (0,) * len(tensor.shape)
            storage.add(name, zeros, 0, relative_path=file, offset=0, length=-1, tensor_key=name)
            if tensor.nbytes:
                segments.append(Elements(starts[name], tensor, zeros, tensor.shape))
        yield OutFile(file, size, segments)


def _dealt(tensors: Mapping[str, OutTensor], max_nbytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    nbytes = 0
    for name, tensor in tensors.items():
        if names and nbytes + tensor.nbytes > max_nbytes:
            yield names
            names, nbytes = [], 0
        names.append(name)
        nbytes += tensor.nbytes
    if names:
        yield names


def _packed(values: Mapping[str, Any], storage: _Storage) -> bytes:
    out = bytearray()
    for name, value in values.items():
        data = _pickled(value, name)
        storage.add(
            name, (), None, relative_path="_rank0_.bytes", offset=len(out), length=len(data),
            tensor_key=None,
        )  # fmt: skip
        out += data
    return bytes(out)


def _pickled(value: Any, path: str) -> bytes:
    def no_tensor(tensor: OutTensor) -> str:
        raise UnsupportedValueError(f"{path}: the tensor {tensor.name} lies inside of a value")

    pickling = Pickling(weights_only=False, storage=no_tensor)
    pickling.value(value, path)
    return pickling.finished()
