# SPDX-License-Identifier: Apache-2.0
"""Surgery: stored tensors seen under other names, cut, joined and cast, without being copied.

patterns    names with `*` and `#` in them
pieces      a tensor made of boxes of stored ones
rules       fuse, split, stack, unstack
operation   `Surgery`: all that is done to a state, in order, and what is wrong with it
placing     the nesting around what is left
view        a state that was operated on, read through what is stored
"""

from __future__ import annotations

from shardkeep.surgery.operation import Surgery
from shardkeep.surgery.rules import Fuse, Split, Stack, Unstack

__all__ = ["Fuse", "Split", "Stack", "Surgery", "Unstack"]
