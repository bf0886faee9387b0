"""Parsers of other systems' files."""

from __future__ import annotations

import importlib
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

from fuzzing import foreign_seeds as seeds
from fuzzing.archives import changed_archive, changed_archive_in_place
from fuzzing.by_bytes import Mutator, changed_bytes
from fuzzing.encodings import changed_json
from fuzzing.headers import changed_header
from fuzzing.opcodes import changed_pickle
from fuzzing.protobuf import changed_ckpt
from fuzzing.sealing import MemoryFile
from fuzzing.targets import Target, by_label, every_one, labelled, unlabelled
from shardkeep import values
from shardkeep.checkpoint import Checkpoint
from shardkeep.foreign import pickles
from shardkeep.foreign.dcp.classes import CLASSES
from shardkeep.foreign.found import Found
from shardkeep.foreign.headers import check_packed, read_whole_header
from shardkeep.foreign.inert import read_inert
from shardkeep.foreign.reader import ForeignReader
from shardkeep.foreign.regular_files import OpenedFile
from shardkeep.foreign.stand_ins import records
from shardkeep.foreign.tables import Tables, tables_of
from shardkeep.foreign.torch_objects import read_object, read_object_in_memory
from shardkeep.foreign.torch_stand_ins import TORCH
from shardkeep.foreign.torch_zip import Archive
from shardkeep.formats.torch_save.legacy import read_stream
from shardkeep.stores.local import storage_errors
from shardkeep.stores.reading import ReadFile

__all__ = ["foreign_targets"]

_READ = 64 << 20
"""Bytes of tensors up to which all of them are read; a few bytes may tell of many."""
_LEFT_OUT = ("expected*", "README*", "1.bias", "1.weight", "exp_avg_sq.pt")
"""Of kept checkpoints: what only tests look at, and what is like the rest."""
_DEEP = 8
"""One of so many inputs that parse is also read, as `open` would."""


def foreign_targets(scratch: Path) -> list[Target]:
    """All of them; what needs files has them below `scratch`."""
    made = seeds.converted(scratch)
    single = made["torch-save"].read_bytes()
    archives = [single, *_contents(seeds.FIXTURES / "deepspeed", "*.pt")]
    legacy = seeds.legacy_stream(single)
    headers = [path.read_bytes() for path in sorted(made["hf"].glob("*.safetensors"))]
    headers += _contents(seeds.FIXTURES / "mindspore", "net.safetensors")
    folders = seeds.huggingface_folders(scratch / "huggingface", made["hf"])
    data = seeds.FIXTURES
    return [
        Target("safetensors", headers, (changed_header, changed_bytes), _safetensors, 90),
        Target("pickle", _pickles(data), (changed_pickle,) * 4 + (changed_bytes,), _pickle, 70),
        Target("torch_save", archives, (changed_archive,) * 6 + (changed_bytes,), _archive, 20),
        Target("torch_legacy", [legacy], (changed_pickle, changed_bytes), _legacy, 70),
        _Folders("huggingface", folders, scratch).target(12, dequantise="bfloat16"),
        _Folders("torch_dcp", [made["torch-dcp"], data / "torch_dcp_2.2/r2"], scratch).target(6),
        _Folders("megatron", [data / "megatron"], scratch).target(4),
        _Folders("deepspeed", [data / "deepspeed"], scratch).target(4),
        _Folders(
            "hyper_parallel",
            [
                made["hyper-parallel"],
                data / "hyper_parallel_2026_03" / "r2",
                data / "hyper_parallel_later" / "r2_nocoll",
            ],
            scratch,
        ).target(4),
        _Folders(
            "mindspore",
            [
                *sorted((data / "mindspore").glob("*.ckpt")),
                *sorted((data / "mindspore").glob("*.safetensors")),
                made["mindspore"],
                seeds.merged_folder(scratch / "merged"),
            ],
            scratch,
        ).target(16),
        _Folders(
            "orbax",
            [data / "orbax" / name for name in ("zarr2", "zarr3", "zarr3_ocdbt", "manager/5")],
            scratch,
        ).target(4),
    ]


def _contents(folder: Path, pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob(pattern))]


def _pickles(data: Path) -> list[bytes]:
    found = _contents(data, ".metadata") + _contents(data, "*metadata")
    found += _contents(data / "hyper_parallel_2026_03", "*.bytes")
    return sorted({content for content in found if content[:1] == b"\x80"}, key=len)


# --- in memory


def _safetensors(data: bytes) -> None:
    file = cast("ReadFile", MemoryFile(data))
    entries, _, end = read_whole_header(file, "x")
    check_packed(entries, end, len(data), "x")


