# SPDX-License-Identifier: Apache-2.0
"""Other systems' checkpoints, as a kind of storage that is only read."""

from __future__ import annotations

from typing import ClassVar

from shardkeep.foreign.reader import ForeignReader

__all__ = ["ForeignStorage"]


class ForeignStorage:
    """What `load` and `open` find where another system's checkpoint lies."""

    reader: ClassVar = ForeignReader
