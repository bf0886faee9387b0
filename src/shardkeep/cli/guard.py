# SPDX-License-Identifier: Apache-2.0
"""How every command ends: in a message and an exit code, not in a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import IO, TYPE_CHECKING, Any

import click

from shardkeep.errors import CheckpointError, CorruptionError

if TYPE_CHECKING:
    from shardkeep.cli.output import Output

__all__ = ["DAMAGED", "CommandError", "Guarded", "complain", "json_option", "output_for"]

DAMAGED = 1
FAILED = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class CommandError(click.ClickException):
    """The command cannot do what was asked; one line for the user, exit code 2."""

    exit_code = FAILED

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it like every other error."""
        complain(self.message)


class Guarded(click.Group):
    """A group whose commands end in a message and an exit code, not in a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        """Run, and translate what went wrong."""
        for stream in (sys.stdout, sys.stderr):
            # Names may hold anything; a narrow terminal encoding must not end the command.
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # What is still buffered must not fail once more when Python exits.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        except (CheckpointError, OSError, MemoryError) as error:
            if ctx.params.get("debug"):
                traceback.print_exc()
            else:
                complain(str(error) or type(error).__name__, getattr(error, "__notes__", ()))
            ctx.exit(DAMAGED if isinstance(error, CorruptionError) else FAILED)


def complain(message: str, notes: tuple[str, ...] | list[str] = ()) -> None:
    """Print what is wrong."""
    from shardkeep.cli.texts import printable

    lines = [line for text in (message, *notes) for line in text.split("\n")]
    click.echo("\n".join(["error: " + printable(lines[0]), *map(printable, lines[1:])]), err=True)


def output_for(json: bool) -> Output:
    """Where results go."""
    from shardkeep.cli.output import ConsoleOutput, JsonOutput

    return JsonOutput() if json else ConsoleOutput()


json_option = click.option("--json", is_flag=True, help="Print one JSON object, for programs.")
"""Of every command."""
