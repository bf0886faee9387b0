"""Safetensors files made by hand, and the elements of what a parser found."""

from __future__ import annotations

import json

import numpy as np

from shardkeep.dtypes import lookup
from shardkeep.foreign.found import Raw


def raw_file(table, payload=b"", *, length=None, text=None):
    """The bytes of a file with this header, whatever it says."""
    text = json.dumps(table).encode() if text is None else text
    return (len(text) if length is None else length).to_bytes(8, "little") + text + payload


def entry(dtype, shape, start, stop):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def elements(found, tensor, offsets=None, sizes=None):
    """A box of a tensor as numpy, in its own dtype."""
    dtype = lookup(tensor.dtype)
    out = np.zeros(tensor.shape, dtype.bits())
    for part in tensor.parts:
        box = tuple(slice(at, at + n) for at, n in zip(part.offsets, part.sizes, strict=True))
        if isinstance(part.place, Raw):
            path = found.root / part.place.file if part.place.file else found.root
            count = int(np.prod(part.sizes, dtype=np.int64))
            data = path.read_bytes()[part.place.start :][: count * dtype.itemsize]
            out[box] = np.frombuffer(data, dtype.bits()).reshape(part.sizes)
        else:
            out[box] = part.place.read((0,) * len(part.sizes), part.sizes)
    out = out.view(dtype.to_numpy())
    if offsets is not None:
        out = out[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))]
    return out


def write_out(files, root, elements_of):
    """Write laid-out files the plain way; `elements_of(tensor)` is a numpy array."""
    for file in files:
        data = bytearray(file.size)
        for segment in file.segments:
            if hasattr(segment, "data"):
                found = segment.data
            else:
                box = tuple(
                    slice(at, at + n) for at, n in zip(segment.offsets, segment.sizes, strict=True)
                )
                found = np.ascontiguousarray(elements_of(segment.tensor)[box]).tobytes()
            assert len(found) == segment.nbytes
            data[segment.start : segment.start + segment.nbytes] = found
        path = root / file.name if file.name else root
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
