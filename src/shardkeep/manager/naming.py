# SPDX-License-Identifier: Apache-2.0
"""What a step's directory is called, and back."""

from __future__ import annotations

import re
import string

from shardkeep.manager.checking import MOST, checked_step

__all__ = ["DEFAULT_NAME", "StepNames"]

DEFAULT_NAME = "step-{step}"
MAX_NAME = 200
"""Bytes; what is being removed gets a longer name."""


class StepNames:
    """The names of steps, by a template such as `step-{step}` or `{step:08}`.

    >>> names = StepNames("step-{step:06}")
    >>> names.of(100), names.step("step-000100"), names.step("step-100"), names.step("notes")
    ('step-000100', 100, None, None)
    """

    def __init__(self, template: str = DEFAULT_NAME) -> None:
        """The template has the field `{step}` once, and makes one name of a directory."""
        if not isinstance(template, str):
            raise TypeError(f"step_name is {template!r}; use text, such as {DEFAULT_NAME!r}")
        try:
            parts = list(string.Formatter().parse(template))
            fields = [name for _, name, _, _ in parts if name is not None]
            if fields != ["step"] or any("{" in (spec or "") for _, _, spec, _ in parts):
                raise ValueError("it needs the field {step} once")
            template.format(step=MOST).encode()
        except ValueError as error:
            raise ValueError(f"step_name is {template!r}: {error}") from None
        self.template = template
        digits = "0*([0-9]{1,18})"
        texts = [re.escape(text) + (digits if name == "step" else "") for text, name, _, _ in parts]
        self._pattern = re.compile("".join(texts))
        self.of(123_456)
        for step in (0, 123_456, MOST):
            name = template.format(step=step)
            if set("/\\\0") & set(name) or name.startswith(".") or self.step(name) != step:
                raise ValueError(
                    f"step_name is {template!r}, which makes {name!r}; it must make the name of a "
                    "directory, not begin with a dot, and have the step in decimal digits"
                )

    def of(self, step: int) -> str:
        """The name of a step's directory."""
        name = self.template.format(step=checked_step(step))
        if len(name.encode()) > MAX_NAME:
            raise ValueError(f"the name of step {step} is longer than {MAX_NAME} bytes")
        return name

    def step(self, name: str) -> int | None:
        """The step that has a name, or None where none has."""
        found = self._pattern.fullmatch(name)
        if found is None:
            return None
        step = int(found[1])
        return step if self.template.format(step=step) == name else None
