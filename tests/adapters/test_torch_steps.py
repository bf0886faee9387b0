# SPDX-License-Identifier: Apache-2.0
"""Which tensors only an optimizer's step changes, against the plain rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from shardkeep.adapters import torch_steps  # noqa: E402 (torch may be absent)

STRETCH = st.tuples(st.integers(0, 20), st.integers(0, 8))
"""First element and how many."""


@given(st.lists(st.lists(STRETCH, min_size=1, max_size=5), max_size=3), st.lists(STRETCH))
def test_who_owns_what_as_the_plain_rule_says(optimizers, asked):
    # Memory of another example, where nobody owned it: optimizers are not looked for again there.
    torch_steps._nobodys.clear()
    memory = torch.zeros(40)

    def tensor(stretch):
        return memory[stretch[0] : stretch[0] + stretch[1]]

    made = [
        torch.optim.SGD([torch.nn.Parameter(tensor(part), requires_grad=False) for part in of])
        for of in (list(dict.fromkeys(of)) for of in optimizers)
    ]
    found = torch_steps.stepped([tensor(part) for part in asked])
    is_owned, changed = found.which, found.changed

    def owners(part):
        first, last = part[0], part[0] + part[1]
        if first == last:
            return []
        return [
            number
            for number, of in enumerate(optimizers)
            if any(low <= first and last <= low + count for low, count in of)
        ]

    assert list(is_owned) == [bool(owners(part)) for part in asked]
    assert not any(changed())
    for number, optimizer in enumerate(made):
        before = list(changed())
        optimizer.step()
        now = list(changed())
        assert now == [
            was or number in owners(part) for was, part in zip(before, asked, strict=True)
        ]


def test_memory_that_is_another_counts_where_an_optimizer_has_it():
    owned, nobodys = torch.zeros(4), torch.zeros(4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(owned, requires_grad=False)])
    optimizer.param_groups[0]["params"][0].data = owned
    found = torch_steps.stepped([owned, nobodys])
    assert list(found.which) == [True, False]
    version = owned._version
    owned.data, nobodys.data = torch.ones(4), torch.ones(4)
    assert owned._version == version, "else it would be seen by that"
    assert list(found.changed()) == [True, False]


def test_strided_tensors_are_owned_with_all_that_lies_between():
    memory = torch.zeros(6, 6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(memory[:4, :4], requires_grad=False)])
    values = [memory[1, :4], memory[:2, 1:3], memory[5], memory[3:5, 0], torch.zeros(0)]
    assert list(torch_steps.stepped(values).which) == [True, True, False, False, False]
    assert optimizer.param_groups
