"""Benchmarks; each module is a program: `python -m benchmarks.plan --help`."""
