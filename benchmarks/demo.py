"""`make demo`: a trained image model from ONNX to a tuned .so, in a few minutes on two cores.

PP-LCNet, which tells how a photographed page is turned (0, 90, 180 or 270 degrees), comes from a registry package;
a page of text is turned and classified by the compiled model without the compiler loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

import tvmx
from benchmarks.latency import relative_error
from benchmarks.measure import interleave, machine, ratio
from benchmarks.models import zoo_model
from benchmarks.peers import onnxruntime_run, onnxruntime_session
from tvmx.config import CompileConfig
from tvmx.runtime import GraphExecutor

_WITHOUT_COMPILER = """
import sys, json
import numpy as np
from tvmx.runtime import GraphExecutor
with GraphExecutor(sys.argv[1]) as executor:
    outputs = [executor({"x": page})[executor.outputs[0].name] for page in np.load(sys.argv[2])]
print(json.dumps({"classes": [int(o.argmax()) for o in outputs],
                  "compiler loaded": any(m in sys.modules for m in ("tvm", "onnx"))}))
"""


def main() -> int:
    """Run the demo; exit status 1 when an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/demo"))
    parser.add_argument("--tune-s", type=float, default=75, help="seconds of tuning")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    threads = arguments.threads or machine()["cores"]

    model = zoo_model("orient")
    assert model.real_inputs is not None
    print(f"1. model      {model.path.name}: {model.path.stat().st_size / 1e6:.1f} MB, trained, opset 15")
    imported = tvmx.import_onnx(str(model.path), shapes=model.shapes)

    untuned = tvmx.compile(
        imported, folder / "untuned.so", threads=threads, config=CompileConfig(use_shipped_logs=False)
    )
    print(f"2. untuned    {untuned.path} in {sum(untuned.report['seconds'].values()):.1f} s")

    print(f"3. tuning     {arguments.tune_s:.0f} s; a longer session goes on from {folder / 'log'}")
    tvmx.tune(imported, log=folder / "log", time_budget_s=arguments.tune_s, threads=threads)
    tuned = tvmx.compile(imported, folder / "tuned.so", log=folder / "log", threads=threads)
    print(f"4. tuned      {tuned.path}, kernels by rule: {json.dumps(tuned.report.get('kernels', {}))}")

    pages = model.real_inputs()
    np.save(folder / "pages.npy", np.stack([inputs["x"] for _, inputs in pages]))
    answer = json.loads(
        subprocess.run(
            [sys.executable, "-c", _WITHOUT_COMPILER, str(tuned.path), str(folder / "pages.npy")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    )
    print(f"5. deployed   pages turned by 0, 90, 180, 270 degrees are classes {answer['classes']}")
    print(f"              compiler loaded: {answer['compiler loaded']}")

    inputs = pages[0][1]
    session = onnxruntime_session(str(model.path), threads)
    names = [o.name for o in session.get_outputs()]
    expected = dict(zip(names, session.run(None, inputs), strict=True))
    with (
        GraphExecutor(untuned.path, threads=threads) as before,
        GraphExecutor(tuned.path, threads=threads) as after,
    ):
        error = max(relative_error(ex(inputs), expected) for ex in (before, after))
        for executor in (before, after):
            executor.set_input("x", inputs["x"])
        contenders = {
            "untuned": before.run,
            "tuned": after.run,
            "onnxruntime": onnxruntime_run(str(model.path), inputs, threads),
        }
        samples = interleave(contenders, repeat=60)
        arena, bound = after.arena_bytes, after.arena_lower_bound

    print(f"\n{threads} thread(s), {machine()['cpu']}, interleaved, median of 60")
    print(f"{'':14}{'ms':>8}{'against ONNX Runtime':>24}")
    for name, times in samples.items():
        print(f"{name:14}{statistics.median(times) * 1e3:8.2f}{ratio(samples, name, 'onnxruntime'):23.2f}x")
    print(f"max error     {error:.1e} of the output's range")
    print(f"arena         {arena:,} bytes; lower bound {bound:,} ({arena / max(bound, 1):.3f}x)")
    good = error <= 1e-4 and answer["classes"] == [0, 1, 2, 3] and not answer["compiler loaded"]
    print("all answers right" if good else "AN ANSWER IS WRONG")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