_HYPER = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageInfo",
    "TensorProperties", "TensorStorageMetadata",
)  # fmt: skip
_CLASSES = {
    **TORCH,
    **CLASSES,
    **records("hyper_parallel.core.checkpoint.metadata", *_HYPER),
    **records("hyper_parallel.core.checkpoint.storage", *_HYPER),
    **records("hyper_parallel.core.distributed_checkpoint.metadata", *_HYPER),
    **records("hyper_parallel.core.distributed_checkpoint.storage", *_HYPER),
}


def _pickle(data: bytes) -> None:
    pickles.load(data, where="x", classes=_CLASSES, persistent=lambda given: None)


def _archive(data: bytes) -> None:
    archive = Archive(MemoryFile(data).read, 0, len(data), "x")
    every_one(
        lambda: _tables({"x": read_object(archive, "")}),
        lambda: _tables({"x": read_inert(archive, "")}),
        lambda: read_object_in_memory(data, "x"),
    )


def _legacy(data: bytes) -> None:
    _tables(read_stream(cast("OpenedFile", MemoryFile(data)), "x"))


def _tables(state: Any) -> Tables:
    made = tables_of(Found("x", Path("/x"), state))
    for name, value in made.plain.items():
        values.encode(value, where=name)
    return made


# --- on disk


class _Folders:
    """Checkpoints of one format, of which one file at a time is another."""

    def __init__(self, name: str, checkpoints: Sequence[Path], scratch: Path) -> None:
        self.name, self.root = name, scratch / f"fuzzed-{name}"
        self.files: dict[str, bytes] = {}
        self.last = ""
        self.module = importlib.import_module(f"shardkeep.formats.{name}")
        self.options: dict[str, Any] = {}
        for at, path in enumerate(checkpoints):
            self._copy(path, str(at))

    def _copy(self, path: Path, label: str) -> None:
        place = self.root / label
        if path.is_dir():
            shutil.copytree(path, place, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        for file in found:
            if file.is_file():
                self.files[str(file.relative_to(self.root))] = file.read_bytes()

    def target(self, weight: int, **options: Any) -> Target:
        """To be fuzzed."""
        self.options = options
        kept = {label: data for label, data in self.files.items() if _is_parsed(label, data)}
        inputs = [labelled(label, data) for label, data in kept.items()]
        mutators = {label: _mutators(label, data) for label, data in kept.items()}
        return Target(self.name, inputs, (by_label(mutators),), self.run, weight)

    def run(self, data: bytes) -> None:
        """Put the file in its place, and look at the checkpoint."""
        label, content = unlabelled(data)
        if self.last not in ("", label):
            (self.root / self.last).write_bytes(self.files[self.last])
        self.last = label
        (self.root / label).write_bytes(content)
        place = self.root / label.partition("/")[0]
        with storage_errors("reading"):
            if not self.module.recognises(place):
                self.module.find(place)
                return
            found = self.module.find(place, **self.options)
            made = tables_of(found)
        for name, value in made.plain.items():
            values.encode(value, where=name)
        # Told from the content, so that an input is always treated alike.
        if zlib.crc32(content) % _DEEP == 0 and _nbytes(made) < _READ:
            self._read(place)

    def _read(self, place: Path) -> None:
        reader = ForeignReader(place, **self.options)
        try:
            Checkpoint(reader).state_dict(as_="numpy")
        finally:
            reader.close()


def _nbytes(made: Tables) -> float:
    tensors = made.state.tensors
    return float((tensors.volumes.astype(float) * tensors.itemsize).sum())


def _is_parsed(label: str, data: bytes) -> bool:
    return 0 < len(data) < 3 * seeds.SMALL and "/c/" not in label and "/d/" not in label


def _mutators(label: str, data: bytes) -> Sequence[Mutator]:
    """By what the file is."""
    if label.endswith(".distcp"):
        return (_changed_items, _changed_items, changed_bytes)
    if data[:4] == b"PK\3\4":
        return (changed_archive, changed_archive, changed_bytes)
    if data[:1] == b"{":
        return (changed_json, changed_json, changed_bytes)
    if data[:1] == b"\x80":
        return (changed_pickle, changed_pickle, changed_bytes)
    if data[8:9] == b"{":
        return (changed_header, changed_header, changed_bytes)
    if label.endswith(".ckpt") or b"crc_num" in data[-20:]:
        return (changed_ckpt, changed_ckpt, changed_bytes)
    return (changed_bytes,)


def _changed_items(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Archives end to end, as torch's distributed checkpoints have them: one of them changed."""
    ends, at = [0], data.find(b"PK\5\6")
    while at >= 0:
        ends.append(at + 22 + int.from_bytes(data[at + 20 : at + 22], "little"))
        at = data.find(b"PK\5\6", ends[-1])
    if len(ends) < 2:
        return changed_bytes(rng, data, others)
    pick = rng.randrange(1, len(ends))
    low, high = ends[pick - 1], ends[pick]
    return data[:low] + changed_archive_in_place(rng, data[low:high], ()) + data[high:]
