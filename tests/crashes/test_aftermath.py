"""A fault, and then a crash: in short, at length with `--all`."""

import pytest
from aftermath import sweep
from machine import BRIEF, SHORT, scratch_folder
from scenarios import scenarios

NAMES = list(scenarios())


@pytest.mark.parametrize("name", NAMES)
def test_short(name):
    count = 1 if name.startswith(("tiers", "retention")) else 2
    with scratch_folder() as folder:
        total = sweep(scenarios()[name], folder, SHORT, count=count, seed=sum(map(ord, name)))
    assert total["faults"] == count


@pytest.mark.parametrize("name", ["export over another", "convert over hf in two steps", "delete"])
def test_what_was_found_wrong_once(name):
    """Who had failed removed what it had replaced; who was asked twice took it for gone."""
    with scratch_folder() as folder:
        assert sweep(scenarios()[name], folder, BRIEF, last=3)["states"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_long(name):
    with scratch_folder() as folder:
        assert sweep(scenarios()[name], folder, BRIEF)["faults"] > 2
