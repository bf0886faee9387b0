"""README, docs/ and examples/ run, and their links lead somewhere."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"python")
SKIPS = re.compile(r"python skip: \S.{9,}")
"""A block that cannot run says why, in the line that opens it."""
TEXT = {"", "text", "json", "console"}


def blocks():
    """Every fenced block: a name for it, what its first line says, its text."""
    for path in DOCUMENTS:
        text = path.read_text()
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{path.relative_to(ROOT)}:{line}", found[1].strip(), found[2]


PYTHON = [pytest.param(code, id=name) for name, said, code in blocks() if RUNS.fullmatch(said)]


def run(arguments, folder):
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("code", PYTHON)
def test_python_in_documents_runs(code, tmp_path):
    (tmp_path / "block.py").write_text(code)
    run(["block.py"], tmp_path)


def test_there_is_something_to_run():
    assert len(PYTHON) >= 2


PARTS = [
    pytest.param(said.rpartition(" ")[2], code, id=name)
    for name, said, code in blocks()
    if said.startswith("python skip: a part of ")
]


@pytest.mark.parametrize(("path", "code"), PARTS)
def test_parts_of_examples_are_parts_of_them(path, code):
    assert code in (ROOT / path).read_text()


def unexplained(said):
    return said not in TEXT and not RUNS.fullmatch(said) and not SKIPS.fullmatch(said)


def test_no_block_opts_out_without_a_reason():
    assert [name for name, said, _ in blocks() if unexplained(said)] == []


@pytest.mark.parametrize("said", ["py", "Python", "python skip", "python skip: why"])
def test_the_guard_finds_blocks_that_opt_out_without_a_reason(said):
    assert unexplained(said)
    assert not unexplained("python skip: needs four GPUs")


def is_program(code):
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def test_no_program_hides_in_a_block_of_text():
    hidden = [name for name, said, code in blocks() if said in TEXT and is_program(code)]
    assert hidden == []


def test_the_quickstart_is_the_example_of_the_readme(tmp_path):
    body = (ROOT / "examples/quickstart.py").read_text().split('"""\n\n', 1)[1]
    shown = [code for name, said, code in blocks() if name.startswith("README") and "py" in said]
    assert shown[0] == body
    run([ROOT / "examples/quickstart.py"], tmp_path)


def anchors(path):
    """Headings as they are linked to."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.replace("`", "")).strip().lower().replace(" ", "-")
        for title in titles
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(path):
    text = FENCE.sub("", path.read_text())
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_documents_exist(path):
    """`docs/x.md`, `src/shardkeep/x.py`, `tests/x` in code spans, unless they are patterns."""
    folders = "docs|src|tests|examples|scripts|benchmarks"
    spans = re.findall(rf"`((?:{folders})/[^`\s]*)`", path.read_text())
    missing = [s for s in spans if not set(s) & set("<>*{") and not (ROOT / s).exists()]
    assert missing == []


def test_the_architecture_names_every_module_and_the_layers():
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    mapped = set(re.findall(r"`(?:\w+/)*(\w+)`", text[text.index("## Code map") :]))
    source = ROOT / "src/shardkeep"
    modules = {path.stem for path in source.glob("*.py")} | {
        path.stem
        for part in ("engine", "stores", "formats")
        for path in source.rglob(f"{part}/**/*.py")
    }
    assert modules - {"__init__"} - mapped == set()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    drawn = re.search(r"```text\n(cli .*?)\n```", text, re.DOTALL)[1].splitlines()
    assert [line for line in drawn if not line.startswith("---")] == layers
