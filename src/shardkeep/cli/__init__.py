# SPDX-License-Identifier: Apache-2.0
"""The command `shardkeep`: look into checkpoints, check, compare and convert them, clean up.

    commands   what the command line is: arguments, help, errors and exit codes
    guard      how every command ends
    contents   what `show` finds in a checkpoint
    selection  `cat`'s slices, and reading only what they select
    runs       what `ls`, `rm`, `pin` and `gc` find and do in the folder of a run
    texts      sizes, durations, names and values as text or JSON
    conversions, changes   `convert` and `diff`, and what they found
    output     every result for people, or as JSON

Nothing here imports a framework, and `rich` only draws on a terminal.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process, and exit."""
    from shardkeep.cli.commands import cli

    cli(prog_name="shardkeep")
