"""`python -m fuzzing.with_atheris PARSER [options of libFuzzer]`: guided by branches.

For who has the package atheris (`pip install atheris`, Python 3.11): slower than `python -m
fuzzing`, but every input is kept that takes a branch another way. Stops at the first thing that
must not be, and leaves the input as `crash-...` in the working directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.targets import Target
from fuzzing.watching import Watch
from fuzzing.workers import scratch_folder

__all__ = ["main"]

_MOST = 1 << 17
"""Bytes of an input."""


class Wrong(Exception):
    """What libFuzzer is told of."""


def main(arguments: list[str]) -> int:
    """Fuzz one parser until somebody stops it, or it is done as many times as was asked for."""
    with scratch_folder() as scratch:
        child = os.fork()  # libFuzzer ends its process without a word
        if child == 0:
            _fuzz(scratch, arguments)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _fuzz(scratch: Path, arguments: list[str]) -> None:
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

    with atheris.instrument_imports(include=["shardkeep"]):
        from fuzzing.__main__ import all_targets

        (target,) = all_targets(scratch, arguments[:1])
    corpus = scratch / "corpus"
    corpus.mkdir()
    for at, data in enumerate(target.seeds):
        (corpus / str(at)).write_bytes(data)
    options = [sys.argv[0], str(corpus), f"-max_len={_MOST}", *arguments[1:]]
    atheris.Setup(options, _running(target), custom_mutator=_mutating(target, atheris))
    atheris.Fuzz()


def _running(target: Target) -> Any:
    watch = Watch(limits=False)

    def run(data: bytes) -> None:
        finding = watch.run(target.name, target.run, bytes(data))
        if finding is not None:
            raise Wrong(f"{finding.kind}\n{finding.text}")

    return run


def _mutating(target: Target, atheris: Any) -> Any:
    """Our changes mostly, and libFuzzer's own."""

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        try:
            made = rng.choice(target.mutators)(rng, bytes(data), target.seeds)
        except UnicodeDecodeError:  # the label of a file is no label any more
            made = rng.choice(target.seeds)
        return made if len(made) <= most else bytes(data)

    return mutate


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else __doc__)
