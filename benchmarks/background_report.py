"""What was found of saves in the background, as tables and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.picture import Group, draw
from benchmarks.report import Report, number, ratio
from benchmarks.rounds import Results

SHOWN = ("set_up_s", "plan_s", "stall_s", "write_s", "commit_s", "digest_s", "pwrite_s", "sync_s")
"""Of what our saves tell of themselves."""


@dataclass
class Found:
    """Everything that was measured."""

    nbytes: int
    results: Results = field(default_factory=Results)
    copies: list[float] = field(default_factory=list)
    """Seconds of one plain copy of the state."""
    resident: dict[str, list[int]] = field(default_factory=dict)
    """Bytes after each of many saves."""
    beside: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    captured: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def copy(self) -> float:
        return median(self.copies)

    def middle(self, side: str, operation: str, key: str) -> float | None:
        """The median of something that a save tells, or of a field of its measure."""
        found = self.results.measures.get(side, {}).get(operation, [])
        values = [m.stats[key] if key in m.stats else getattr(m, key, None) for m in found]
        told = [value for value in values if value is not None]
        return median(told) if told else None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.results.plain(),
            "copy_s": self.copies,
            "resident": self.resident,
            "beside": self.beside,
            "captured": self.captured,
        }


def show(report: Report, found: Found) -> None:
    sides = list(found.results.measures)
    rows = [["one plain copy", number(found.copy, 3), "1.00x"]]
    for side in sides:
        cells = []
        for operation in ("first", "prewarmed", "steady"):
            stall = found.middle(side, operation, "stall")
            cells += [number(stall, 3), ratio(stall, found.copy)]
        cells.insert(2, number(found.middle(side, "first", "seconds")))
        for key, digits in (("staged", 3), ("seconds", 2), ("cpu", 2)):
            cells.append(number(found.middle(side, "steady", key), digits))
        peak = found.middle(side, "steady", "peak")
        cells.append("" if peak is None else f"{peak / 1e6:.0f}")
        cells.append(number(found.middle(side, "prewarm", "seconds")))
        rows.append([side, *cells])
    headings = ["", "first: stall", "to copy", "total", "prewarmed: stall", "to copy"]
    headings += ["steady: stall", "to copy", "staged", "total", "CPU s", "peak MB", "prewarm"]
    rate = found.nbytes / found.copy / 1e9
    report.table(f"Seconds, medians (one plain copy: {rate:.2f} GB/s)", headings, rows)
    _show_stats(report, found, sides)
    _show_growth(report, found)
    _show_beside(report, found)
    for side, why in found.results.failed.items():
        report.say(f"{side} failed: {why}")


def _show_stats(report: Report, found: Found, sides: list[str]) -> None:
    rows = []
    for side in sides:
        told = [found.middle(side, "steady", key) for key in SHOWN]
        if any(value is not None for value in told):
            rows.append([side, *(number(value, 3) for value in told)])
    if rows:
        report.table("What our steady saves tell of themselves, seconds", ["", *SHOWN], rows)


def _show_growth(report: Report, found: Found) -> None:
    rows = []
    for side, seen in found.resident.items():
        first, last = seen[0] / 1e6, seen[-1] / 1e6
        growth = (seen[-1] - seen[0]) / 1e6
        rows.append([side, str(len(seen)), f"{first:.0f}", f"{last:.0f}", f"{growth:+.0f}"])
    if rows:
        headings = ["", "saves", "after the first, MB", "after the last, MB", "growth, MB"]
        report.table("Resident memory", headings, rows)


def _show_beside(report: Report, found: Found) -> None:
    rows = []
    for side, runs in found.beside.items():
        alone = median(pace["per_s"] for run in runs for pace in run["alone"])
        during = {key: median(run["beside"][key] for run in runs) for key in runs[0]["beside"]}
        quiet = median(pace["p99_ms"] for run in runs for pace in run["alone"])
        losses = [run["loss"] for run in runs if run["loss"] is not None]
        loss = f"{100 * median(losses):.2f} %" if losses else "too short"
        cells = [f"{alone:.0f}", f"{during['per_s']:.0f}", loss]
        cells += [f"{quiet:.2f}", f"{during['p99_ms']:.2f}", f"{during['most_ms']:.2f}"]
        rows.append([side, *cells, number(during["seconds"])])
    if rows:
        headings = ["", "alone, 1/s", "beside, 1/s", "loss", "p99 alone, ms", "p99 beside, ms"]
        headings += ["longest beside, ms", "s"]
        report.table("Matrix products beside a save, in groups of 16", headings, rows)
    rows = [
        [
            what,
            *(str(seen[key]) for key in ("staging", "writing")),
            str(len(seen["failed"])),
            *seen["failed"][:1],
        ]
        for what, seen in found.captured.items()
    ]
    if rows:
        headings = ["", "while staging", "while writing", "failed", "with"]
        report.table("CUDA graphs captured during a save", headings, rows)


def picture(path: Path, found: Found) -> None:
    groups = []
    for title, operation, key in (
        ("first save: stall", "first", "stall"),
        ("later saves: stall", "steady", "stall"),
        ("later saves: total", "steady", "seconds"),
    ):
        seconds = [(side, found.middle(side, operation, key)) for side in found.results.measures]
        bars = [(side, value) for side, value in seconds if value is not None]
        groups.append(Group(title, bars, found.copy))
    name = f"{found.nbytes / 1e9:.1f} GB saved in the background"
    draw(path, name, "seconds, less is better; raw: one plain copy", groups)
