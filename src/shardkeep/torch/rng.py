# SPDX-License-Identifier: Apache-2.0
"""`shardkeep.rng` with torch's generators: the CPU's, those of CUDA devices, and given ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch

from shardkeep import rng
from shardkeep.errors import MismatchError
from shardkeep.per_rank import PerRank
from shardkeep.rng import Seed, Source, reseed

__all__ = ["RngState", "reseed", "rng_state"]

AbsentDevices: TypeAlias = Literal["error", "skip"]

_PER_RANK = 1 << 10
"""Seeds that each rank has for generators of one kind."""


def rng_state(
    generators: Mapping[str, object] | None = None,
    *,
    include_global: bool = True,
    absent_devices: AbsentDevices = "error",
) -> PerRank[RngState]:
    """The random generators of this process, to be put into a state.

    Those of `shardkeep.rng`, torch's on the CPU and, once CUDA is in use, on every device that this
    process sees; a `torch.Generator` may be among the given ones. The state of the current device
    goes to the device that is current at the load. Devices that are not there then are an error, or
    left out with `absent_devices="skip"`.
    """
    state = RngState(generators, include_global=include_global, absent_devices=absent_devices)
    return PerRank(state, resize=reseed)


class RngState(rng.RngState):
    """The random generators of this process; gives and takes their states as plain values."""

    def __init__(
        self,
        generators: Mapping[str, object] | None = None,
        *,
        include_global: bool = True,
        absent_devices: AbsentDevices = "error",
    ) -> None:
        """See `rng_state`."""
        if absent_devices not in ("error", "skip"):
            raise ValueError(f"absent_devices is {absent_devices!r}; use 'error' or 'skip'")
        self._absent: AbsentDevices = absent_devices
        super().__init__(generators, include_global=include_global)

    def _global_sources(self) -> dict[str, Source]:
        more: dict[str, Source] = {
            "torch": _TorchSource(torch.default_generator),
            "cuda": _CudaSource(self._absent),
        }
        return super()._global_sources() | more

    def _source(self, generator: Any, name: str) -> Source:
        if isinstance(generator, torch.Generator):
            return _TorchSource(generator)
        return super()._source(generator, name)


class _TorchSource(Source):
    """A `torch.Generator`."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def get(self) -> dict[str, Any]:
        state = self._generator.get_state()
        return {"device": self._generator.device.type, "state": _bytes(state)}

    def check(self, state: Mapping[str, Any], name: str) -> None:
        here = self._generator.device.type
        if state["device"] != here:
            raise MismatchError(
                f"{name}: the state of a generator on {state['device']} was saved, here it is on "
                f"{here}"
            )
        try:
            torch.Generator(self._generator.device).set_state(_tensor(state["state"]))
        except Exception as error:
            raise MismatchError(f"{name}: torch refuses the state: {error}") from error

    def set(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(_tensor(state["state"]))

    def reseed(self, seed: Seed, label: str, number: int) -> None:
        self._generator.manual_seed(_seed_of(seed, self._generator.device.type, number))


class _CudaSource(Source):
    """The generators of all devices that this process sees, once it has begun to use them."""

    may_be_new = True  # a run that began without a device may go on with one

    def __init__(self, absent: AbsentDevices) -> None:
        self._absent = absent

    def get(self) -> dict[str, Any] | None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        devices = range(torch.cuda.device_count())
        return {
            "current": torch.cuda.current_device(),
            "states": [_bytes(torch.cuda.get_rng_state(device)) for device in devices],
        }

    def check(self, state: Mapping[str, Any], name: str) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        absent = [d for d in range(len(state["states"])) if d not in self._places(state, count)]
        if absent and self._absent == "error":
            listed = ", ".join(f"cuda:{device}" for device in absent)
            raise MismatchError(
                f"{name}: the state of {listed} was saved (current was cuda:{state['current']}), "
                f"and has no device here: this process sees {count}. Pass "
                "absent_devices='skip' to leave it out."
            )
        for device, here in self._places(state, count).items():
            try:
                aside = torch.Generator(torch.device("cuda", here))
                aside.set_state(_tensor(state["states"][device]))
            except Exception as error:
                raise MismatchError(
                    f"{name}: torch refuses the state of cuda:{device} for cuda:{here}: {error}"
                ) from error

    def _places(self, state: Mapping[str, Any], count: int) -> dict[int, int]:
        """Where the state of each device goes: the current one's to the current one."""
        if count == 0:
            return {}
        was, now = state["current"], torch.cuda.current_device()
        if was == now:
            return {device: device for device in range(min(count, len(state["states"])))}
        return {was: now}

    def set(self, state: Mapping[str, Any]) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device, here in self._places(state, count).items():
            torch.cuda.set_rng_state(_tensor(state["states"][device]), here)

    def reseed(self, seed: Seed, label: str, number: int) -> None:
        # Asks for no device: kept until CUDA is used, if it is not yet.
        torch.cuda.manual_seed_all(_seed_of(seed, "cuda", number))


def _seed_of(seed: Seed, device: str, number: int) -> int:
    """Seeds beside each other, so that no two are equal: on the CPU they have 32 bits only."""
    if number >= _PER_RANK:
        raise ValueError(f"at most {_PER_RANK - 1} generators can be given")
    nbytes = 4 if device == "cpu" else 7
    first = seed.number(f"torch {device}", nbytes)
    return (first + seed.rank * _PER_RANK + number) % (1 << 8 * nbytes)


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
