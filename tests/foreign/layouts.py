"""Files that were laid out, written the plain way; and found tensors, read the plain way."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np

from shardkeep.dtypes import lookup
from shardkeep.foreign.found import Raw, StoredTensor
from shardkeep.foreign.layout import Elements, Late, Literal, Outline, OutTensor


def outline_of(state) -> tuple[Outline, dict[int, np.ndarray]]:
    """A state of torch's tensors and plain values as an outline, and the bits of each tensor."""
    import torch

    bits, made, tensors, values = {}, {}, {}, {}

    def tensor(value, name):
        # What shares all its memory is a tie.
        key = (value.data_ptr(), value.shape, value.dtype) if value.numel() else id(value)
        if key not in made:
            dtype = lookup(value.dtype)
            out = OutTensor(name, dtype.name, tuple(value.shape), value.requires_grad)
            flat = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            bits[id(out)] = flat.view(dtype.bits()).reshape(value.shape)
            made[key] = out
        return made[key]

    def walk(value, name):
        if isinstance(value, torch.Tensor):
            tensors[name] = tensor(value, name)
            return tensors[name]
        if type(value) in (dict, OrderedDict):
            return type(value)(
                (k, walk(v, f"{name}.{k}" if name else str(k))) for k, v in value.items()
            )
        if type(value) in (list, tuple):
            return type(value)([walk(v, f"{name}.{i}") for i, v in enumerate(value)])
        values[name] = value
        return value

    return Outline(walk(state, ""), tensors, values), bits


def write(files, bits, folder: Path) -> None:
    """Write laid out files into a folder; one without a name is `folder` itself."""
    for file in files:
        data = bytearray(file.size)
        crcs = {}
        end = 0
        for segment in file.segments:
            assert segment.start >= end
            end = segment.start + segment.nbytes
            if isinstance(segment, Literal):
                data[segment.start : end] = segment.data
            elif isinstance(segment, Elements):
                box = tuple(
                    slice(o, o + s) for o, s in zip(segment.offsets, segment.sizes, strict=True)
                )
                raw = bits[id(segment.tensor)][box].tobytes()
                assert len(raw) == segment.nbytes
                data[segment.start : end] = raw
                crcs[id(segment)] = zlib.crc32(raw)
        assert end <= file.size
        for segment in file.segments:
            if isinstance(segment, Late):
                made = segment.make(lambda part, crcs=crcs: crcs[id(part)])
                assert len(made) == segment.nbytes
                data[segment.start : segment.start + segment.nbytes] = made
        path = folder / file.name if file.name else folder
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def elements_of(tensor: StoredTensor, root: Path) -> np.ndarray:
    """All elements of a found tensor, as bits."""
    dtype = lookup(tensor.dtype)
    out = np.zeros(tensor.shape, dtype.bits())
    for part in tensor.parts:
        box = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        if not isinstance(part.place, Raw):
            out[box] = np.asarray(part.place.read((0,) * len(part.sizes), part.sizes)).view(
                dtype.bits()
            )
            continue
        data = np.frombuffer(
            (root / part.place.file).read_bytes() if part.place.file else root.read_bytes(),
            np.uint8,
        )
        steps = part.place.strides
        if steps is None:
            count = int(np.prod(part.sizes, dtype=np.int64)) * dtype.itemsize
            flat = data[part.place.start : part.place.start + count].copy().view(dtype.bits())
            out[box] = flat.reshape(part.sizes)
        else:
            last = sum((n - 1) * s for n, s in zip(part.sizes, steps, strict=True))
            flat = data[part.place.start :][: (last + 1) * dtype.itemsize].copy().view(dtype.bits())
            out[box] = np.lib.stride_tricks.as_strided(
                flat, part.sizes, [s * dtype.itemsize for s in steps]
            )
    return out
