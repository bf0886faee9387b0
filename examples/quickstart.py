# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = ["shardkeep"]
# ///
"""The example of the README. It writes into the present directory."""

import numpy as np

import shardkeep

weights = np.random.default_rng(0).random((1000, 64), np.float32)
state = {"model": {"emb": weights}, "step": 100, "betas": (0.9, 0.999)}

saved = shardkeep.save(state, "run/step-100")  # returns once it is committed and durable
print(saved.digest)

target = {"model": {"emb": np.empty((1000, 64), np.float32)}, "step": 0, "betas": None}
shardkeep.load(target, "run/step-100")  # fills arrays in place; every byte is checked
assert (target["model"]["emb"] == weights).all()
assert target["step"] == 100

with shardkeep.open("run/step-100") as ckpt:  # needs no model, reads no data yet
    print(list(ckpt))
    print(ckpt["model.emb"][10:12])  # reads the blocks of these rows only
    assert ckpt.verify().ok
