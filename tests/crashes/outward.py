"""Weights that leave us: exports and conversions, as scenarios."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest import mock

from generations import ABSENT, OPTIONS, allowed, weights, weights_at
from machine import Scenario

import shardkeep
import shardkeep.converting.workplace as workplace
import shardkeep.foreign.writing as writing

CONFIG = b'{"model_type": "toy"}'


class Export(Scenario):
    """Weights saved as safetensors, over others that lie beside a configuration."""

    def __init__(self, name, generation, first=ABSENT):
        self.name, self.generation, self.first = name, generation, first

    def save(self, base, generation, **options):
        writer = shardkeep.HuggingFaceWriter(max_shard_size=8000)
        place = base / "out" / "model"
        shardkeep.save(weights(generation), place, storage_writer=writer, **OPTIONS, **options)

    def prepare(self, base):
        if self.first:
            self.save(base, self.first)
            (base / "out/model/config.json").write_bytes(CONFIG)

    def run(self, base, mark):
        mark(f"begin {self.generation}")
        self.save(base, self.generation, overwrite=True)
        mark(f"return {self.generation}")

    def look(self, base):
        place = base / "out/model"
        if self.first:
            assert (place / "config.json").read_bytes() == CONFIG
        return weights_at(place)

    def judge(self, found, marks):
        may_be = allowed(marks, self.first)
        assert found in may_be, f"found {found}, promised {may_be}"

    def assert_clean(self, base, found, error):
        for name in set(os.listdir(base / "out")) - {"model"} if (base / "out").is_dir() else ():
            # What was replaced, as long as a crash might bring it back.
            assert error is not None
            assert weights_at(base / "out" / name) == self.first != ABSENT

    def recover(self, base, found, number):
        if number % 3 == 0:
            self.save(base, 99, overwrite=True)
            assert self.look(base) == 99


@cache
def source(generation):
    """A checkpoint to convert from, which stays where it is."""
    folder = Path(tempfile.mkdtemp(prefix="shardkeep-source-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shardkeep.save(weights(generation), folder / "source", **OPTIONS)
    return folder / "source"


class Conversion(Scenario):
    """A checkpoint is converted to a place where another may be."""

    def __init__(self, name, to, first=ABSENT, resumed=False, exchange=True, **options):
        self.name, self.to, self.first, self.options = name, to, first, options
        self.resumed, self.exchange = resumed, exchange

    def place(self, base):
        return base / ("out.pt" if self.to == "torch-save" else "out")

    def convert(self, base, generation, **options):
        with self.settings():
            shardkeep.convert(
                source(generation), self.place(base), to=self.to, memory_budget=16 << 20,
                **self.options, **options,
            )  # fmt: skip

    def settings(self):
        """Progress is noted every few pages."""
        small = contextlib.ExitStack()
        small.enter_context(mock.patch.object(writing, "WINDOW", 4096))
        small.enter_context(mock.patch.object(writing, "NOTE_EVERY", 8192))
        if not self.exchange:
            never = OSError(errno.EINVAL, "directories cannot change places")
            small.enter_context(mock.patch.object(workplace, "exchange_names", side_effect=never))
        return small

    def prepare(self, base):
        source(2), source(3)
        if self.first:
            self.convert(base, self.first)
        if self.resumed:
            # An attempt that was interrupted in the middle.
            def stop(done, total):
                if done > total // 2:
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                generation = 2 if self.resumed == "same" else 3
                self.convert(base, generation, overwrite=True, progress=stop)
            assert list(base.glob("*.converting"))

    def run(self, base, mark):
        mark("begin 2")
        self.convert(base, 2, overwrite=self.first != ABSENT)
        mark("return 2")

    def look(self, base):
        found = weights_at(self.place(base))
        if not self.exchange and found == ABSENT:
            # For a moment there is neither; what comes next puts it back.
            found = weights_at(self.folder(base) / "replaced")
        return found

    def folder(self, base):
        return base / (self.place(base).name + ".converting")

    def judge(self, found, marks):
        may_be = allowed(marks, self.first)
        assert found in may_be, f"found {found}, promised {may_be}"

    def assert_clean(self, base, found, error):
        kept = self.resumed or getattr(error, "transient", False)  # to be gone on with
        if set(os.listdir(base)) <= {self.place(base).name} or kept:
            return
        # What was replaced, as long as a crash might bring it back.
        there = [weights_at(self.folder(base) / name) for name in ("made", "replaced")]
        assert error is not None
        assert self.first in there

    def recover(self, base, found, number):
        generation = 2 + number % 2  # the same again, or another one
        self.convert(base, generation, overwrite=True)
        assert self.look(base) == generation
        assert os.listdir(base) == [self.place(base).name]
