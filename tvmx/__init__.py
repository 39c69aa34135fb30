"""tvmx: ONNX model in, one tuned `.so` out.

Attributes load on first use, so that `import tvmx` costs no TVM import (about 2 s).
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "import_onnx": "tvmx.api",
    "compile": "tvmx.api",
    "verify": "tvmx.api",
    "CompileResult": "tvmx.api",
    "Model": "tvmx.frontend",
    "Dim": "tvmx.config",
    "Target": "tvmx.target",
    "TvmxError": "tvmx.errors",
}

__all__ = ["__version__", "tune", *_LAZY]


def __getattr__(name: str) -> Any:
    if name == "tune":  # a package of its own, callable: see tvmx/tune/__init__.py
        return importlib.import_module("tvmx.tune")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tvmx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
