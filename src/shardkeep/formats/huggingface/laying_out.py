# SPDX-License-Identifier: Apache-2.0
"""A state as files of a Hugging Face checkpoint, laid out for one process that has the elements."""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Mapping
from typing import Any, Literal

from shardkeep.errors import UnsupportedValueError
from shardkeep.foreign.layout import Elements, OutFile, Outline, OutTensor, Segment
from shardkeep.foreign.layout import Literal as KnownBytes
from shardkeep.formats.huggingface.names import MODEL, SHARDING
from shardkeep.formats.huggingface.shards import (
    DEFAULT_SIZE,
    Shard,
    Tensor,
    index_text,
    plan_shards,
    refuse_values,
)

__all__ = ["lay_out"]

log = logging.getLogger("shardkeep")

_OF_THE_FILES = ("format", "total_size", "total_parameters", SHARDING)
"""What the metadata says of the files, which are now others."""


def lay_out(
    outline: Outline,
    *,
    max_shard_size: int | str = DEFAULT_SIZE,
    stem: str = MODEL,
    values: Literal["refuse", "drop"] = "refuse",
    single_file: bool = False,
) -> list[OutFile]:
    """`model.safetensors`, or several files and an index; with `single_file` just a file.

    Of tied tensors the first name is stored, as transformers does, and the file tells the others.
    """
    refuse_values(list(outline.values), values)
    stored: dict[int, str] = {}
    ties: dict[str, str] = {}
    by_name: dict[str, OutTensor] = {}
    for name, tensor in outline.tensors.items():
        first = stored.setdefault(id(tensor), name)
        if first == name:
            by_name[name] = tensor
        else:
            ties[name] = first
    shards = plan_shards(
        [Tensor(name, t.dtype, t.shape, t.nbytes) for name, t in by_name.items()],
        max_shard_size=1 << 62 if single_file else max_shard_size,
        stem=stem,
        ties=ties,
        metadata=_texts(outline, by_name, ties),
    )
    if single_file and len(shards) > 1:
        raise UnsupportedValueError("so many names do not fit into the header of a single file")
    files = [_out_file(shard, by_name, "" if single_file else shard.name) for shard in shards]
    index = index_text(shards, stem)
    if index is not None:
        name, text = index
        files.append(OutFile(name, len(text), (KnownBytes(0, text),)))
    return files


def _texts(outline: Outline, names: Container[str], ties: Mapping[str, str]) -> dict[str, str]:
    """What is kept beside the state, as text: nothing else has a place in a header. Nor has the
    name of a tensor: it says that the key is another name of it. Nor what is under such a key."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, sort_keys=True)

    texts = {
        key: text(value) for key, value in outline.user_metadata.items() if key not in _OF_THE_FILES
    }
    for key in [key for key, value in texts.items() if value in names or key in ties]:
        value = texts.pop(key)
        name = key if key in ties else value
        log.warning("user metadata %r is left out: a tensor is called %s", key, name)
    return texts


def _out_file(shard: Shard, by_name: dict[str, OutTensor], name: str) -> OutFile:
    segments: list[Segment] = [KnownBytes(0, shard.header)]
    for tensor, start in shard.tensors:
        if tensor.nbytes:
            zeros = (0,) * len(tensor.shape)
            segments.append(Elements(start, by_name[tensor.name], zeros, tensor.shape))
    return OutFile(name, shard.size, segments)
