"""The native storage passes the suite that every storage must pass."""

import subprocess
import sys

import pytest

from shardkeep import NativeReader, NativeWriter
from shardkeep.formats.native.layout import Limits
from shardkeep.testing import StorageTests


class TestNative(StorageTests):
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch):
        # How long a rank looks for the coordinator's lease before it says that it is not there.
        monkeypatch.setattr("shardkeep.formats.native.claiming.LEASE_SEEN_S", 0.2)

    def make_writer(self, path, **options):
        return NativeWriter(path, **options)

    def make_reader(self, path):
        return NativeReader(path)


class TestNativeSmallBlocks(TestNative):
    """Many blocks and many files, so that everything is cut somewhere."""

    def make_writer(self, path, **options):
        return NativeWriter(path, block=4096, limits=Limits(payload=3000), **options)


def test_the_package_does_not_import_pytest():
    code = "import sys, shardkeep.testing; shardkeep.save; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_suite_must_be_given():
    with pytest.raises(TypeError, match="make_reader"):
        StorageTests()
