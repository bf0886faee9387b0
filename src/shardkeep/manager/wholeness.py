# SPDX-License-Identifier: Apache-2.0
"""Whether a step is whole, as far as can be told without reading its data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from shardkeep.errors import CheckpointError
from shardkeep.formats.native.commit import read_record, refuse_linked_data
from shardkeep.manager.steps import Step
from shardkeep.stores.local import LocalStore

__all__ = ["any_whole", "look_at_files"]


def look_at_files(step: Step) -> tuple[str, int]:
    """What is wrong with the files that its record names, and bytes of those with other names."""
    store = LocalStore(step.path)
    problem, shared = "", 0
    try:
        record = read_record(store)
        refuse_linked_data(store)  # no reader would go on either
    except CheckpointError as error:
        return str(error), 0
    for row in (record.index, *record.files):
        try:
            found = store.stat(row.name)
        except OSError:
            problem = problem or f"{row.name} is not there"
            continue
        if found.size != row.size:
            problem = problem or f"{row.name} has {found.size} bytes, expected {row.size}"
        shared += found.size if found.links > 1 else 0
    return problem, shared


def any_whole(steps: Iterable[Step]) -> bool:
    """Whether all files of one of them are there, in one of its copies."""
    return any(
        not look_at_files(replace(step, path=path))[0] for step in steps for path in step.copies
    )
