# SPDX-License-Identifier: Apache-2.0
"""`convert` and `diff`: their arguments, help and exit codes."""

from __future__ import annotations

import json as json_text
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardkeep.cli.guard import CommandError, json_option, output_for
from shardkeep.errors import (
    CheckpointError,
    CheckpointExistsError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)

if TYPE_CHECKING:
    from shardkeep.progress import Progress

__all__ = ["convert", "diff"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE | re.ASCII)
_SPOKEN = (
    ("overwrite=True", "--overwrite"),
    ("allow_pickle=True", "--allow-pickle"),
    ("values='drop'", "--option values=drop"),
)
"""What errors advise in Python, and in a shell."""
_FORMATS = ("native", "hf", "torch-dcp", "torch-save", "hyper-parallel", "mindspore")


def parse_size(text: str) -> int:
    """Bytes: as Hugging Face counts them, 5GB are 5 * 10**9 and 5GiB are 5 * 2**30.

    >>> parse_size("5GB"), parse_size("512MiB"), parse_size("1000")
    (5000000000, 536870912, 1000)
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size; write 5GB, 512MiB or bytes")
    power = " KMGT".index(found[2].upper() or " ")
    size = float(found[1]) * (1024 if found[3] else 1000) ** power
    if size >= 1 << 63:
        shown = text if len(text) <= 40 else f"{text[:40]}..."
        raise ValueError(f"{shown} is more than any file can have")
    return int(size)


def _size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def _mapping(ctx: click.Context, param: click.Parameter, path: str | None) -> dict[str, str]:
    """A file of old to new names: JSON, or TOML where it is called so."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        found: Any = tomllib.loads(text) if path.endswith(".toml") else json_text.loads(text)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path}: {error}", ctx, param) from error
    except RecursionError as error:
        raise click.BadParameter(f"{path} is too deeply nested", ctx, param) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise click.BadParameter(f"{path} is not a table of old names to new ones", ctx, param)
    return found


def _options(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    """Options of a format, as they were written."""
    out: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", ctx, param)
        out[name] = value
    return out


def _option(name: str, text: str, kind: type | None) -> Any:
    """JSON where that can be read, else text; text also where the format wants that."""
    try:
        value: Any = json_text.loads(text)
    except ValueError:
        return text
    except RecursionError as error:
        raise CommandError(f"--option {name} is too deeply nested") from error
    return text if kind is str and type(value) is not str else value


_EXAMPLES = """\b
Examples:
  shardkeep convert run/step-100 out --to hf --select model --rename '^model\\.='
  shardkeep convert run/step-100 small --cast f32=bf16 --exclude 'optimizer.*'
  shardkeep convert hf-model run/start --dry-run
  shardkeep convert a b --rule 'fuse *.q, *.k, *.v = *.qkv @ 0'
  shardkeep convert a b --rule 'split *.qkv = *.q:4096, *.k:1024, *.v:1024 @ 0'
  shardkeep convert a b --rule 'stack *.experts.#.w1 = *.experts.w1 @ 0'
  shardkeep convert a b --rule 'unstack *.experts.w1 = *.experts.#.w1 @ 0'

A rule's * is any text, the same in all of its names, and # is a number from 0 up. @ is the
dimension; @ 0/8 fuses and splits within each of 8 groups. Names of rules are the new ones.
"""


@click.command(short_help="Another format, other names, other types.", epilog=_EXAMPLES)
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@click.option("--to", type=click.Choice(_FORMATS), default="native", show_default=True)
@click.option("--select", multiple=True, metavar="GLOB", help="Only these names or containers.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not these.")
@click.option("--rename", multiple=True, metavar="REGEX=REPLACEMENT", help="As Python's re.sub.")
@click.option("--mapping", metavar="FILE", callback=_mapping, help="JSON or TOML: old = new names.")
@click.option("--rule", "rules", multiple=True, metavar="RULE", help="fuse, split, stack, unstack.")
@click.option("--cast", multiple=True, metavar="OLD=NEW", help="f32=bf16, or GLOB:f32=bf16.")
@click.option("--shards", type=click.IntRange(1), help="About how many files of tensors.")
@click.option("--max-shard-size", metavar="SIZE", callback=_size, help="Of one file: 5GB, 512MiB.")
@click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    callback=_options,
    help="Of the format itself.",
)
@click.option("--memory-budget", metavar="SIZE", callback=_size, help="For buffers: 256MiB.")
@click.option("--overwrite", is_flag=True, help="Replace the checkpoint at DST, when all is done.")
@click.option("--allow-pickle", is_flag=True, help="Open pickled values of SRC, which runs code.")
@click.option("--no-verify", is_flag=True, help="Do not check the digests of what is read.")
@click.option("--dry-run", is_flag=True, help="Only say what would become what.")
@json_option
def convert(
    src: str,
    dst: str,
    to: str,
    mapping: dict[str, str],
    no_verify: bool,
    dry_run: bool,
    json: bool,
    options: dict[str, str],
    **more: Any,
) -> None:
    """Write the checkpoint SRC, of any format, to DST in another.

    Streams within a memory budget and uses all cores. DST appears whole, or not at all; a convert
    that was killed goes on when it is started again with the same arguments. Everything that is
    wrong with names, rules and types is said before anything is written.
    """
    from shardkeep.converting.driver import convert as run_convert
    from shardkeep.converting.target import TARGETS

    target = TARGETS[to]
    kinds = {} if target is None else target.options
    bar: Progress = True if sys.stderr.isatty() and not json else None
    try:
        result = run_convert(
            src,
            dst,
            to=to,
            mapping=mapping,
            verify=not no_verify,
            dry_run=dry_run,
            progress=bar,
            options={name: _option(name, text, kinds.get(name)) for name, text in options.items()},
            **more,
        )
    except (CheckpointExistsError, UnsafeCheckpointError, UnsupportedValueError) as error:
        text = str(error)
        for python, shell in _SPOKEN:
            text = text.replace(python, shell)
        error.args = (text,)  # the same error: it may have notes, and --debug shows where it began
        raise
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CommandError(str(error)) from error
    output_for(json).converted(result)


@click.command(short_help="What differs between two checkpoints.")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.argument("globs", metavar="[NAME-GLOB]...", nargs=-1)
@click.option("--rtol", type=click.FloatRange(0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(0), default=0.0, help="Absolute tolerance.")
@click.option("--memory-budget", metavar="SIZE", callback=_size, help="For buffers: 256MiB.")
@json_option
@click.pass_context
def diff(
    ctx: click.Context, /, a: str, b: str, globs: tuple[str, ...], json: bool, **options: Any
) -> None:
    """Compare the names, shapes, types and elements of two checkpoints, of any formats.

    Elements are equal if their bits are, unless there is a tolerance. Exits with 0 if nothing
    differs, with 1 if something does, and with 2 if one of the two cannot be read.
    """
    from shardkeep.differing import diff as run_diff

    bar: Progress = True if sys.stderr.isatty() and not json else None
    try:
        report = run_diff(a, b, keys=globs, progress=bar, **options)
    except (CheckpointError, ValueError) as error:
        raise CommandError(str(error)) from error  # 1 would mean that they differ
    output_for(json).compared(report)
    if not report.same:
        ctx.exit(1)
