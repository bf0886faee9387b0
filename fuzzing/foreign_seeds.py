"""Good checkpoints of other systems: those kept for the tests, and what our own writers make."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import shardkeep
from fuzzing.targets import as_json
from shardkeep.foreign.safetensors_header import lay_out_entries

__all__ = [
    "FIXTURES",
    "SMALL",
    "converted",
    "huggingface_folders",
    "legacy_stream",
    "merged_folder",
]

FIXTURES = Path(__file__).parent.parent / "tests" / "data"
SMALL = 4096
"""Bytes of a file that is worth many executions."""


def _state() -> dict[str, Any]:
    tied = np.arange(4, dtype=np.float32)
    return {
        "model": {"w": np.arange(12.0).reshape(3, 4), "b": tied, "c": tied},
        "half": np.arange(3).astype(ml_dtypes.bfloat16),
        "list": [np.ones(2), {"x": np.zeros((2, 2), np.int32)}],
        "step": 3,
        "name": "run",
    }


def converted(scratch: Path) -> dict[str, Path]:
    """One state in every format that we write, by its name."""
    shardkeep.save(_state(), scratch / "to-convert", no_dist=True)
    made = {}
    for to, options in (
        ("torch-save", {}),
        ("torch-dcp", {"chunk_bytes": 48}),
        ("hyper-parallel", {}),
        ("mindspore", {"crc": True}),
        ("hf", {}),
    ):
        select = ["model.*", "half"] if to in ("hf", "mindspore") else []
        path = scratch / f"as-{to}"
        shardkeep.convert(scratch / "to-convert", path, to=to, options=options, select=select)
        made[to] = path
    return made


def legacy_stream(archive: bytes) -> bytes:
    """The same object as torch saved it before 1.6: pickles, then storages behind their lengths."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        names = opened.namelist()
        (graph,) = (name for name in names if name.endswith("data.pkl"))
        folder = graph.removesuffix("data.pkl")
        storages = {
            name.removeprefix(f"{folder}data/"): opened.read(name)
            for name in names
            if name.startswith(f"{folder}data/") and name.rpartition("/")[2].isdigit()
        }
        body = opened.read(graph)
    front = [0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True}]
    out = b"".join(pickle.dumps(value, 2) for value in front)
    out += body + pickle.dumps(sorted(storages), 2)
    counts = _counts(body)
    for key in sorted(storages):
        out += counts.get(key, len(storages[key])).to_bytes(8, "little") + storages[key]
    return out


def _counts(body: bytes) -> dict[str, int]:
    """Elements of each storage, as the pickle names them."""
    found: dict[str, int] = {}

    class Named(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return lambda *_, **__: None

        def persistent_load(self, given: Any) -> Any:
            found[given[2]] = given[4]

    Named(io.BytesIO(body)).load()
    return found


def tensor_file(path: Path, arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file."""
    rows = [(name, array.dtype.name, array.shape) for name, array in arrays.items()]
    header, starts, size = lay_out_entries(rows, metadata)
    out = bytearray(header.ljust(size, b"\0"))
    for name, at in starts.items():
        out[at : at + arrays[name].nbytes] = arrays[name].tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out)


def huggingface_folders(scratch: Path, single: Path) -> list[Path]:
    """One file, several with an index, pieces of ranks, and quantised weights."""
    one, several, pieces, packed = (
        scratch / name for name in ("one", "several", "pieces", "packed")
    )
    shutil.copytree(single, one)
    a, b = np.arange(6.0).reshape(2, 3), np.ones(4, np.float32)
    names = [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    tensor_file(several / names[0], {"a": a}, {"format": "pt"})
    tensor_file(several / names[1], {"b": b, "c": b}, {"format": "pt", "tied": "b"})
    places = {"a": names[0], "b": names[1], "c": names[1]}
    (several / "model.safetensors.index.json").write_bytes(
        as_json({"metadata": {"total_size": 80}, "weight_map": places})
    )
    for rank, row in enumerate(a):
        told = as_json({"a": {"saved_offsets": [rank, 0]}}).decode()
        name = f"shard-0000{rank + 1}-model-00001-of-00001.safetensors"
        tensor_file(pieces / name, {"a": row[None]}, {"DCP_SHARDING_INFO": told})
    fp8 = np.ones((4, 6), ml_dtypes.float8_e4m3fn)
    tensor_file(
        packed / "model.safetensors",
        {
            "w.weight": fp8,
            "w.weight_scale_inv": np.ones((2, 2), np.float32),
            "m_blocks": np.ones((2, 3, 2, 16), np.uint8),
            "m_scales": np.full((2, 3, 2), 127, np.uint8),
        },
    )
    config = {"quantization_config": {"weight_block_size": [2, 3]}, "model_type": "x"}
    (packed / "config.json").write_bytes(as_json(config))
    return [one, several, pieces, packed]


def merged_folder(path: Path) -> Path:
    """What `mindspore.unified_safetensors` leaves."""
    tensor_file(path / "part0.safetensors", {"a": np.ones(3), "b": np.ones((2, 2), np.int32)})
    tensor_file(path / "hyper_param.safetensors", {"lr": np.ones(())})
    (path / "param_name_map.json").write_bytes(
        as_json({"a": "part0.safetensors", "b": "part0.safetensors"})
    )
    return path
