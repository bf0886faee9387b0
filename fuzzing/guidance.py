"""Which inputs reach code that none before them did: those are worth changing further.

Python 3.12 and later tell of each line once, at next to no cost. Before, what is known is where an
input was refused.
"""

from __future__ import annotations

import os
import sys
from types import CodeType
from typing import Any

import shardkeep

__all__ = ["Guidance"]

_CALLERS = 4
"""Frames of a refusal that tell it from others, each with its line; those behind may be many."""
_OURS = os.path.dirname(shardkeep.__file__)


class Guidance:
    """Counts what is reached for the first time: lines of the library, places where it refuses."""

    def __init__(self) -> None:
        self.reached = 0
        """Seen so far."""
        self._places: set[tuple[object, ...]] = set()
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
            self.reached += 1
        return self._monitoring.DISABLE

    def refused(self, parser: str, error: BaseException) -> None:
        """Look at where an input was refused, and at what called that."""
        place: list[object] = []
        trace = error.__traceback__
        while trace is not None:
            place += (trace.tb_frame.f_code, trace.tb_lineno)
            trace = trace.tb_next
        key = (parser, type(error), *place[-2 * _CALLERS :])
        if key not in self._places:
            self._places.add(key)
            self.reached += 1

    def close(self) -> None:
        """Stop counting."""
        if self._monitoring is not None:
            self._monitoring.set_events(self._monitoring.COVERAGE_ID, 0)
            self._monitoring.free_tool_id(self._monitoring.COVERAGE_ID)
