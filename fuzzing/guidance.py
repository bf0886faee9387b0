"""Which inputs reach code that none before them did: those are worth changing further.

Python 3.12 and later tell of each line once, at next to no cost. Before, inputs are made from the
good ones only.
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

import shardkeep

__all__ = ["Guidance"]

_OURS = os.path.dirname(shardkeep.__file__)


class Guidance:
    """Counts the lines of the library that are reached for the first time."""

    def __init__(self) -> None:
        self.lines = 0
        """Seen so far."""
        self._monitoring: Any = getattr(sys, "monitoring", None)
        if self._monitoring is None:
            return
        tool = self._monitoring.COVERAGE_ID
        if self._monitoring.get_tool(tool) is not None:
            self._monitoring = None  # somebody measures coverage
            return
        self._monitoring.use_tool_id(tool, "fuzzing")
        line = self._monitoring.events.LINE
        self._monitoring.register_callback(tool, line, self._reached)
        self._monitoring.set_events(tool, line)

    def _reached(self, code: CodeType, line: int) -> Any:
        if code.co_filename.startswith(_OURS):
            self.lines += 1
        return self._monitoring.DISABLE

    def close(self) -> None:
        """Stop counting."""
        if self._monitoring is not None:
            self._monitoring.set_events(self._monitoring.COVERAGE_ID, 0)
            self._monitoring.free_tool_id(self._monitoring.COVERAGE_ID)
