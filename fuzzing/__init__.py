"""Fuzzing of everything that parses a file: `python -m fuzzing --help`.

Whatever a file holds, a parser gives an answer or a `CheckpointError`, within a second and 256 MiB.
Inputs are made from good files: by bytes, and by what the bytes mean, with checksums put right, so
that they get past the checks to the code behind them.
"""
