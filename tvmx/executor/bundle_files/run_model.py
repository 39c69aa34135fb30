"""Run the bundled model from Python; needs numpy and nothing else. Usage: python run_model.py [input.npy ...]"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from tvmx.runtime import open_executor  # noqa: E402

LIBRARY = HERE.parent / "lib" / "@LIBRARY@"


def main() -> None:
    with open_executor(LIBRARY) as executor:
        inputs = {}
        for index, info in enumerate(executor.inputs):
            if index + 1 < len(sys.argv):
                inputs[info.name] = np.load(sys.argv[index + 1], allow_pickle=False)
            else:
                shape = [d if isinstance(d, int) else 1 for d in info.shape]
                inputs[info.name] = np.zeros(shape, executor.dtype_of(info.name))
        for name, array in executor(inputs).items():
            print(f"{name}: {array.dtype}{list(array.shape)} {np.ravel(array)[:4].tolist()}")


if __name__ == "__main__":
    main()
