"""What the benchmarks show: tables, JSON, and which machine it was."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = (
    "shardkeep",
    "torch",
    "torch_checkpointing",
    "safetensors",
    "orbax-checkpoint",
    "tensorstore",
    "jax",
    "numpy",
    "xxhash",
)


def at_least_one(text: str) -> int:
    """Of an option: at least one."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def above_zero(text: str) -> float:
    """Of an option: more than nothing, and not endless."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no size")
    return float(text)


def add_options(parser: argparse.ArgumentParser, repeat: int) -> None:
    """The options that all benchmarks have."""
    parser.add_argument("--dir", help="where to write; the system's temporary directory")
    parser.add_argument(
        "--repeat", type=at_least_one, default=repeat, help="rounds, after one not counted"
    )
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    parser.add_argument("--picture", type=Path, help="draw the result here, as SVG")


def machine(directory: Path) -> dict[str, Any]:
    """What the figures depend on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "file_system": file_system(directory),
        "python": platform.python_version(),
        "versions": versions,
        "load_average_before": os.getloadavg()[0],
    }


def file_system(directory: Path) -> str:
    """The type of the file system that a directory lies on."""
    where, kind = Path("/"), "?"
    path = directory.resolve()
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        if path.is_relative_to(point) and len(point) >= len(str(where)):
            where, kind = Path(point), found
    return kind


class Report:
    """Collects tables and figures, and writes them where they are wanted."""

    def __init__(self, name: str, directory: Path, **settings: Any) -> None:
        self.console = Console(width=None if Console().is_terminal else 160)
        self.facts = machine(directory)
        self.content: dict[str, Any] = {
            "benchmark": name,
            "settings": settings,
            "machine": self.facts,
        }
        facts = self.facts
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        self.say(
            f"{facts['cores']} cores, {facts['memory'] / 1e9:.0f} GB, {facts['file_system']}, "
            f"Linux {facts['kernel']}, Python {facts['python']}; {versions}"
        )

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def table(self, title: str, headings: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for number, heading in enumerate(headings):
            table.add_column(heading, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)
        shown = {"title": title, "headings": headings, "rows": rows}
        self.content.setdefault("tables", []).append(shown)

    def finish(self, numbers: dict[str, Any], path: Path | None) -> None:
        """Keep everything that was measured."""
        self.facts["load_average_after"] = os.getloadavg()[0]
        self.content["numbers"] = numbers
        before, after = self.facts["load_average_before"], self.facts["load_average_after"]
        self.say(f"load average {before:.1f} before, {after:.1f} after")
        if path is not None:
            path.write_text(json.dumps(self.content, indent=1))


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def ratio(value: float | None, to: float | None) -> str:
    return f"{value / to:.2f}x" if value is not None and to else ""
