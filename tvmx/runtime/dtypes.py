"""Names of element types in a manifest → numpy dtypes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tvmx.errors import ArtifactError

_EXTENDED_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1}


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of `name`. bfloat16 and float8 come from ml_dtypes, or are unsigned integers without it."""
    if name in _EXTENDED_BYTES:
        try:
            import ml_dtypes
        except ImportError:
            return np.dtype(f"uint{8 * _EXTENDED_BYTES[name]}")
        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return extended
    try:
        return np.dtype(name)
    except TypeError:
        raise ArtifactError(f"element type {name!r} is unknown to this runtime; update tvmx") from None
