# SPDX-License-Identifier: Apache-2.0
"""What a step's directory is called, and back."""

from __future__ import annotations

import re
import string

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
        fields = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        if fields != ["step"]:
            raise ValueError(f"step_name is {template!r}; it needs the field {{step}} once")
        self.template = template
        before, after = (
            part.replace("{{", "{").replace("}}", "}")
            for part in re.split(r"(?<!\{)\{step[^{}]*\}", template, maxsplit=1)
        )
        self._pattern = re.compile(f"{re.escape(before)}0*([0-9]{{1,18}}){re.escape(after)}")
        for step in (0, 123_456):
            name = self.of(step)
            if "/" in name or "\\" in name or name.startswith(".") or self.step(name) != step:
                raise ValueError(
                    f"step_name is {template!r}, which makes {name!r}; it must make the name of a "
                    "directory, not begin with a dot, and have the step in decimal digits"
                )

    def of(self, step: int) -> str:
        """The name of a step's directory."""
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 10**18:
            raise ValueError(f"step is {step!r}; use an integer from 0 on")
        name = self.template.format(step=step)
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
