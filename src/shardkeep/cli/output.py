# SPDX-License-Identifier: Apache-2.0
"""Every result of every command, for people or as JSON."""

from __future__ import annotations

import json
import pprint
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import click

from shardkeep.cli.texts import count, human_size, jsonable, printable, short_repr

if TYPE_CHECKING:
    from shardkeep.cli.contents import Contents, Row, TensorRow, Totals, ValueRow
    from shardkeep.cli.runs import RunRow
    from shardkeep.cli.selection import Item, TensorItem
    from shardkeep.converting.driver import ConvertResult
    from shardkeep.differing import DiffReport
    from shardkeep.formats.native.commit import GcResult
    from shardkeep.formats.native.verifying import VerifyReport
    from shardkeep.manager.cleaning import Cleaned
    from shardkeep.manager.removal import Removal

__all__ = ["ConsoleOutput", "JsonOutput", "Output"]

RICH_ROWS = 500
"""Longer tables are printed plainly: drawing them takes rich seconds."""
NAMES_SHOWN = 8
"""Names listed for one damaged block."""


class Output(Protocol):
    """Where results go: one method for each command."""

    def contents(self, contents: Contents) -> None:
        """What `show` found."""

    def verified(self, report: VerifyReport, seconds: float) -> None:
        """What `verify` found."""

    def item(self, item: Item) -> None:
        """What `cat` read."""

    def collected(self, path: str, result: GcResult, *, dry_run: bool) -> None:
        """What `gc` removed from a checkpoint."""

    def cleaned(self, path: str, result: Cleaned, *, dry_run: bool) -> None:
        """What `gc` removed from the folder of a run."""

    def run(self, path: str, rows: Sequence[RunRow]) -> None:
        """What `ls` found."""

    def removed(self, path: str, result: Removal, *, dry_run: bool) -> None:
        """What `rm` removed."""

    def pinned(self, path: str, step: int, *, remove: bool) -> None:
        """What `pin` did."""

    def converted(self, result: ConvertResult) -> None:
        """What `convert` did, or would do."""

    def compared(self, report: DiffReport) -> None:
        """What `diff` found."""


class ConsoleOutput:
    """Text; tables are drawn by rich where a terminal shows them."""

    def contents(self, contents: Contents) -> None:
        """Totals, then tensors, then values."""
        from shardkeep.cli.contents import TensorRow, ValueRow

        facts = _facts(contents.totals)
        width = max(len(label) for label, _ in facts)
        for label, text in facts:
            click.echo(f"{label:<{width}}  {printable(text)}")
        tensors = [_tensor_cells(row) for row in contents.rows if isinstance(row, TensorRow)]
        values = [_value_cells(row) for row in contents.rows if isinstance(row, ValueRow)]
        _table(("tensor", "shape", "dtype", "chunks", "size", "files"), tensors, right=(3, 4))
        _table(("value", "type", "content", "file"), values)

    def verified(self, report: VerifyReport, seconds: float) -> None:
        """One line, or every problem."""
        if report.ok:
            files, size = count(report.files, "file"), human_size(report.nbytes)
            click.echo(f"ok: {files}, {size}, {report.digest}, {seconds:.2f} s")
            return
        path = printable(report.checkpoint_id)
        click.echo(f"DAMAGED: {path}: {count(len(report.problems), 'problem')}")
        for problem in report.problems:
            click.echo(f"  {printable(problem.text)}")
            if problem.names:
                shown = ", ".join(map(printable, problem.names[:NAMES_SHOWN]))
                more = len(problem.names) - NAMES_SHOWN
                click.echo(f"    holds: {shown}{f', and {more} more' if more > 0 else ''}")

    def item(self, item: Item) -> None:
        """As numpy or Python would show it."""
        from shardkeep.cli.selection import TensorItem

        if isinstance(item, TensorItem):
            click.echo(_array_text(item))
            return
        sys.set_int_max_str_digits(0)  # the value is asked for by name, however long
        click.echo(pprint.pformat(item.value, width=100, sort_dicts=False))

    def collected(self, path: str, result: GcResult, *, dry_run: bool) -> None:
        """What went or would go, and what was left alone."""
        for name in result.removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {name}")
        for save_id in result.live:
            click.echo(f"left alone: save {save_id} seems to be in progress")
        verb = "to remove" if dry_run else "removed"
        size = human_size(result.nbytes)
        click.echo(f"{printable(path)}: {count(len(result.removed), 'file')} {verb}, {size}")

    def cleaned(self, path: str, result: Cleaned, *, dry_run: bool) -> None:
        """What went or would go, and what was left alone."""
        for name in result.removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {printable(name)}")
        for name in result.live:
            click.echo(f"left alone: {printable(name)} seems to be being saved")
        verb = "to remove" if dry_run else "removed"
        names, size = count(len(result.removed), "name"), human_size(result.nbytes)
        click.echo(f"{printable(path)}: {names} {verb}, {size}")

    def run(self, path: str, rows: Sequence[RunRow]) -> None:
        """A line for each step, and a sum."""
        from shardkeep.cli.runs import run_cells

        cells = [run_cells(row) for row in rows]
        titles = ("step", "state", "size", "shared", "age", "metrics", "")
        _table(titles, cells, right=(0, 2, 3, 4))
        total = sum(row.nbytes for row in rows)
        if rows:
            click.echo()
        click.echo(f"{printable(path)}: {count(len(rows), 'step')}, {human_size(total)}")

    def removed(self, path: str, result: Removal, *, dry_run: bool) -> None:
        """Names, and bytes."""
        for name in result.removed:
            click.echo(f"{'would remove' if dry_run else 'removed'} {printable(name)}")
        verb = "to remove" if dry_run else "removed"
        steps, size = count(len(result.removed), "step"), human_size(result.nbytes)
        click.echo(f"{printable(path)}: {steps} {verb}, {size}")

    def pinned(self, path: str, step: int, *, remove: bool) -> None:
        """One line."""
        click.echo(f"{printable(path)}: step {step} {'is free' if remove else 'is pinned'}")

    def converted(self, result: ConvertResult) -> None:
        """One line; of a dry run also what would become what."""
        from shardkeep.cli.changes import convert_cells, convert_text

        if result.dry_run:
            titles = ("from", "to", "shape", "dtype", "size")
            _table(titles, [convert_cells(row) for row in result.rows], right=(4,))
            click.echo()
        click.echo(convert_text(result))

    def compared(self, report: DiffReport) -> None:
        """Every difference, and a sum."""
        from shardkeep.cli.changes import diff_cells, diff_text

        titles = ("name", "differs in", "a", "b", "changed", "largest")
        _table(titles, [diff_cells(one) for one in report.differences], right=(4, 5))
        if report.differences:
            click.echo()
        click.echo(diff_text(report))


