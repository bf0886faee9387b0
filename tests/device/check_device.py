"""Tensors on an accelerator: `python tests/device/check_device.py`, by hand where there is one.

Every dtype, strided and conjugate sources, strided and cast targets, meta targets, and the host
memory a save and a load take.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import shardkeep
from shardkeep.dtypes import TABLE

DEVICE = torch.device("cuda")


def bits(tensor):
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def every_dtype(path):
    state = {}
    for row in TABLE.values():
        if not row.torch or not hasattr(torch, row.torch):
            continue
        raw = np.random.default_rng(0).integers(0, 256, 60 * row.itemsize, np.uint8)
        if row.name == "bool":
            raw &= 1
        state[row.name] = torch.from_numpy(raw).view(getattr(torch, row.torch)).reshape(3, 20)
    shardkeep.save({k: v.to(DEVICE) for k, v in state.items()}, path)
    target = {k: torch.empty_like(v, device=DEVICE) for k, v in state.items()}
    pointers = {k: v.data_ptr() for k, v in target.items()}
    shardkeep.load(target, path)
    for key, value in state.items():
        assert bits(target[key]) == bits(value), key
        assert target[key].data_ptr() == pointers[key], key
    print(f"every dtype: {len(state)} types bit-equal, in place")


def layouts(path):
    base = torch.randn(64, 48, device=DEVICE)
    lazy = torch.complex(base, base.flip(0)).conj()
    state = {"t": base.t(), "s": base[::2, 1::3], "c": lazy, "i": lazy.imag, "e": base[:0]}
    shardkeep.save(state, path, overwrite=True)
    target = {k: torch.zeros(v.shape, dtype=v.dtype, device=DEVICE) for k, v in state.items()}
    target["t"] = torch.zeros(64, 48, device=DEVICE).t()
    shardkeep.load(target, path)
    for key, value in state.items():
        assert torch.equal(target[key], value), key
    wide = {"t": torch.zeros(48, 64, dtype=torch.float64, device=DEVICE)}
    shardkeep.load(wide, path, keys=["t"], cast="widen")
    assert torch.equal(wide["t"], base.t().double())
    meta = {"t": torch.empty(48, 64, device="meta")}
    out = shardkeep.load(meta, path, keys=["t"], device=DEVICE).state_dict["t"]
    assert out.device.type == "cuda"
    assert torch.equal(out, base.t())
    tied = torch.zeros(48, 64, device=DEVICE)
    shardkeep.save({"a": base.t(), "b": base.t() + 1}, path, overwrite=True)
    try:
        shardkeep.load({"a": tied, "b": tied}, path)
    except shardkeep.MismatchError:
        pass
    else:
        raise AssertionError("a tied target with different sources was filled")
    print("layouts, casts, meta targets, ties: ok")


def small_ones(path):
    """Thousands that travel together, of many types, beside strided, lazy and large ones."""
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64)
    random = torch.Generator().manual_seed(0)
    state = {}
    for number in range(3000):
        shape = tuple(torch.randint(1, 60, (number % 4,), generator=random).tolist())
        value = torch.randn(shape, generator=random).to(kinds[number % len(kinds)]).to(DEVICE)
        state[f"v{number}"] = value.t() if value.dim() == 2 and number % 5 == 0 else value
    state |= {f"large{n}": torch.randn(1 << 20, device=DEVICE) for n in range(5)}
    state["lazy"] = torch.randn(30, dtype=torch.complex64, device=DEVICE).conj()
    state["host"] = torch.randn(50)
    result = shardkeep.save(state, path, overwrite=True)
    target = {k: torch.zeros(v.shape, dtype=v.dtype, device=v.device) for k, v in state.items()}
    shardkeep.load(target, path)
    for key, value in state.items():
        assert bits(target[key]) == bits(value.resolve_conj()), key
    wide = {
        k: torch.zeros_like(v, dtype=torch.float64)
        for k, v in state.items()
        if v.is_floating_point()
    }
    shardkeep.load(wide, path, cast=True, strict=False)
    for key, value in wide.items():
        assert torch.equal(value, state[key].double()), key
    print(f"{len(state)} small ones: ok, {result.stats['write_s']:.3f} s to write")


def memory(path, gib):
    state = {f"w{i}": torch.randn(gib << 27, device=DEVICE).bfloat16() for i in range(4)}
    expected = {k: v.clone() for k, v in state.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    result = shardkeep.save(state, path, overwrite=True, memory_budget=128 << 20)
    saved = time.perf_counter()
    for value in state.values():
        value.zero_()
    shardkeep.load(state, path, memory_budget=128 << 20)
    loaded = time.perf_counter()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    size = result.nbytes / 2**30
    print(
        f"{size:.1f} GiB: save {size / (saved - start):.2f} GiB/s, "
        f"load {size / (loaded - saved):.2f} GiB/s, host memory grew {grown / 1024:.0f} MiB"
    )
    assert grown < 300 * 1024, "a full host copy was made"


def generators(path):
    """Go on where they were, also on a device of another number; and are seeded anew by reseed."""
    own = torch.Generator(DEVICE).manual_seed(3)
    state = {"rng": shardkeep.torch.rng_state({"own": own})}

    def draw():
        return torch.rand(4, device=DEVICE).tolist(), torch.rand(4, device=DEVICE, generator=own)

    draw()
    shardkeep.save(state, path, overwrite=True)
    expected = draw()
    torch.cuda.manual_seed_all(9)
    own.manual_seed(9)
    shardkeep.load(state, path)
    got = draw()
    assert got[0] == expected[0]
    assert torch.equal(got[1], expected[1])
    stored = state["rng"].value.state_dict()
    absent = {"current": 7, "states": stored["cuda"]["states"] * 8}
    try:
        shardkeep.torch.RngState({"own": own}).load_state_dict({**stored, "cuda": absent})
    except shardkeep.MismatchError:
        pass
    else:
        raise AssertionError("states of seven absent devices were left out without a word")
    refused = {"current": torch.cuda.current_device(), "states": [bytes(3)]}
    before = torch.get_rng_state(), own.get_state()
    torch.rand(1)
    now = torch.get_rng_state()
    try:
        shardkeep.torch.RngState({"own": own}).load_state_dict({**stored, "cuda": refused})
    except shardkeep.MismatchError:
        assert torch.equal(torch.get_rng_state(), now), "others were set before it was refused"
        assert torch.equal(own.get_state(), before[1])
    else:
        raise AssertionError("a state of three bytes was taken")
    skipping = shardkeep.torch.RngState({"own": own}, absent_devices="skip")
    skipping.load_state_dict({**stored, "cuda": absent})
    moved = draw()[0]
    shardkeep.load(state, path)
    draw()
    assert moved == draw()[0], "the current device's stream goes to the current device"
    streams = []
    for rank in (0, 1, 0):
        skipping.load_state_dict(shardkeep.rng.reseed([stored], rank, 2))
        streams.append(draw()[0])
    assert streams[0] == streams[2] != streams[1]
    print("generators: ok")


def main():
    root = tempfile.mkdtemp(dir="/dev/shm")
    try:
        every_dtype(f"{root}/a")
        layouts(f"{root}/a")
        small_ones(f"{root}/a")
        generators(f"{root}/a")
        memory(f"{root}/b", 1)
    finally:
        shutil.rmtree(root)
    print("ok")


if __name__ == "__main__":
    main()
