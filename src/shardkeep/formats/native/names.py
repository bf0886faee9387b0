# SPDX-License-Identifier: Apache-2.0
"""What files and entries are called."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

__all__ = [
    "CONTENT",
    "CONTENT_KEY",
    "DATA",
    "DIGESTS",
    "RECORD",
    "VALUES",
    "data_file",
    "entry_keys",
    "index_file",
    "kept_file",
    "lease_name",
    "lease_save_id",
    "new_save_id",
    "save_id_of",
]

RECORD = "checkpoint.json"
DATA = "data"

CONTENT = "__shardkeep__.content"
VALUES = "__shardkeep__.values"
DIGESTS = "__shardkeep__.digests"

CONTENT_KEY = 8
"""Each content digest follows the start of its chunk, as 8 bytes."""

_FILE = re.compile(r"data/([0-9a-f]{32})-[0-9a-z][0-9a-z.-]{0,180}\.safetensors", re.ASCII)
_LEASE = re.compile(r"checkpoint\.json\.([0-9a-f]{32})\.tmp", re.ASCII)


def new_save_id() -> str:
    """32 random hex digits, one for each attempt."""
    return secrets.token_hex(16)


def data_file(save_id: str, rank: int, number: int) -> str:
    """A rank's n-th data file."""
    return f"{DATA}/{save_id}-r{rank:05d}-{number}.safetensors"


def kept_file(save_id: str, number: int) -> str:
    """The n-th file that an earlier checkpoint has too."""
    return f"{DATA}/{save_id}-k{number:05d}.safetensors"


def index_file(save_id: str) -> str:
    """The index of a save."""
    return f"{DATA}/{save_id}-index.safetensors"


def lease_name(save_id: str) -> str:
    """The temporary record, which is also the save's lease."""
    return f"{RECORD}.{save_id}.tmp"


def save_id_of(path: str) -> str | None:
    """The save a file belongs to, or None where the path is not one of ours."""
    found = _FILE.fullmatch(path)
    return found[1] if found else None


def lease_save_id(name: str) -> str | None:
    """The save a lease belongs to, or None where it is not a lease."""
    found = _LEASE.fullmatch(name)
    return found[1] if found else None


def entry_keys(entries: Iterable[tuple[str, tuple[int, ...] | None]]) -> list[str]:
    """Keys of a data file's entries: the name, with the offsets where it is only a part.

    Keys are for other tools and need only be unique within the file; reserved names are escaped.
    """
    keys = [
        name if offsets is None else f"{name}@{','.join(map(str, offsets))}"
        for name, offsets in entries
    ]
    # Nearly always that is all there is to it.
    if len(set(keys)) == len(keys) and not any(key.startswith("__") for key in keys):
        return keys
    taken: set[str] = set()
    for row, key in enumerate(keys):
        if key == "__metadata__" or key.startswith("__shardkeep__"):
            key = "~" + key
        unique, count = key, 1
        while unique in taken:
            count += 1
            unique = f"{key}~{count}"
        taken.add(unique)
        keys[row] = unique
    return keys
