"""The public surface: what is exported, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import shardkeep


def test_every_public_name_resolves():
    for name in shardkeep.__all__:
        assert getattr(shardkeep, name) is not None
    assert dir(shardkeep) == sorted([*shardkeep.__all__, *shardkeep._PACKAGES])
    assert not hasattr(shardkeep, "nothing")


def test_type_checkers_see_the_same_names():
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(shardkeep))
    block = next(n for n in tree.body if isinstance(n, ast.If) and isinstance(n.test, ast.Name))
    typed = {alias.name for node in block.body for alias in node.names}
    assert typed | {"__version__"} == {*shardkeep.__all__, *shardkeep._PACKAGES}


def test_types_reach_users(tmp_path):
    script = tmp_path / "uses.py"
    script.write_text(
        "import shardkeep\n"
        "reveal_type(shardkeep.save({}, 'x').nbytes)\n"
        "shardkeep.save({}, 'x', overwrit=True)\n"
        "shardkeep.PerRank(1, resize=shardkeep.resizing.first)\n"
        "shardkeep.rng.rng_state(), shardkeep.torch.guard\n"
        "shardkeep.svae\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path), str(script)]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path).stdout
    assert 'Revealed type is "int"' in told or "builtins.int" in told, told
    assert 'Unexpected keyword argument "overwrit"' in told
    assert 'Module has no attribute "svae"' in told
    assert "Found 2 errors" in told, told


def test_calls_can_be_repeated_after_lazy_import():
    code = """
import shardkeep
shardkeep.save
assert callable(shardkeep.save)
import shardkeep.saving
assert callable(shardkeep.save) and callable(shardkeep.open)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_brings_in_nothing():
    code = """
import sys
before = set(sys.modules)
import shardkeep
new = {name.partition(".")[0] for name in set(sys.modules) - before}
heavy = new & {"numpy", "torch", "jax", "rich", "click", "msgspec", "xxhash", "asyncio"}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_saving_and_loading_numpy_imports_no_framework(tmp_path):
    code = f"""
import sys
import numpy as np, shardkeep
shardkeep.save({{"a": np.ones(3)}}, {str(tmp_path)!r})
shardkeep.load({{"a": np.zeros(3)}}, {str(tmp_path)!r})
shardkeep.open({str(tmp_path)!r}).verify()
heavy = set(sys.modules) & {{"torch", "jax", "rich", "click", "asyncio", "multiprocessing"}}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
