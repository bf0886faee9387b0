"""Benchmarks: `python -m benchmarks io|small|reshard|device|plan --help`."""
