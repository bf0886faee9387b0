# SPDX-License-Identifier: Apache-2.0
"""The command line: arguments, help, errors and exit codes.

Only click is imported here; what a command needs, it imports when it runs, so that `--help` costs
nothing.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from shardkeep import __version__
from shardkeep.cli.conversions import convert, diff
from shardkeep.cli.guard import DAMAGED, CommandError, Guarded, complain, json_option, output_for
from shardkeep.errors import CheckpointError

if TYPE_CHECKING:
    from shardkeep.progress import Progress

__all__ = ["cli"]

_EPILOG = """\b
Examples:
  shardkeep show run/step-100                     what is in it
  shardkeep show run/step-100 'model.*.weight'    some of it
  shardkeep verify run/step-100                   is every bit as it was written?
  shardkeep cat run/step-100 model.emb.weight 0:10,:4
  shardkeep convert run/step-100 out --to hf --select model
  shardkeep diff run/step-100 run/step-200
  shardkeep ls run                                the steps of a run
  shardkeep pin run 100 --why 'for the paper'     never remove this one
  shardkeep rm run 100 200                        remove these
  shardkeep gc run --dry-run                      what killed saves left behind

\b
Exit codes:
  0    done, and nothing is wrong
  1    the checkpoint is damaged; of diff: the two differ
  2    not done: wrong usage, no checkpoint or name there, a format or
       storage that cannot be read
  130  interrupted
  141  the reader of the output went away
