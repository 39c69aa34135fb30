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
    "plan_precision": "tvmx.api",
    "PrecisionPlan": "tvmx.precision",
    "PrecisionRules": "tvmx.precision",
    "explain": "tvmx.api",
    "CompileResult": "tvmx.api",
    "calibrate": "tvmx.api_quantize",
    "QuantizedModel": "tvmx.quantize",
    "Scheme": "tvmx.quantize",
    "Model": "tvmx.frontend",
    "Dim": "tvmx.config",
    "Target": "tvmx.target",
    "TvmxError": "tvmx.errors",
}

_PACKAGES = ("tune", "quantize")  # packages of their own, callable: see tvmx/tune/__init__.py

__all__ = ["__version__", *_PACKAGES, *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"tvmx.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tvmx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
