"""Other people's quantised models: does each file that ONNX Runtime's tools make of the zoo compile to integer kernels?

And does it compute what the file means?

Each model is quantised in every variant of `benchmarks.quantized_files`, compiled, run through its `.so` and compared
with the exact semantics (`benchmarks.exact_semantics`) and with ONNX Runtime. A row gives, in dB of signal to noise:

    ours     our output against the exact one
    floor    the exact output with all scales moved by 3e-7: what rounding alone does to this network
    ORT      ONNX Runtime's output, all optimisations on, against the exact one

and, operator by operator with the exact codes as input (`--steps`), the largest distance of a code from the exact one
and the share of codes that are off, for us and for ONNX Runtime. One step is what a float32 scale can do to a value
between two codes; more is an error.

A row is OFF when ours is more than 6 dB below the floor or a code more than one step away.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from benchmarks.exact_semantics import cut_at_codes, exact_model, nudged, run_plain
from benchmarks.measure import machine
from benchmarks.models import ZooModel, zoo
from benchmarks.peers import onnxruntime_session
from benchmarks.quantized_files import VARIANTS, NotMade, Variant, quantized_file

EXACT_DB = 90.0  # float32 sums of a few thousand terms are apart that much
SLACK_DB = 6.0
QUANTISED = ("Quant", "QLinear", "QGemm", "QAttention", "Integer")

Outputs = dict[str, np.ndarray]


def worst_db(found: Outputs, expected: Outputs) -> float:
    """Signal to noise of the worst output, dB; infinite where all are equal. Integers count as they are."""
    worst = np.inf
    for name, want in expected.items():
        a, b = np.asarray(want, np.float64), np.asarray(found[name], np.float64)
        if a.shape != b.shape or not np.isfinite(b).all():
            return -np.inf
        if not np.array_equal(a, b):
            worst = min(worst, 10 * float(np.log10(max(float((a**2).sum()), 1e-30) / float(((a - b) ** 2).sum()))))
    return float(worst)


def operators(model: onnx.ModelProto) -> dict[str, int]:
    """How many nodes of each quantised operator there are."""
    kinds = Counter(n.op_type for n in model.graph.node)
    return {k: n for k, n in sorted(kinds.items()) if any(word in k for word in QUANTISED)}


def steps_off(found: Outputs, expected: Outputs) -> dict[str, Any]:
    """Over all tensors of 8-bit codes: the largest distance, the share that is off, and where the largest is."""
    worst, place, off, total = 0, "", 0, 0
    for name, want in expected.items():
        if want.dtype not in (np.int8, np.uint8):
            continue
        gap = np.abs(found[name].astype(np.int64) - want)
        off, total = off + int((gap > 0).sum()), total + gap.size
        if gap.size and gap.max() > worst:
            worst, place = int(gap.max()), name
    return {"largest": worst, "share": off / max(total, 1), "where": place}


def measure_steps(exact: onnx.ModelProto, feed: Outputs, folder: Path) -> dict[str, Any]:
    """Each operator alone, ours and ONNX Runtime's."""
    import tvmx
    from tvmx.config import CompileConfig
    from tvmx.runtime import GraphExecutor

    cut, feeds, expected = cut_at_codes(exact, feed)
    session = onnxruntime_session(cut.SerializeToString(), 1)
    theirs = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    shapes = {k: v.shape for k, v in feeds.items()}
    options = CompileConfig(use_shipped_logs=False)
    result = tvmx.compile(cut, folder / "cut.so", threads=1, shapes=shapes, config=options)
    with GraphExecutor(result.path, threads=1) as executor:
        ours = executor(feeds)
    return {"ours": steps_off(ours, expected), "ort": steps_off(theirs, expected)}


