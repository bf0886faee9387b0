# SPDX-License-Identifier: Apache-2.0
"""The convert driver: the order of steps, and nothing else."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import shardkeep
from shardkeep.converting.contents import READERS, Contents, Row, contents_of
from shardkeep.converting.journal import DataJournal, clear_unknown
from shardkeep.converting.laid_out import layout_digest, write_laid_out
from shardkeep.converting.native import write_native
from shardkeep.converting.target import checked_shards, checked_target, shard_size
from shardkeep.converting.workplace import (
    Workplace,
    check_free,
    files_below,
    fingerprint,
    finished,
    put_back,
    workplace_of,
)
from shardkeep.engine.budget import check_budget, default_budget
from shardkeep.errors import CheckpointExistsError, StorageError
from shardkeep.foreign.layout import OutFile
from shardkeep.formats.native.layout import Limits
from shardkeep.inspecting import open as open_checkpoint
from shardkeep.progress import Progress, tracked
from shardkeep.storage import CheckpointId
from shardkeep.stores.local import storage_errors
from shardkeep.surgery.operation import Surgery

__all__ = ["ConvertResult", "convert"]

MINIMUM_BUDGET = 16 << 20
"""Reading and writing at once need more than either."""
READING = 16
"""Part of the budget that the buffers of one read get; the rest is for windows and writing."""


@dataclass(frozen=True)
class ConvertResult:
    """What a convert did, or would do."""

    path: str
    """Where the result is."""
    to: str
    """In which format."""
    rows: Sequence[Row]
    """What became what, in the order of the result."""
    nbytes: int
    """Of all tensors in it, ties counted once."""
    files: Mapping[str, int]
    """Its files and their sizes; of a dry run, where they are known before."""
    digest: str = ""
    """Of the record, where the result is in our format."""
    seconds: float = 0.0
    """How long that took."""
    resumed: bool = False
    """Whether it went on with what an attempt that was killed had left."""
    dry_run: bool = False
    """Whether nothing was written."""


def convert(
    src: CheckpointId,
    dst: CheckpointId,
    *,
    to: str = "native",
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[Any] = (),
    mapping: Mapping[str, str] | None = None,
    rules: Sequence[Any] = (),
    cast: Any = (),
    shards: int | None = None,
    max_shard_size: int | str | None = None,
    options: Mapping[str, Any] | None = None,
    memory_budget: int | None = None,
    overwrite: bool = False,
    allow_pickle: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    progress: Progress = None,
) -> ConvertResult:
    """Convert a checkpoint of any format we read into one of any format we write.

    See `shardkeep.Surgery` for `select` to `cast`; `options` are the target's own. Everything that
    is wrong with names, rules and types is one error, before anything is written. The result
    appears at `dst` whole, or not at all; after a kill, the same call goes on where it was.
    """
    begun = time.perf_counter()
    surgery = Surgery(select, exclude, rename, mapping or {}, rules, cast)
    shards = checked_shards(shards)
    target, options = checked_target(to, options or {}, not shards is max_shard_size is None)
    budget = _checked_budget(memory_budget)
    source, destination = _paths(src, dst)
    # However it is written: the order of a dict means nothing.
    wishes = {**vars(surgery), "mapping": sorted(surgery.mapping.items(), key=repr)}
    asked = [to, wishes, sorted(options.items()), verify, allow_pickle]
    request = ""
    if not dry_run:
        put_back(destination)
        if overwrite and os.path.realpath(source) == os.path.realpath(destination):
            # Its source is gone: done once more, names that changed places would change back.
            # Where that is does not matter: what was left lies beside it, and moves with it.
            request = _digest(shards, max_shard_size, *asked)
            done = finished(destination, request, ConvertResult)
            if done is not None:
                return replace(done, path=str(destination), seconds=_since(begun), resumed=True)
    check_free(destination, overwrite=overwrite)
    with open_checkpoint(
        src, verify=verify, allow_pickle=allow_pickle, memory_budget=max(8 << 20, budget // READING)
    ) as checkpoint:
        contents = contents_of(checkpoint, surgery)
        size = shard_size(contents.nbytes, shards, max_shard_size)
        files: list[OutFile] = []
        if target is not None:
            more = {} if size is None else {target.size: size}
            files = target.lay_out(contents.outline(allow_pickle), **options, **more)
        sizes = {file.name: file.size for file in files}
        if dry_run:
            return _result(contents, destination, to, sizes, dry_run=True)
        looks = (checkpoint.digest, fingerprint(source))
        laid_out, version = layout_digest(files), shardkeep.__version__
        identity = _digest(str(source), looks, size, laid_out, version, *asked)
        with tracked(progress, "converting") as counter:
            counter.expect(sum(sizes.values()) or contents.nbytes)
            with Workplace(destination, identity, overwrite=overwrite) as place:
                _check_room(place, sum(sizes.values()) or contents.nbytes)
                digest, writing = "", budget - READERS * budget // READING
                if target is None:
                    clear_unknown(place)
                    digest = write_native(
                        contents,
                        place.made,
                        DataJournal(place, counter),
                        budget=writing,
                        limits=Limits() if size is None else Limits(size, least=size),
                        progress=counter,
                    )
                else:
                    write_laid_out(contents, files, place, budget=writing, progress=counter)
                resumed, sizes = place.is_resumed, sizes or _sizes(place.made)
                result = _result(contents, destination, to, sizes, digest=digest, resumed=resumed)
                if request:
                    place.publish({"request": request, "result": msgspec.to_builtins(result)})
                else:
                    place.publish()
        return replace(result, seconds=_since(begun))


def _digest(*asked: Any) -> str:
    return hashlib.sha256(repr(asked).encode()).hexdigest()


def _since(begun: float) -> float:
    return time.perf_counter() - begun


def _checked_budget(memory_budget: int | None) -> int:
    if memory_budget is None:
        return max(MINIMUM_BUDGET, default_budget())
    check_budget(memory_budget, MINIMUM_BUDGET)
    return memory_budget


def _paths(src: CheckpointId, dst: CheckpointId) -> tuple[Path, Path]:
    source, destination = (Path(os.path.abspath(os.fspath(path))) for path in (src, dst))
    inside, around = os.path.realpath(source), os.path.realpath(destination)
    if inside != around and os.path.commonpath([inside, around]) in (inside, around):
        raise CheckpointExistsError(
            f"{destination} and {source} lie in each other; choose another destination"
        )
    built = workplace_of(Path(around))
    if Path(inside).is_relative_to(built):
        raise CheckpointExistsError(
            f"{source} lies in {built}, where {destination} would be built; move it first, or "
            "choose another destination"
        )
    return source, destination


def _check_room(place: Workplace, nbytes: int) -> None:
    """A disk that is too small is better known now than in an hour."""
    if place.is_resumed:
        return
    free = shutil.disk_usage(place.folder).free
    if free < nbytes:
        full = StorageError(
            f"{place.destination} needs {nbytes} bytes, and {free} are free on its file system"
        )
        full.errno = errno.ENOSPC
        raise full


def _sizes(path: Path) -> dict[str, int]:
    with storage_errors(f"looking at {path}"):
        entries = sorted(files_below(path))
        return {entry.relative_to(path).as_posix(): entry.stat().st_size for entry in entries}


def _result(
    contents: Contents, path: Path, to: str, files: Mapping[str, int], **more: Any
) -> ConvertResult:
    return ConvertResult(str(path), to, contents.rows(), contents.nbytes, files, **more)
