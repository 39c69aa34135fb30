"""Worker that compiles scheduled kernels: `{"func", "target", "addons", "output"}` → `{"error", "facts"}`.

With `"gpu"` (fields of `tvmx.target.Gpu`) it makes a CUDA candidate, and `facts` are the compiler's figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvmx.schedule.build import build_module
from tvmx.tune.worker import serve


def build(request: dict[str, Any]) -> dict[str, Any]:
    """Compile one PrimFunc (TVM's JSON) into a shared library. The error is empty when that worked."""
    import tvm

    try:
        if request.get("gpu"):
            return {"error": "", "facts": _cuda(request)}
        mod = tvm.IRModule({"main": tvm.ir.load_json(request["func"])})
        library = build_module(mod, tvm.target.Target(request["target"]))
        library.export_library(request["output"], addons=request["addons"])
    except Exception as error:  # the boundary of the process: whatever a schedule breaks is an answer
        text = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {text[-1]}"[:500]}
    return {"error": "", "facts": {}}


def _cuda(request: dict[str, Any]) -> dict[str, Any]:
    import tvm

    from tvmx.cuda.candidate import build_candidate
    from tvmx.cuda.lower import lower_kernel
    from tvmx.target import Gpu

    func = tvm.ir.load_json(request["func"])
    program = lower_kernel(func, tvm.target.Target(request["target"]))
    return build_candidate(program, Gpu(**request["gpu"]), Path(request["output"]))


def main() -> None:
    import tvm  # noqa: F401  # before the greeting: the first request is not slower than the others

    serve(build)


if __name__ == "__main__":
    main()
