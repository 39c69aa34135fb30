"""Compile a small model and run it: the whole path in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import tvmx
from tvmx.runtime import GraphExecutor


def run_model(proto: Any, inputs: dict[str, np.ndarray], folder: Path, **options: Any) -> dict[str, np.ndarray]:
    """Outputs by name of a ModelProto compiled for one thread; `options` go to `tvmx.compile`."""
    options = {"threads": 1, **options}
    path = tvmx.compile(proto, folder / "m.so", **options).path
    with GraphExecutor(path, threads=1) as executor:
        return dict(executor({i.name: inputs[i.name] for i in executor.inputs}))
