"""Identity of a kernel's computation: a hash that two processes and two models agree on."""

from __future__ import annotations

import base64
import zlib
from typing import Any

_NAMES = ("global_symbol", "op_pattern", "target", "tirx.is_scheduled")
"""Attributes that say how a kernel is called or was found, not what it computes."""

MAX_WORKLOAD_BYTES = 64 << 20  # a stored workload that inflates past this is damaged or hostile


def canonical(func: Any) -> Any:
    """The PrimFunc with name and bookkeeping attributes taken off, as it is tuned and stored."""
    for name in _NAMES:
        if func.attrs is not None and name in func.attrs:
            func = func.without_attr(name)
    return func.with_attr("global_symbol", "main")


def workload_hash(func: Any) -> str:
    """16 hex digits: TVM's structural hash of `canonical(func)`.

    Independent of the names of the function, its variables and buffers; equal between processes.
    """
    import tvm_ffi

    return f"{tvm_ffi.structural_hash(canonical(func)) & (2**64 - 1):016x}"


def encode(func: Any) -> str:
    """`canonical(func)` as text: TVM's JSON, deflated, base64."""
    import tvm

    text = tvm.ir.save_json(canonical(func))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def decode(text: str) -> Any:
    """The PrimFunc that `encode` wrote. Raises ValueError when the text is not one."""
    import tvm

    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(text, validate=True), MAX_WORKLOAD_BYTES)
        if not inflate.eof:
            raise ValueError(f"cut off, or over {MAX_WORKLOAD_BYTES} bytes")
        func = tvm.ir.load_json(raw.decode())
    except (zlib.error, RuntimeError, TypeError) as error:
        raise ValueError(f"not a stored workload: {error}") from error
    if not isinstance(func, tvm.tirx.PrimFunc):
        raise ValueError(f"a stored workload is a {type(func).__name__}, not a PrimFunc")
    return func
