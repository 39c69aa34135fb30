"""INT8 as a whole: accuracy (int8_accuracy.py), speed (int8_speed.py) and size (int8_size.py) of the same models.

python -m benchmarks.int8 [models ...]
"""

from __future__ import annotations

import subprocess
import sys


def main(models: list[str]) -> int:
    """Run all parts, each in a process of its own; the exit status is that of the first that fails."""
    speed = ["--models", ",".join(models)] if models else []
    for arguments in (
        ["benchmarks.int8_accuracy", *models],
        ["benchmarks.int8_speed", *speed],
        ["benchmarks.int8_size", *models],
    ):
        status = subprocess.run([sys.executable, "-m", *arguments]).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
