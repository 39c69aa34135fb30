"""Worker that compiles scheduled kernels: `{"func", "target", "addons", "output"}` → `{"error"}`."""

from __future__ import annotations

from typing import Any

from tvmx.schedule.build import build_module
from tvmx.tune.worker import serve


def build(request: dict[str, Any]) -> dict[str, str]:
    """Compile one PrimFunc (TVM's JSON) into a shared library. The error is empty when that worked."""
    import tvm

    try:
        mod = tvm.IRModule({"main": tvm.ir.load_json(request["func"])})
        library = build_module(mod, tvm.target.Target(request["target"]))
        library.export_library(request["output"], addons=request["addons"])
    except Exception as error:  # the boundary of the process: whatever a schedule breaks is an answer
        text = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {text[-1]}"[:500]}
    return {"error": ""}


def main() -> None:
    import tvm  # noqa: F401  # before the greeting: the first request is not slower than the others

    serve(build)


if __name__ == "__main__":
    main()
