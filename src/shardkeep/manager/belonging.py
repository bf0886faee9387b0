# SPDX-License-Identifier: Apache-2.0
"""Which run a fast tier belongs to.

A RAM disk outlives the program, and its folders have short names. So both folders of a run hold one
random word, and a fast tier whose word is not that of the root is of another run: nothing of it is
loaded, copied or removed.
"""

from __future__ import annotations

import contextlib
import re
import secrets

from shardkeep.errors import StorageError
from shardkeep.formats.native.commit import unlink_all
from shardkeep.manager.catalog import MANAGED
from shardkeep.stores.local import LocalStore, storage_errors

__all__ = ["bind", "refuse_foreign", "say_whose"]

WORD = f"{MANAGED}/run"
MOST = 256
_LEFT = re.compile(r"run-[0-9a-f]{16}\.tmp", re.ASCII)


def _word(store: LocalStore) -> str:
    """The run that a folder belongs to; nothing if it does not say."""
    with storage_errors(f"reading {store.root / WORD}"), contextlib.suppress(FileNotFoundError):
        return store.read(WORD, MOST).decode("ascii", "replace")
    return ""


def refuse_foreign(fast: LocalStore, durable: LocalStore) -> bool:
    """Raise if a fast tier that holds steps is not of the run; whether both are known to be."""
    theirs, ours = _word(fast), _word(durable)
    if theirs and theirs == ours:
        return True
    raise StorageError(
        f"{fast.root} holds steps of another run than {durable.root}, or of one that was begun "
        "anew. "
        "Remove that folder, or choose another one; its steps can be loaded by their paths"
    )


def bind(fast: LocalStore, durable: LocalStore) -> str:
    """Have a fast tier without steps belong to the run; the word of both."""
    _write(durable, secrets.token_hex(16))
    ours = _word(durable)
    if _word(fast) != ours:
        unlink_all(fast, [WORD])
        _write(fast, ours)
    return ours


def say_whose(fast: LocalStore, word: str) -> None:
    """Write the word of the run again, if it is gone; raise if another run has come there."""
    _write(fast, word)
    if _word(fast) != word:
        raise StorageError(
            f"another run than this one saves into {fast.root} now. Give each a fast tier of its "
            "own"
        )


def _write(store: LocalStore, word: str) -> None:
    """Write the word, whole or not at all, unless there is one."""
    with storage_errors(f"writing {store.root / WORD}"):
        if _word(store):
            return
        store.make_directory(MANAGED)
        left = [name for name in store.list(MANAGED) if _LEFT.fullmatch(name)]
        unlink_all(store, [f"{MANAGED}/{name}" for name in left])  # by who was killed just here
        name = f"{WORD}-{secrets.token_hex(8)}.tmp"
        file = store.create(name)
        try:
            file.write_at(memoryview(word.encode()), 0)
            file.sync()
        finally:
            file.close()
        try:
            store.rename(name, WORD)  # one job at a time saves here
        finally:
            unlink_all(store, [name])
        store.sync_directory(MANAGED)
