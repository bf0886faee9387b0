# SPDX-License-Identifier: Apache-2.0
"""What is closed at its end, and may find then that something went wrong behind its back."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["Closing"]


class Closing(ABC):
    """Usable in `with`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; raises what nobody has looked at."""

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; an error that is on its way goes before that of a save in the background."""
        if error is None:
            self.close()
            return
        with contextlib.suppress(Exception):
            self.close()