class JsonOutput:
    """One JSON object on one line; keys are stable."""

    def contents(self, contents: Contents) -> None:
        """Totals, and `names`: one object each, told apart by `kind`."""
        totals = contents.totals
        self._print(
            {
                "path": totals.path,
                "format": _format_object(totals),
                "tensors": totals.tensors,
                "values": totals.values,
                "chunks": totals.chunks,
                "files": totals.files,
                "tensor_bytes": totals.tensor_bytes,
                "file_bytes": totals.file_bytes,
                "kept_bytes": totals.kept_bytes,
                "ranks": totals.ranks,
                "saved_at": totals.saved_at,
                "library_version": totals.library_version,
                "save_id": totals.save_id,
                "digest": totals.digest,
                "requires": list(totals.requires),
                "user": jsonable(totals.user),
                "names": [_row_object(row) for row in contents.rows],
                "problems": list(contents.problems),
            }
        )

    def verified(self, report: VerifyReport, seconds: float) -> None:
        """The report."""
        self._print(
            {
                "path": report.checkpoint_id,
                "ok": report.ok,
                "digest": report.digest or None,
                "files": report.files,
                "bytes": report.nbytes,
                "seconds": round(seconds, 3),
                "problems": [
                    {"file": p.file, "block": p.block, "text": p.text, "names": list(p.names)}
                    for p in report.problems
                ],
            }
        )

    def item(self, item: Item) -> None:
        """Nested lists, or the value."""
        from shardkeep.cli.selection import TensorItem

        sys.set_int_max_str_digits(0)
        if not isinstance(item, TensorItem):
            self._print({"name": item.name, "kind": "value", "value": jsonable(item.value)})
            return
        self._print(
            {
                "name": item.name,
                "kind": "tensor",
                "dtype": item.dtype,
                "shape": list(item.shape),
                "value": jsonable(_lists(item)),
            }
        )

    def collected(self, path: str, result: GcResult, *, dry_run: bool) -> None:
        """The result."""
        self._print(
            {
                "path": path,
                "dry_run": dry_run,
                "removed": list(result.removed),
                "bytes": result.nbytes,
                "live": list(result.live),
            }
        )

    def cleaned(self, path: str, result: Cleaned, *, dry_run: bool) -> None:
        """The result."""
        self._print(
            {
                "path": path,
                "dry_run": dry_run,
                "removed": list(result.removed),
                "bytes": result.nbytes,
                "live": list(result.live),
                "problems": list(result.problems),
            }
        )

    def run(self, path: str, rows: Sequence[RunRow]) -> None:
        """`steps`: one object each."""
        from shardkeep.cli.runs import run_object

        self._print({"path": path, "steps": [run_object(row) for row in rows]})

    def removed(self, path: str, result: Removal, *, dry_run: bool) -> None:
        """The result."""
        self._print(
            {
                "path": path,
                "dry_run": dry_run,
                "removed": list(result.removed),
                "pinned": list(result.pinned),
                "failed": list(result.failed),
                "bytes": result.nbytes,
            }
        )

    def pinned(self, path: str, step: int, *, remove: bool) -> None:
        """What is so now."""
        self._print({"path": path, "step": step, "pinned": not remove})

    def converted(self, result: ConvertResult) -> None:
        """The result; `names` says what became what."""
        from shardkeep.cli.changes import convert_object

        self._print(convert_object(result))

    def compared(self, report: DiffReport) -> None:
        """The report."""
        from shardkeep.cli.changes import diff_object

        self._print(diff_object(report))

    @staticmethod
    def _print(body: dict[str, Any]) -> None:
        click.echo(json.dumps(body, allow_nan=False))


