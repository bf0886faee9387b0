"""Options and hypothesis profiles for the whole suite."""

import contextlib
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from shardkeep import collector
from shardkeep.stores.local import LocalStore

# No deadline: the first example of a property pays for imports and cold files.
settings.register_profile(
    "check", deadline=None, derandomize=False, max_examples=100, print_blob=True
)
settings.register_profile("all", settings.get_profile("check"), max_examples=1000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="also run tests marked slow, and 1000 examples per property",
    )


def pytest_configure(config: pytest.Config) -> None:
    # A profile asked for by name wins over ours.
    if config.getoption("--hypothesis-profile", default=None) is None:
        settings.load_profile("all" if config.getoption("--all") else "check")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: runs with --all")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture
def end_all_pauses():
    """Ends those of Python's collector, also of tests before, in which a save failed."""

    def end():
        for one in list(collector._pauses):
            one.end()

    return end


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except OSError:
        pytest.skip("no mount")
    if done.returncode:
        pytest.skip("not allowed to mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def disk():
    """A directory whose file system does direct I/O."""
    for base in (Path("/var/tmp"), Path("/tmp"), Path.home()):
        with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=base) as folder:
            probe = LocalStore(folder).create("probe")
            works = probe.begin_direct()
            probe.close()
            if works:
                yield Path(folder)
                return
    pytest.skip("no disk with direct I/O here")
