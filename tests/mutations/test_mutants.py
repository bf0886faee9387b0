"""Mutants are changes, each of one place, and of nothing that is left alone."""

import ast

from mutants import mutants

SOURCE = '''
"""Text."""
LIMIT = 1 << 20

def f(x: int | None, y: int = 3) -> list[int] | None:
    """More text."""
    assert x != 7, "left alone"
    if x is None and y > 2:
        raise ValueError(f"{y + 1} is too many")
    for a, b in zip([x], [y], strict=True):
        log.warning("%d", a + b)
        y += a
    return [min(x, y)] if not y else None
'''


def made(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(SOURCE)
    return path, mutants(path)


def test_every_change_is_one_and_compiles(tmp_path):
    _, found = made(tmp_path)
    original = ast.unparse(ast.parse(SOURCE)).splitlines()
    for mutant in found:
        mutant.code()
        assert mutant.before != mutant.after
        assert mutant.line <= len(SOURCE.splitlines())
        assert any(mutant.before.split()[0] in line for line in original)


def test_what_is_changed_and_what_is_left_alone(tmp_path):
    _, found = made(tmp_path)
    changes = {(mutant.before, mutant.after) for mutant in found}
    assert ("x is None", "x is not None") in changes
    assert ("y > 2", "y >= 2") in changes
    assert ("y += a", "y -= a") in changes
    assert ("y += a", "pass") in changes
    assert ("not y", "y") in changes
    assert ("3", "4") in changes
    assert ("min(x, y)", "max(x, y)") in changes
    assert ("raise ValueError(f'{y + 1} is too many')", "pass") in changes
    texts = " ".join(before for before, _ in changes)
    for alone in ("1 << 20", "x != 7", "a + b", "strict"):
        assert alone not in texts


def test_a_change_is_there_when_it_runs(tmp_path):
    _, found = made(tmp_path)
    (swapped,) = [mutant for mutant in found if mutant.before == "min(x, y)"]
    space = {"log": type("Log", (), {"warning": staticmethod(print)})}
    exec(swapped.code(), space)
    assert space["f"](-3, 3) == [0]


def test_functions_that_are_there_become_the_changed_ones(tmp_path):
    path, found = made(tmp_path)
    space = {"log": type("Log", (), {"warning": staticmethod(print)})}
    exec(compile(SOURCE, str(path), "exec", dont_inherit=True), space)
    (swapped,) = [mutant for mutant in found if mutant.before == "min(x, y)"]
    ((was, now),) = swapped.functions().items()
    assert was == space["f"].__code__
    assert space["f"](-3, 3) == [-3]
    space["f"].__code__ = now
    assert space["f"](-3, 3) == [0]


def test_a_default_shows_only_when_its_module_is_imported(tmp_path):
    _, found = made(tmp_path)
    (default,) = [mutant for mutant in found if (mutant.before, mutant.after) == ("3", "4")]
    assert default.functions() is None
