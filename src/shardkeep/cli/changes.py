# SPDX-License-Identifier: Apache-2.0
"""What `convert` and `diff` found, as cells of tables and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardkeep.cli.texts import count, human_size, jsonable, printable

if TYPE_CHECKING:
    from shardkeep.converting.contents import Row
    from shardkeep.converting.driver import ConvertResult
    from shardkeep.differing import Difference, DiffReport

__all__ = [
    "convert_cells",
    "convert_object",
    "convert_text",
    "diff_cells",
    "diff_object",
    "diff_text",
]

_OLD_SHOWN = 3
"""Names of sources that stand in one cell."""


def convert_cells(row: Row) -> tuple[str, ...]:
    """A line of the plan."""
    old = ", ".join(map(printable, row.old[:_OLD_SHOWN]))
    more = len(row.old) - _OLD_SHOWN
    old += f" and {more} more" if more > 0 else ""
    if row.kind == "value":
        return (old, printable(row.name), "", "value", "")
    shape = "x".join(map(str, row.shape)) or "scalar"
    dtype = row.dtype if row.dtype == row.old_dtype else f"{row.old_dtype} -> {row.dtype}"
    size = f"= {printable(row.tie)}" if row.tie else human_size(row.nbytes)
    return (old, printable(row.name), shape, dtype, size)


def convert_text(result: ConvertResult) -> str:
    """One line that says what was done."""
    tensors = count(sum(row.kind == "tensor" for row in result.rows), "tensor")
    values = count(sum(row.kind == "value" for row in result.rows), "value")
    size = human_size(result.nbytes)
    text = f"{printable(result.path)}: {tensors}, {values}, {size}"
    if result.files:
        text += f" in {count(len(result.files), 'file')}"
    if result.dry_run:
        return f"{text} would be written as {result.to}"
    gone_on = ", going on with what was there" if result.resumed else ""
    return f"{text} as {result.to}, {result.seconds:.2f} s{gone_on}"


def convert_object(result: ConvertResult) -> dict[str, Any]:
    """All of it."""
    return {
        "path": result.path,
        "to": result.to,
        "dry_run": result.dry_run,
        "resumed": result.resumed,
        "bytes": result.nbytes,
        "files": dict(result.files),
        "digest": result.digest or None,
        "seconds": round(result.seconds, 3),
        "names": [
            {
                "name": row.name,
                "from": list(row.old),
                "kind": row.kind,
                "dtype": row.dtype or None,
                "from_dtype": row.old_dtype or None,
                "shape": list(row.shape),
                "bytes": row.nbytes,
                "same_as": row.tie or None,
            }
            for row in result.rows
        ],
    }


def diff_cells(one: Difference) -> tuple[str, ...]:
    """A line of the report."""
    changed = largest = ""
    if one.elements:
        changed = f"{one.changed:,} of {one.elements:,} ({one.fraction:.2%})"
        largest = "" if one.max_abs is None else f"{one.max_abs:.4g}"
    return (printable(one.name), one.kind, printable(one.a), printable(one.b), changed, largest)


def diff_text(report: DiffReport) -> str:
    """One line that says how it ended."""
    names, size = count(report.names, "name"), human_size(report.nbytes)
    known = f", {human_size(report.known_bytes)} equal by digest" if report.known_bytes else ""
    if report.same:
        return f"the same: {names}, {size}{known}"
    differ = "differs" if len(report.differences) == 1 else "differ"
    return f"{len(report.differences):,} of {names} {differ}; {size} compared{known}"


def diff_object(report: DiffReport) -> dict[str, Any]:
    """All of it."""
    return {
        "a": report.a,
        "b": report.b,
        "same": report.same,
        "names": report.names,
        "bytes": report.nbytes,
        "known_bytes": report.known_bytes,
        "differences": [
            {
                "name": one.name,
                "kind": one.kind,
                "a": one.a or None,
                "b": one.b or None,
                "elements": one.elements,
                "changed": one.changed,
                "fraction": one.fraction,
                "max_abs": jsonable(one.max_abs),
            }
            for one in report.differences
        ],
    }
