"""What is fuzzed: good inputs, ways to change them, and what is done with one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from fuzzing.by_bytes import Mutator, changed_bytes
from shardkeep.errors import CheckpointError

__all__ = ["Target", "by_label", "every_one", "labelled", "unlabelled"]

_END = b"\0"
_LARGEST = 12 << 20
"""Bytes of an input: room for a name of ten million letters, and not for a hundred of them, which
are more than the memory that one input may take."""


@dataclass
class Target:
    """One parser."""

    name: str
    """As `--parser` calls it."""
    seeds: list[bytes]
    """Good inputs."""
    mutators: Sequence[Mutator]
    """One of them is taken for each execution."""
    run: Callable[[bytes], None]
    """Parses one input, and does with it what a load would."""
    weight: int = 10
    """Its share of the executions, among all parsers': larger for quick ones, and one of two
    hundred at least."""

    def changed(self, rng: Random, corpus: Sequence[bytes]) -> bytes:
        """Another input, made from one of these."""
        # What is kept besides good inputs is mostly refused: it does not crowd them out.
        base = rng.choice(self.seeds if rng.random() < 0.5 else corpus)
        return rng.choice(self.mutators)(rng, base, corpus)[:_LARGEST]


def labelled(label: str, content: bytes) -> bytes:
    """An input that is one file among several: its label says which."""
    return label.encode() + _END + content


def unlabelled(data: bytes) -> tuple[str, bytes]:
    """Label and content."""
    label, _, content = data.partition(_END)
    return label.decode(), content


def by_label(mutators: Mapping[str, Sequence[Mutator]]) -> Mutator:
    """A change of the content, chosen by the label, which stays."""

    def change(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        label, content = unlabelled(data)
        among = [unlabelled(rng.choice(others))[1]] if others else []
        mutator = rng.choice(mutators.get(label, (changed_bytes,)))
        return labelled(label, mutator(rng, content, among))

    return change


def every_one(*calls: Callable[[], object]) -> None:
    """Make all the calls; those that refuse refuse on their own."""
    refused: CheckpointError | None = None
    for call in calls:
        try:
            call()
        except CheckpointError as error:
            refused = error
    if refused is not None:
        raise refused


def as_json(value: object) -> bytes:
    """For seeds."""
    return json.dumps(value).encode()