# --- show


def _format_object(totals: Totals) -> dict[str, Any]:
    if totals.format is None:
        return {"name": totals.system}
    major, minor = totals.format
    return {"name": "shardkeep", "major": major, "minor": minor}


def _facts(totals: Totals) -> list[tuple[str, str]]:
    tensors, values = count(totals.tensors, "tensor"), count(totals.values, "value")
    on_disk = f"{human_size(totals.file_bytes)} in {count(totals.files, 'file')}"
    if totals.kept_bytes:
        on_disk += f", {human_size(totals.kept_bytes)} of it shared with an earlier checkpoint"
    version = totals.format
    facts = [
        ("checkpoint", totals.path),
        ("format", totals.system if version is None else "shardkeep {}.{}".format(*version)),
        ("holds", f"{tensors}, {values}"),
        ("tensors", f"{human_size(totals.tensor_bytes)} in {count(totals.chunks, 'chunk')}"),
        ("on disk", on_disk),
    ]
    if version is not None:
        facts += [
            ("saved", f"{totals.saved_at or 'unknown when'} by shardkeep {totals.library_version}"),
            ("ranks", "unknown" if totals.ranks is None else str(totals.ranks)),
            ("save id", str(totals.save_id)),
            ("digest", str(totals.digest)),
        ]
    if totals.requires:
        facts.append(("requires", ", ".join(totals.requires)))
    facts += [(f"user {name}", short_repr(value)) for name, value in totals.user.items()]
    return facts


def _tensor_cells(row: TensorRow) -> tuple[str, ...]:
    name, shape = printable(row.name), "x".join(map(str, row.shape)) or "scalar"
    if row.same_as is not None:
        return (name, shape, row.dtype, "", "", f"= {printable(row.same_as)}")
    files = _short_file(row.files[0]) if len(row.files) == 1 else str(len(row.files))
    return (name, shape, row.dtype, str(row.chunks), human_size(row.nbytes), files)


def _value_cells(row: ValueRow) -> tuple[str, ...]:
    return (printable(row.name), row.type or "?", printable(row.text), _short_file(row.file))


def _short_file(name: str) -> str:
    """Without folder, save id and suffix, which are the same for all."""
    return name.rpartition("/")[2].partition("-")[2].removesuffix(".safetensors")


def _row_object(row: Row) -> dict[str, Any]:
    from shardkeep.cli.contents import ValueRow

    if isinstance(row, ValueRow):
        return {
            "name": row.name,
            "kind": "value",
            "type": row.type,
            "text": row.text,
            "files": [row.file],
        }
    return {
        "name": row.name,
        "kind": "tensor",
        "shape": list(row.shape),
        "dtype": row.dtype,
        "chunks": row.chunks,
        "bytes": row.nbytes,
        "files": list(row.files),
        "same_as": row.same_as,
    }


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    if not rows:
        return
    click.echo()
    if sys.stdout.isatty() and len(rows) <= RICH_ROWS:
        _rich_table(titles, rows, right)
        return
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = []
    for cells in (titles, *rows):
        padded = (
            f"{cell:>{width}}" if at in right else f"{cell:<{width}}"
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    click.echo("\n".join(lines))


def _rich_table(titles: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, title in enumerate(titles):
        table.add_column(title, justify="right" if at in right else "left", overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells))  # Text: names are not markup
    Console().print(table)


# --- cat


def _array_text(item: TensorItem) -> str:
    """Like numpy's repr, and always with shape and dtype."""
    import numpy as np

    from shardkeep.cli.selection import EDGE

    body = np.array2string(
        item.array,
        separator=", ",
        prefix="array(",
        threshold=0 if item.cut else item.array.size,
        edgeitems=EDGE,
        max_line_width=100,
    )
    return f"array({body}, shape={item.shape}, dtype={item.dtype})"


def _lists(item: TensorItem) -> object:
    array = item.array
    if array.dtype.kind not in "biufc" or not array.dtype.isnative:
        # A type of ml_dtypes: its elements as numbers, exactly.
        array = array.astype("int64" if item.dtype.startswith(("int", "uint")) else "float64")
    return array.tolist()
