# SPDX-License-Identifier: Apache-2.0
"""Pins: what is being read, or is held for good, is not removed.

A reader's pin is a file that is touched every 30 seconds. Whoever dies stops touching it, and after
a while it no longer counts; never before it missed a few touches, of which it names the interval,
whatever limit the remover was given. A pin for good, as `shardkeep pin` makes it, has no such end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import msgspec

from shardkeep.formats.native.commit import PROBE, keep_fresh, server_time, unlink_all
from shardkeep.manager.catalog import MANAGED
from shardkeep.stores.local import LocalStore, WriteFile, storage_errors

__all__ = ["Pin", "PinInfo", "Pins"]

log = logging.getLogger("shardkeep")

TOUCH_S = 30.0
STALE_S = 900.0
"""A reader that has not touched its pin for so long is dead."""
TOUCHES = 3
"""So many times its own interval a pin lives at least."""
FOLDER = f"{MANAGED}/pins"
MAX_PIN = 64 << 10

_NAME = re.compile(r"(.+)\.([0-9a-f]{16})\.(lease|keep)", re.ASCII | re.DOTALL)


@dataclass(frozen=True, slots=True)
class PinInfo:
    """One pin, as others see it."""

    name: str
    """Its file, in the folder of pins."""
    forever: bool
    """Whether it lasts until somebody removes it."""


class _Text(msgspec.Struct):
    host: str = ""
    process: int = 0
    why: str = ""
    touch_s: float = TOUCH_S


class Pin:
    """A reader's claim on a step, kept fresh until it is released; usable in `with`."""

    def __init__(self, store: LocalStore, name: str, file: WriteFile, touch_s: float) -> None:
        """Made by `Pins.take`."""
        self._store = store
        self._name = name
        self._file = file
        self._stop = threading.Event()
        self._keeper = threading.Thread(
            target=keep_fresh, args=(file, self._stop, touch_s), name="shardkeep-pin", daemon=True
        )
        # A reader that forgot its pin does not hold the step for ever.
        weakref.finalize(self, self._stop.set).atexit = False
        self._keeper.start()

    def release(self) -> None:
        """It is not read any more. May be called again."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._keeper.join(5)
        with contextlib.suppress(OSError):
            self._file.close()
        unlink_all(self._store, [f"{FOLDER}/{self._name}"])

    def __enter__(self) -> Self:
        """Usable in `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release it."""
        self.release()


class Pins:
    """The pins of one folder of steps."""

    def __init__(
        self, store: LocalStore, *, stale_s: float = STALE_S, touch_s: float | None = None
    ) -> None:
        """Nothing is touched yet."""
        self._store = store
        self._stale_s = stale_s
        self._touch_s = min(TOUCH_S, stale_s / 10) if touch_s is None else touch_s
        self._warned = False

    def take(self, name: str, why: str = "") -> Pin | None:
        """Pin a step while it is read; None where this process may not write into the folder.

        Whoever pins must look afterwards whether the step is still there.
        """
        try:
            pin, file = self._create(name, "lease", why)
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s cannot be pinned while it is read, and may be removed meanwhile: %s",
                    self._store.root / name,
                    error,
                )
            return None
        try:
            return Pin(self._store, pin, file, self._touch_s)
        except BaseException:
            file.close()
            unlink_all(self._store, [f"{FOLDER}/{pin}"])
            raise

    def hold(self, name: str, why: str = "") -> None:
        """Pin a step for good."""
        with storage_errors(f"pinning {self._store.root / name}"):
            _, file = self._create(name, "keep", why)
            file.close()
            self._store.sync_directory(FOLDER)

    def drop(self, name: str) -> int:
        """Remove the pins for good of a step; how many there were."""
        names = [pin.name for pin in self._all().get(name, []) if pin.forever]
        left = unlink_all(self._store, [f"{FOLDER}/{pin}" for pin in names])
        return len(names) - len(left)

    def _create(self, name: str, kind: str, why: str) -> tuple[str, WriteFile]:
        self._store.make_directory(FOLDER)
        pin = f"{name}.{secrets.token_hex(8)}.{kind}"
        file = self._store.create(f"{FOLDER}/{pin}")
        try:
            note = why[:1000].encode(errors="backslashreplace").decode()  # from a command line
            text = _Text(socket.gethostname(), os.getpid(), note, self._touch_s)
            file.write_at(memoryview(msgspec.json.encode(text)), 0)
            file.sync()
        except BaseException:
            file.close()
            unlink_all(self._store, [f"{FOLDER}/{pin}"])
            raise
        return pin, file

    def held(self) -> Mapping[str, list[PinInfo]]:
        """Names of pinned steps, and by what; the pins of dead readers do not count."""
        found = self._all()
        leases = [pin for pins in found.values() for pin in pins if not pin.forever]
        if not leases:
            return found
        dead = set(self._dead([pin.name for pin in leases]))
        return {
            step: alive
            for step, pins in found.items()
            if (alive := [pin for pin in pins if pin.name not in dead])
        }

    def remove_dead(self) -> int:
        """Remove the pins of readers that died; how many."""
        names = [n for n in self._store.list(FOLDER) if n.endswith(".lease") or PROBE.fullmatch(n)]
        if not names:
            return 0
        dead = self._dead(names)
        return len(dead) - len(unlink_all(self._store, [f"{FOLDER}/{name}" for name in dead]))

    def describe(self, pins: list[PinInfo]) -> str:
        """Who holds it, for people."""
        texts = []
        for pin in pins[:3]:
            text = self._read(pin.name)
            who = f"process {text.process} on {text.host}" if text.host else "somebody"
            texts.append(f"{who}{f' ({text.why})' if text.why else ''}")
        return ", ".join(texts) + (f" and {len(pins) - 3} more" if len(pins) > 3 else "")

    def _all(self) -> dict[str, list[PinInfo]]:
        pinned: dict[str, list[PinInfo]] = {}
        with storage_errors(f"listing {self._store.root / FOLDER}"):
            names = self._store.list(FOLDER)
        for name in names:
            found = _NAME.fullmatch(name)
            if found is not None:
                pinned.setdefault(found[1], []).append(PinInfo(name, found[3] == "keep"))
        return pinned

    def _read(self, name: str) -> _Text:
        """What a pin says; nothing where it cannot be read."""
        with contextlib.suppress(Exception):
            data = self._store.read(f"{FOLDER}/{name}", MAX_PIN)
            return msgspec.json.decode(data, type=_Text)
        return _Text()

    def _dead(self, names: list[str]) -> list[str]:
        """Those whose readers died, and leftovers of the same age; only the old are read."""
        old = {name: age for name, age in self._ages(names).items() if age >= self._stale_s}
        return [
            name
            for name, age in old.items()
            if PROBE.fullmatch(name) or age >= TOUCHES * self._read(name).touch_s
        ]

    def _ages(self, names: list[str]) -> dict[str, float]:
        """By the clock that stamps the files; one that cannot be told is young."""
        try:
            now = server_time(LocalStore(self._store.root / FOLDER))
        except OSError:
            return dict.fromkeys(names, 0.0)
        ages = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                try:
                    ages[name] = now - self._store.stat(f"{FOLDER}/{name}").modified
                except PermissionError:
                    ages[name] = 0.0
        return ages
