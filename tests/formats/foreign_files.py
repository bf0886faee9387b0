"""What tests of other systems' formats share: elements read plainly, layouts written plainly."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np

from shardkeep.dtypes import lookup
from shardkeep.foreign.found import Found, Raw, StoredTensor
from shardkeep.foreign.layout import Elements, Late, Literal, Outline, OutTensor

DATA = Path(__file__).parents[1] / "data"
BLOCKED = ("torch", "mindspore", "jax", "safetensors", "hyper_parallel", "tensorstore", "orbax")


def elements(found: Found, tensor: StoredTensor) -> np.ndarray:
    """All elements as bits, each part read on its own."""
    bits = lookup(tensor.dtype).bits()
    out = np.zeros(tensor.shape, bits)
    count = 0
    for part in tensor.parts:
        assert min(part.sizes, default=1) > 0
        at = tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes, strict=True))
        out[at] = _part(found, part, bits)
        count += int(np.prod(part.sizes))
    assert count == out.size
    return out


def _part(found, part, bits):
    if not isinstance(part.place, Raw):
        read = part.place.read((0,) * len(part.sizes), part.sizes)
        assert read.flags.c_contiguous or not part.sizes
        return read.view(bits)
    data = (found.root / part.place.file if part.place.file else found.root).read_bytes()
    if part.place.strides is None:
        count = int(np.prod(part.sizes))
        return np.frombuffer(data, bits, count, part.place.start).reshape(part.sizes)
    flat = np.frombuffer(data[part.place.start :][: (len(data) - part.place.start) // bits.itemsize
                                                  * bits.itemsize], bits)  # fmt: skip
    steps = tuple(s * bits.itemsize for s in part.place.strides)
    return np.lib.stride_tricks.as_strided(flat, part.sizes, steps)


def leaves(state, path=()):
    """Every leaf of nested dicts, lists and tuples, by its path."""
    if isinstance(state, dict):
        for key, value in state.items():
            yield from leaves(value, (*path, key))
    elif isinstance(state, (list, tuple)) and any(
        isinstance(v, (StoredTensor, dict, list, tuple)) for v in state
    ):
        for row, value in enumerate(state):
            yield from leaves(value, (*path, row))
    else:
        yield path, state


def arrays_of(found: Found) -> dict[str, np.ndarray]:
    """Dotted name to bits, of all tensors."""
    return {
        ".".join(map(str, path)): elements(found, leaf)
        for path, leaf in leaves(found.state)
        if isinstance(leaf, StoredTensor)
    }


def outline_of(state: dict, dtypes: dict[str, str] | None = None) -> tuple[Outline, dict]:
    """An outline of nested dicts of arrays and values, and the arrays by their `OutTensor`s."""
    tensors, values, arrays, known = {}, {}, {}, {}

    def take(value, path):
        if isinstance(value, dict):
            return {key: take(inner, (*path, key)) for key, inner in value.items()}
        name = ".".join(map(str, path))
        if not isinstance(value, np.ndarray):
            values[name] = value
            return value
        if id(value) not in known:
            dtype = (dtypes or {}).get(name, value.dtype.name)
            known[id(value)] = OutTensor(name, dtype, value.shape)
            arrays[known[id(value)]] = value
        tensors[name] = known[id(value)]
        return tensors[name]

    return Outline(take(state, ()), tensors, values), arrays


def write(files, arrays, destination: Path) -> None:
    """Write a layout: the segments that are known, then those that follow from them."""
    for file in files:
        out = bytearray(file.size)
        crcs = {}
        end = 0
        for segment in file.segments:
            assert segment.start >= end
            end = segment.start + segment.nbytes
            if isinstance(segment, Literal):
                out[segment.start : end] = segment.data
            elif isinstance(segment, Elements):
                at = tuple(
                    slice(o, o + s) for o, s in zip(segment.offsets, segment.sizes, strict=True)
                )
                data = np.ascontiguousarray(arrays[segment.tensor][at]).tobytes()
                assert len(data) == segment.nbytes
                out[segment.start : end] = data
                if segment.checked:
                    crcs[segment] = zlib.crc32(data)
        assert end <= file.size
        for segment in file.segments:
            if isinstance(segment, Late):
                data = segment.make(crcs.__getitem__)
                assert len(data) == segment.nbytes
                out[segment.start : segment.start + segment.nbytes] = data
        path = destination / file.name if file.name else destination
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(out)


def without_libraries(code: str, *arguments: object, allowed: tuple[str, ...] = ()) -> object:
    """What a program prints as JSON, run where no other system's library can be imported."""
    blocked = [name for name in BLOCKED if name not in allowed]
    front = (
        "import sys, json\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", front + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
