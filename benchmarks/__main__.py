"""`python -m benchmarks NAME`, of those below; each has `--help`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module

BENCHMARKS = {
    "io": "throughput",
    "small": "small_tensors",
    "reshard": "resharding",
    "torch-driver": "torch_driver",
    "device": "accelerator",
    "async": "background_saves",
    "incremental": "incremental",
    "huggingface": "huggingface",
    "plan": "plan",
    "convert": "converting",
}
"""Command to module."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHMARKS:
        print(f"usage: python -m benchmarks {'|'.join(BENCHMARKS)} [options]", file=sys.stderr)
        raise SystemExit(2)
    # Ended by `timeout` or the like, it still removes what it wrote.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    import_module(f"benchmarks.{BENCHMARKS[sys.argv[1]]}").main(sys.argv[2:])


if __name__ == "__main__":
    main()
