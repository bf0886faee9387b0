# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep"]
# ///
"""The worked example of `docs/FORMAT.md`: a tiny checkpoint, byte by byte.

Run `python examples/format_example.py`. Everything is found from the bytes on disk alone, in the
order a reader would go. Save id, time and version are fixed, so the output never changes while
the format does not; `tests/test_format_doc.py` compares it with the document.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np

import shardkeep

SAVE_ID = "0123456789abcdef0123456789abcdef"
WRITER = "shardkeep.formats.native.writer"
DIGEST_SIZE = 16


def make(folder: Path) -> Path:
    """Save the example; the same bytes on every run."""
    state = {
        "model": {
            "weight": np.array([[0, 1, 2], [3, 4, 5]], np.float32),
            "count": np.array(7, np.int64),
        },
        "lr": 0.5,
    }
    with (
        patch(f"{WRITER}.new_save_id", lambda: SAVE_ID),
        patch("shardkeep.__version__", "0.1.0"),
        patch(f"{WRITER}.time.gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))),
    ):
        shardkeep.save(state, folder / "example", no_dist=True)
    return folder / "example"


def describe(checkpoint: Path) -> Iterator[str]:
    """The lines of the worked example."""
    text = (checkpoint / "checkpoint.json").read_bytes()
    record = json.loads(text)
    yield f"checkpoint.json, {len(text)} bytes"
    yield ""
    yield from text.decode().splitlines()
    for title, row in (("index", record["index"]), ("data file", record["files"][0])):
        yield ""
        yield f"{title}, {row['size']} bytes"
        yield ""
        yield from describe_file((checkpoint / row["name"]).read_bytes(), row)


def describe_file(data: bytes, row: dict[str, int]) -> Iterator[str]:
    """A safetensors file: the header as text, the entries as bytes."""
    length = int.from_bytes(data[:8], "little")
    yield from dump(data, 0, 8, f"u64: the header has {length} bytes")
    header = data[8 : 8 + length].rstrip(b" ")
    yield from text_lines(header, 8)
    padding = 8 + len(header)
    yield f"{padding:08x}  {8 + length - padding} spaces"
    table = json.loads(header)
    del table["__metadata__"]
    for key, entry in table.items():
        start, stop = (8 + length + at for at in entry["data_offsets"])
        if key == "__shardkeep__.digests":
            yield from describe_digests(data, start, stop)
        elif key == "kinds":
            yield from dump(data, start, start, f"kinds U8 {entry['shape']}, as text:")
            yield from text_lines(data[start:stop], start)
        else:
            yield from dump(data, start, stop, f"{key} {entry['dtype']} {entry['shape']}")
    assert stop == len(data) == row["size"]


def describe_digests(data: bytes, start: int, stop: int) -> Iterator[str]:
    """One block and so one page: two digests, and zeros to the end."""
    level2, zeros = start + DIGEST_SIZE, start + 2 * DIGEST_SIZE
    yield from dump(data, start, level2, f"level 1: digest of bytes 0 to {start}")
    yield from dump(data, level2, zeros, "level 2: digest of level 1")
    assert not any(data[zeros:stop])
    yield f"{zeros:08x}  {stop - zeros} zeros"


def text_lines(data: bytes, start: int) -> Iterator[str]:
    """JSON as it stands, broken after each object for the eye."""
    lines = data.decode().replace("},", "},\n").split("\n")
    yield f"{start:08x}  {lines[0]}"
    yield from (f"{'':8}  {line}" for line in lines[1:])


def dump(data: bytes, start: int, stop: int, note: str) -> Iterator[str]:
    """Bytes in hex, sixteen a line, the note beside the first."""
    if start == stop:
        yield f"{start:08x}  {'':47}  {note}"
    for at in range(start, stop, 16):
        line = data[at : min(at + 16, stop)].hex(" ")
        yield f"{at:08x}  {line:47}  {note}".rstrip()
        note = ""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(describe(make(Path(folder)))))


if __name__ == "__main__":
    main()
