"""Folders of steps for tests, real or only their records."""

from __future__ import annotations

import os
import time

import numpy as np

import shardkeep
from shardkeep.formats.native.names import (
    RECORD,
    data_file,
    index_file,
    lease_name,
    new_save_id,
)
from shardkeep.formats.native.record import FileRow, Record, encode_record
from shardkeep.manager.steps import Step, user_metadata_of


def state(step, size=48):
    """Every leaf tells its step."""
    return {"w": np.full(size, step, np.float32), "step": step}


def blank(size=48):
    return {"w": np.zeros(size, np.float32), "step": None}


def is_state(found, step):
    return found["step"] == step and (found["w"] == step).all()


def fill(root, steps, metrics=None):
    """Real checkpoints."""
    for step in steps:
        shardkeep.save(
            state(step),
            os.path.join(root, f"step-{step}"),
            user_metadata=user_metadata_of(step, 1000.0 + step, (metrics or {}).get(step), None),
        )


def fill_records(root, steps):
    """Only what a listing looks at; many, and soon."""
    for step in steps:
        where = os.path.join(root, f"step-{step}")
        os.mkdir(where)
        os.mkdir(os.path.join(where, "data"))
        save_id = new_save_id()
        user = user_metadata_of(step, 1000.0 + step, {"loss": (step * 7919) % 1000}, None)
        row = FileRow(index_file(save_id), 8192, 4096, "0" * 32)
        with open(os.path.join(where, RECORD), "xb") as file:
            file.write(encode_record(Record(save_id, row, (), user=user)))


def described(number, saved_at=0.0, **metrics):
    """A step that exists nowhere."""
    return Step(number, f"/run/step-{number}", f"{number:032x}", 10, 2, saved_at, metrics)


def damage(root, step):
    """One bit of a tensor."""
    data = next((root / f"step-{step}" / "data").glob("*r0*.safetensors"))
    found = bytearray(data.read_bytes())
    found[4096] ^= 1
    data.write_bytes(found)


def damage_record(root, step):
    """One bit of the record."""
    path = root / f"step-{step}" / RECORD
    found = bytearray(path.read_bytes())
    found[20] ^= 1
    path.write_bytes(found)


def killed_save(where, age_s=0.0):
    """What a save leaves that was killed before its commit."""
    save_id = new_save_id()
    (where / "data").mkdir(parents=True, exist_ok=True)
    for name in (lease_name(save_id), data_file(save_id, 0, 0)):
        (where / name).write_bytes(b"x" * 100)
        os.utime(where / name, (time.time() - age_s,) * 2)
    for folder in (where / "data", where):
        os.utime(folder, (time.time() - age_s,) * 2)