def measure(model: ZooModel, variant: Variant, folder: Path, steps: bool) -> dict[str, Any]:
    """One row."""
    import tvmx
    from tvmx.config import CompileConfig
    from tvmx.runtime import GraphExecutor

    row: dict[str, Any] = {"model": model.name, "variant": variant.name}
    try:
        path = quantized_file(model, variant)
    except NotMade as reason:
        return {**row, "not_made": str(reason)}
    proto = onnx.load(path)
    row["operators"] = operators(proto)
    inputs = model.random_inputs(np.random.default_rng(7))
    feed = {**inputs, **model.constants}
    begin = time.perf_counter()
    result = tvmx.compile(
        str(path),
        folder / "model.so",
        threads=1,
        shapes=model.shapes,
        constants=model.constants or None,
        config=CompileConfig(use_shipped_logs=False),
    )
    row["compile_s"] = round(time.perf_counter() - begin, 1)
    with GraphExecutor(result.path, threads=1) as executor:
        ours = {k: v.copy() for k, v in executor(inputs).items()}
    exact = exact_model(proto)
    expected = run_plain(exact, feed)
    session = onnxruntime_session(str(path), 1)
    theirs = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
    row["ours_db"] = worst_db(ours, expected)
    row["floor_db"] = min(worst_db(run_plain(nudged(exact, seed), feed), expected) for seed in range(2))
    row["ort_db"] = worst_db(theirs, expected)
    row["ours_ort_db"] = worst_db(ours, theirs)
    row["gaps"] = result.report.get("quantisation", {}).get("gaps", 0)
    row["vm_reason"] = result.report["vm_reason"]
    row["qdq"] = result.report.get("quantisation", {})
    kernels = [n.kernel for n in result.graph.nodes] if result.graph is not None else []
    row["integer_kernels"] = sum("_int8" in k for k in kernels)
    row["weight_only_kernels"] = sum("_w4" in k or "_w8" in k for k in kernels)
    row["kernels"] = len(kernels)
    # Ranges that are computed at run time are those of floats: a dynamic model has float tensors everywhere.
    row["ok"] = (variant.form == "dynamic" or not row["gaps"]) and row["ours_db"] >= min(
        EXACT_DB, row["floor_db"] - SLACK_DB
    )
    if steps and variant.form != "dynamic" and any(n.op_type == "QuantizeLinear" for n in exact.graph.node):
        row["steps"] = measure_steps(exact, feed, folder)
        row["ok"] = row["ok"] and row["steps"]["ours"]["largest"] <= 1
    return row


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    head = f"{row['model']:13}{row['variant']:23}"
    if "not_made" in row:
        return f"{head} not made: {row['not_made']}"
    if "failed" in row:
        return f"{head} FAILED: {row['failed']}"
    db = "".join(f"{row[k]:8.1f}" for k in ("ours_db", "floor_db", "ort_db", "ours_ort_db"))
    kernels = f"{row['integer_kernels']:4}/{row['kernels']:<4}{row['weight_only_kernels']:3}"
    remaining = row["qdq"].get("remaining", 0)
    verdict = "ok" if row["ok"] else f"OFF {row.get('steps', {}).get('ours', '')}"
    off = row.get("steps")
    codes = "".join(f"{off[k]['largest']:4} {off[k]['share']:7.1e}" for k in ("ours", "ort")) if off else f"{'':24}"
    vm = " VM" if row["vm_reason"] else ""
    return f"{head}{db}{kernels:>14}{remaining:8}{codes}{row['compile_s']:9.1f}  {verdict}{vm}"


HEADER = (
    f"{'model':13}{'variant':23}{'ours':>8}{'floor':>8}{'ORT':>8}{'to ORT':>8}{'int/all w':>14}{'remain':>8}"
    f"{'ours off':>12}{'ORT off':>12}{'s':>9}"
)


def main() -> int:
    """Measure, print a line a file, write the JSON. Exit status 1 when a file failed or is off."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="of the zoo (default: all)")
    parser.add_argument("--variants", help="comma-separated parts of names (default: all)")
    parser.add_argument("--steps", action="store_true", help="also operator by operator (compiles everything twice)")
    parser.add_argument("-o", "--output", type=Path, help="write JSON")
    arguments = parser.parse_args()
    parts = arguments.variants.split(",") if arguments.variants else [""]
    rows: list[dict[str, Any]] = []
    print(HEADER)
    with tempfile.TemporaryDirectory() as folder:
        for model in zoo():
            if arguments.models and model.name not in arguments.models:
                continue
            for variant in VARIANTS:
                if not any(p in variant.name for p in parts):
                    continue
                try:
                    rows.append(measure(model, variant, Path(folder), arguments.steps))
                except Exception as error:
                    traceback.print_exc()
                    text = (str(error).strip().splitlines() or [type(error).__name__])[-1][:160]
                    rows.append({"model": model.name, "variant": variant.name, "failed": text})
                print(line(rows[-1]), flush=True)
                if arguments.output:
                    document = {"machine": machine(), "rows": rows}
                    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    bad = [r for r in rows if "failed" in r or not r.get("ok", True)]
    made = [r for r in rows if "not_made" not in r]
    print(f"{len(made) - len(bad)} of {len(made)} files import, compile and compute what they mean")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
