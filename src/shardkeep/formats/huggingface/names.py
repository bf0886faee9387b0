# SPDX-License-Identifier: Apache-2.0
"""What the files of a Hugging Face checkpoint are called, and what their headers say beside it."""

from __future__ import annotations

import re

from shardkeep.dtypes import TABLE, DType

__all__ = [
    "DTYPE_OF",
    "INDEX_ENDING",
    "MODEL",
    "NUMBERED",
    "PACKED",
    "SHARDING",
    "TORCH_SHARD",
    "WEIGHTS_ENDING",
    "entry_form",
    "file_name",
    "index_name",
    "is_plain",
]

MODEL = "model"
"""The stem that transformers looks for."""
WEIGHTS_ENDING = ".safetensors"
INDEX_ENDING = ".safetensors.index.json"
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.safetensors\Z")
TORCH_SHARD = re.compile(r"shard-\d{5,}-.+\.safetensors\Z")
"""Files of ranks, as torch's HuggingFaceStorageWriter leaves them without consolidation."""

SHARDING = "DCP_SHARDING_INFO"
"""In the metadata of those: where in its tensor each entry begins."""

DTYPE_OF = {
    row.safetensors: row.name
    for row in reversed(TABLE.values())
    if not row.extra_dim and (row.safetensors != "U8" or row.name == "uint8")
}
"""safetensors' codes, those for elements of whole bytes, to our names."""

PACKED = "float4_e2m1fn_x2"
"""Two in a byte, which is one element to torch and two to safetensors."""


def entry_form(dtype: DType, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Type and shape of a tensor in a file that other tools are to understand; None: they can't."""
    if dtype.name == PACKED and shape:
        return "F4", (*shape[:-1], 2 * shape[-1])
    return (dtype.safetensors, shape) if DTYPE_OF.get(dtype.safetensors) == dtype.name else None


def file_name(number: int, count: int, stem: str = MODEL) -> str:
    """One of `count` files, the first of which is number 0."""
    if count == 1:
        return f"{stem}{WEIGHTS_ENDING}"
    return f"{stem}-{number + 1:05}-of-{count:05}{WEIGHTS_ENDING}"


def index_name(stem: str = MODEL) -> str:
    """The file that says which tensor lies in which file."""
    return f"{stem}{INDEX_ENDING}"


def is_plain(name: object) -> bool:
    """Whether a name is that of a file of the directory itself."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and not any(mark in name for mark in "/\\\0:")
        and not any("\ud800" <= letter <= "\udfff" for letter in name)
    )