"""


def _seconds(ctx: click.Context, param: click.Parameter, text: str) -> float:
    from shardkeep.cli.texts import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


_path = click.argument("path", metavar="PATH")
_root = click.argument("root", metavar="ROOT")


def _template(ctx: click.Context, param: click.Parameter, text: str) -> str:
    from shardkeep.manager.naming import StepNames

    try:
        return StepNames(text).template
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


_step_name = click.option(
    "--step-name",
    metavar="TEMPLATE",
    default="step-{step}",
    show_default=True,
    callback=_template,
    help="What the directories of steps are called.",
)


@click.group(cls=Guarded, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s", prog_name="shardkeep")
@click.option(
    "--debug", is_flag=True, envvar="SHARDKEEP_DEBUG", help="Show tracebacks [SHARDKEEP_DEBUG=1]."
)
def cli(debug: bool) -> None:
    """Look into checkpoints, verify, compare and convert them, clean up after killed saves.

    PATH is a checkpoint's directory, the one that holds checkpoint.json. ROOT is the folder of a
    run, which holds its steps.
    """


@cli.command(short_help="What is in a checkpoint.")
@_path
@click.argument("glob", metavar="[NAME-GLOB]", required=False)
@json_option
@click.pass_context
def show(ctx: click.Context, path: str, glob: str | None, json: bool) -> None:
    """Show what is in a checkpoint: totals, then every tensor, then every value.

    NAME-GLOB narrows the names: 'model.*.weight', or a container such as model. Only the record,
    the index and, unless they are large, the plain values are read and checked.
    """
    from shardkeep.cli.contents import read_contents

    contents = read_contents(path, glob)
    if glob is not None and not contents.rows:
        raise CommandError(f"no name in {path} matches {glob!r}")
    output_for(json).contents(contents)
    for problem in contents.problems:
        complain(problem)
    if contents.problems:
        ctx.exit(DAMAGED)


@cli.command(short_help="Check every byte of a checkpoint.")
@_path
@click.option(
    "--expect", metavar="DIGEST", help="Also require this record digest, as printed by a save."
)
@json_option
@click.pass_context
def verify(ctx: click.Context, path: str, expect: str | None, json: bool) -> None:
    """Read every byte of every file and compare it with its digest.

    Prints one line and exits with 0 when all is well; otherwise lists the damaged files, blocks
    and names, and exits with 1.
    """
    from shardkeep.inspecting import verify as run_verify

    began = time.perf_counter()
    bar: Progress = True if sys.stderr.isatty() and not json else None
    report = run_verify(path, expect_digest=expect, progress=bar)
    output_for(json).verified(report, time.perf_counter() - began)
    if not report.ok:
        ctx.exit(DAMAGED)


# A slice may begin with "-", which is not an option here.
@cli.command(
    short_help="Print a tensor or a value.", context_settings={"ignore_unknown_options": True}
)
@_path
@click.argument("name", metavar="NAME")
@click.argument("index", metavar="[SLICE]", required=False)
@json_option
def cat(path: str, name: str, index: str | None, json: bool) -> None:
    """Print what a tensor or value holds.

    SLICE selects as numpy does: 0:10   3,:,2   ...,-1   ::2. Only the selected part is read; of a
    large selection only the corners that are printed. With --json all of it is printed, as nested
    lists; "NaN", "Infinity" and "-Infinity" are strings, a complex number is [real, imaginary].
    """
    from shardkeep.cli.selection import read_item

    try:
        item = read_item(path, name, index, corners=not json)
    except (IndexError, LookupError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CommandError(str(error.args[0])) from error
    output_for(json).item(item)


@cli.command(short_help="Remove what killed saves left behind.")
@_path
@_step_name
@click.option(
    "--older-than",
    metavar="TIME",
    default="1h",
    show_default=True,
    callback=_seconds,
    help="Take a save for dead when its lease is older: seconds, or 45s, 30m, 1h, 2d.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def gc(path: str, step_name: str, older_than: float, dry_run: bool, json: bool) -> None:
    """Remove the files of saves that were killed before they were committed.

    PATH is a checkpoint, or the folder of a run: then all of its steps are looked at, and removals
    that were cut short are finished. Never touches a committed checkpoint. A running save renews
    its lease every 30 seconds and is left alone unless --older-than is less than that; a save so
    collected fails at its commit.
    """
    from shardkeep.cli.runs import Run, is_run
    from shardkeep.inspecting import gc as run_gc

    if is_run(path, step_name):
        cleaned = Run(path, step_name).clean(stale_s=older_than, dry_run=dry_run)
        output_for(json).cleaned(path, cleaned, dry_run=dry_run)
        if cleaned.problems:
            raise CommandError(f"not cleaned: {'; '.join(cleaned.problems)}")
        return
    result = run_gc(path, stale_s=older_than, dry_run=dry_run)
    output_for(json).collected(path, result, dry_run=dry_run)


@cli.command(short_help="The steps of a run.")
@_root
@click.option("--fast", metavar="FAST", help="The run's fast tier, listed too.")
@_step_name
@json_option
@click.pass_context
def ls(ctx: click.Context, root: str, fast: str | None, step_name: str, json: bool) -> None:
    """List the steps of a run: size, bytes shared with other steps, metrics, age, pins.

    A step is whole if every file that its record names is there with its size; the contents are
    for verify. Exits with 1 if one is damaged.
    """
    from shardkeep.cli.runs import Run, tiered

    rows = Run(root, step_name).rows()
    if fast is not None:
        rows = tiered(Run(fast, step_name).rows(), rows)
    output_for(json).run(root, rows)
    if any(row.state == "damaged" for row in rows):
        ctx.exit(DAMAGED)


@cli.command(short_help="Remove steps of a run.")
@_root
@click.argument("steps", metavar="STEP...", nargs=-1, required=True, type=click.IntRange(0))
@_step_name
@click.option("--force", is_flag=True, help="Also pinned, unfinished, or the last whole ones.")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def rm(
    root: str, steps: tuple[int, ...], step_name: str, force: bool, dry_run: bool, json: bool
) -> None:
    """Remove steps, given by number.

    Refused where a step is pinned or being read, or where no whole one would be left. A removal
    that is cut short is finished by gc, or by the next save of the run.
    """
    from shardkeep.cli.runs import Run

    done = Run(root, step_name).remove(steps, force=force, dry_run=dry_run)
    output_for(json).removed(root, done, dry_run=dry_run)
    if done.pinned or done.failed:
        raise CommandError(f"not removed: {', '.join((*done.pinned, *done.failed))}")


@cli.command(short_help="Have a step of a run never removed.")
@_root
@click.argument("step", metavar="STEP", type=click.IntRange(0))
@_step_name
@click.option("--why", metavar="TEXT", default="", help="A note, shown by ls.")
@click.option("--remove", is_flag=True, help="Let go of the step again.")
@json_option
def pin(root: str, step: int, step_name: str, why: str, remove: bool, json: bool) -> None:
    """Hold a step: no policy and no rm removes it until the pin is removed."""
    from shardkeep.cli.runs import Run

    run = Run(root, step_name)
    if remove:
        count = run.unpin(step)
        if not count:
            raise CommandError(f"step {step} in {root} has no pin")
    else:
        run.pin(step, why)
    output_for(json).pinned(root, step, remove=remove)


cli.add_command(convert)
cli.add_command(diff)
