"""Run a folder that `benchmarks.gpu --prepare` made: check, time, compare. numpy and the CUDA driver only.

Each timed case is one row: our kernels and the library's in turn, each a CUDA graph over rotating buffers, timed by
events; the ratio is the median over the rounds of theirs / ours. Share of peak is against what a kernel of nothing but
matrix instructions reached in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_cases import Case, as_dtype, reference, small, storage, worst_error
from tvmx.cuda.driver import Device, DeviceError
from tvmx.tune.run_cpu import RunError
from tvmx.tune.run_cuda import CudaKernel

NO_DEVICE, WRONG, UNPREPARED = 3, 4, 2
"""Exit codes beside 0: no (fitting) CUDA device; an output is wrong; the folder holds nothing that was prepared."""
ROUNDS = 9
SAMPLE_S = 4e-3  # of one timed graph
CHECKED_ROWS = 256  # of an output, drawn at random, beyond SMALL multiply-adds
SMALL = 1 << 24

Timer = Callable[[Callable[[], None], int], float]
"""(issue one call, calls) → seconds a call."""


def interleaved(ours: Callable[[], None], theirs: Callable[[], None] | None, timer: Timer, rounds: int = ROUNDS) -> Any:
    """Both in turn, `rounds` times: {"ours_us", "theirs_us", "ratio"}; ratio > 1 where ours is faster."""

    def calls(run: Callable[[], None]) -> int:
        first = min(timer(run, 1) for _ in range(3))
        return max(1, min(200, int(SAMPLE_S / max(first, 1e-7))))

    sides = [ours] if theirs is None else [ours, theirs]
    counts = [calls(run) for run in sides]
    samples: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for run, count, found in zip(sides, counts, samples):
            found.append(timer(run, count))
    row: dict[str, Any] = {"ours_us": 1e6 * statistics.median(samples[0]), "samples_s": samples}
    if theirs is not None:
        row["theirs_us"] = 1e6 * statistics.median(samples[1])
        row["ratio"] = statistics.median(b / a for a, b in zip(*samples))
    return row


def summary(rows: Sequence[dict[str, Any]], sm: int = 80) -> dict[str, Any]:
    """Per group of rows: the geometric mean and the least of the ratios, and the bars they are held to."""
    out: dict[str, Any] = {}
    mma = 0.6 if sm == 90 else 0.8  # Hopper's library uses wgmma, whose rate mma.sync does not reach
    groups = [("resnet50 float16", "resnet50 ", mma), ("gemm 8192", "gemm float16 8192", mma)]
    groups += [("gemm 8192 wgmma", "gemm float16 8192", 0.85)]
    for name, prefix, bar in groups:
        fits = [r for r in rows if r["case"].startswith(prefix) and "int8" not in r["case"]]
        found = [r["ratio"] for r in fits if r.get("ratio") and ("wgmma" in r["case"]) == ("wgmma" in name)]
        if found:
            mean = float(np.exp(np.mean(np.log(found))))
            out[name] = {"mean": mean, "least": min(found), "bar": bar, "reached": mean >= bar, "rows": len(found)}
    return out


class Program:
    """The kernels of one case on the device, with sets of arguments that are used in turn."""

    def __init__(self, folder: Path, entry: dict[str, Any], device: Device, x: np.ndarray, weight: np.ndarray) -> None:
        self.device = device
        self.case = Case.from_json(entry["case"])
        self.entry = entry
        self.kernels = [CudaKernel(str(folder / s["file"]), device) for s in entry["steps"]]
        constants = np.load(folder / entry["constants"]) if entry["constants"] else {}
        total = sum(int(np.prod(t["shape"])) * int(t["bytes"]) for t in entry["tensors"].values())
        copies = max(1, min(8, -(-2 * device.facts.l2_bytes // max(1, total)))) if self.case.timed else 1
        given = {"x": x, "w": weight}
        self.sets = [self._place(given, constants) for _ in range(copies)]
        self._turn = 0

    def _place(self, given: dict[str, np.ndarray], constants: Any) -> dict[str, int]:
        found = {}
        for name, tensor in self.entry["tensors"].items():
            size = int(np.prod(tensor["shape"])) * int(tensor["bytes"])
            found[name] = self.device.alloc(size)
            array = given.get(name) if name in given else constants[name] if name in constants else None
            if array is not None:
                array = np.ascontiguousarray(array)
                assert array.nbytes == size, f"{self.case.name}: {name} has {array.nbytes} bytes, not {size}"
                self.device.upload(found[name], array.ctypes.data, size)
            else:
                self.device.fill(found[name], size, 0x5A)
        return found

    def __call__(self) -> None:
        chosen = self.sets[self._turn % len(self.sets)]
        self._turn += 1
        self.issue(chosen)

    def issue(self, tensors: dict[str, int]) -> None:
        for kernel, step in zip(self.kernels, self.entry["steps"]):
            kernel.run_on([tensors[n] for n in step["tensors"]])

    def output(self) -> np.ndarray:
        """Of one run on the first set."""
        name = self.entry["output"]
        tensor = self.entry["tensors"][name]
        self.issue(self.sets[0])
        out = np.empty(tuple(tensor["shape"]), np.dtype(tensor["numpy"]))
        self.device.download(out.ctypes.data, self.sets[0][name], out.nbytes)
        return out

    def close(self) -> None:
        self.device.synchronize()
        for tensors in self.sets:
            for address in tensors.values():
                self.device.free(address)
        for kernel in self.kernels:
            kernel.close()


def graph_timer(device: Device) -> Timer:
    """Seconds a call of a graph of so many calls."""

    def timed(issue: Callable[[], None], calls: int) -> float:
        device.begin_capture()
        try:
            for _ in range(calls):
                issue()
        finally:
            graph = device.end_capture()
        try:
            device.replay(graph)
            device.start()
            device.replay(graph)
            device.stop()
            return device.elapsed() / calls
        finally:
            device.drop(graph)

    return timed


def check(program: Program, x: np.ndarray, weight: np.ndarray) -> dict[str, Any]:
    """The output against float64: all of it, or rows drawn at random where that would take long."""
    case = program.case
    found = program.output()
    rows = np.arange(int(np.prod(case.output[:-1])))
    if case.flops // 2 > SMALL and len(rows) > CHECKED_ROWS:
        rows = np.sort(np.random.default_rng(1).choice(rows, CHECKED_ROWS, replace=False))
    flat = found.reshape(-1, case.output[-1])[rows]
    error, allowed = worst_error(case, flat, reference(case, x, weight, rows))
    return {"error": error, "allowed": allowed, "rows_checked": len(rows), "right": bool(error <= allowed)}


def measure(folder: Path, manifest: dict[str, Any], device: Device, peers: Any, budget_s: float) -> dict[str, Any]:
    """Every case in turn until time is over."""
    begin = time.monotonic()
    timer = graph_timer(device)
    rows: list[dict[str, Any]] = []
    peaks = measure_peaks(folder, manifest, device, timer)
    left_out = []
    for entry in manifest["cases"]:
        case = Case.from_json(entry["case"])
        if time.monotonic() - begin > budget_s:
            left_out.append(case.name)
            continue
        x, weight = (as_dtype(small(s, i), case.dtype) for i, s in enumerate((case.x, case.weight)))
        row: dict[str, Any] = {"case": case.name, "flops": case.flops}
        try:
            program = Program(folder, entry, device, x, weight)
            row |= check(program, x, weight)
            if case.timed:
                rival, why = peers.prepare(case, x, weight, len(program.sets))
                theirs = rival if rival is not None else None
                row |= interleaved(program, theirs, timer) | ({"no_peer": why} if why else {})
                row["tflops"] = case.flops / row["ours_us"] * 1e-6
                peak = peaks.get(case.dtype)
                row["share_of_peak"] = row["tflops"] / peak if peak else None
                if rival is not None:
                    row["peer"] = peers.name
                    rival.close()
            program.close()
        except RunError as error:
            row |= {"error": str(error), "right": False}
        rows.append(row)
        print(_line(row), flush=True)
    return {
        "device": device.facts.to_json(),
        "target": manifest["target"],
        "versions": manifest["versions"],
        "peers": peers.describe(),
        "peak_tflops": peaks,
        "seconds": time.monotonic() - begin,
        "rows": rows,
        "left_out": left_out,
        "summary": summary(rows, device.facts.sm),
    }


def measure_peaks(folder: Path, manifest: dict[str, Any], device: Device, timer: Timer) -> dict[str, float]:
    """TFLOP/s of a kernel of nothing but matrix instructions, by dtype."""
    found = {}
    for peak in manifest["peaks"]:
        kernel = CudaKernel(str(folder / peak["file"]), device)
        out = device.alloc(peak["out_bytes"])
        blocks = 4 * device.facts.multiprocessors
        kernel.launches[0]["grid"] = [blocks, 1, 1]
        seconds = min(timer(lambda k=kernel, o=out: k.run_on([o]), 1) for _ in range(5))  # type: ignore[misc]
        found[peak["dtype"]] = 2 * peak["macs_a_block"] * blocks / seconds * 1e-12
        kernel.close()
        device.free(out)
    return found


def _line(row: dict[str, Any]) -> str:
    verdict = "ok   " if row["right"] else "WRONG"
    if "ours_us" not in row:
        return f"{verdict} {row['case']:44} error {row['error']}"
    ratio = f"{row['ratio']:.2f} x {row['peer']}" if "ratio" in row else row.get("no_peer", "")
    peak = f"{row['share_of_peak']:.0%} of peak" if row.get("share_of_peak") else ""
    return f"{verdict} {row['case']:44} {row['ours_us']:9.1f} us {row['tflops']:7.1f} TFLOP/s {peak} {ratio}"


def main(folder: Path, argv: list[str] | None = None) -> int:
    """The command. Returns an exit code."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--json", type=Path, default=folder / "gpu.json")
    parser.add_argument("--time-budget-s", type=float, default=420.0)
    parser.add_argument("--no-peers", action="store_true", help="do not look for cuBLAS and cuDNN")
    args = parser.parse_args(argv)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        print(f"benchmarks.gpu: {folder} was not prepared: {error}", file=sys.stderr)
        return UNPREPARED
    try:
        device = Device(args.device)
    except DeviceError as error:
        print(f"benchmarks.gpu: nothing was measured: {error}", file=sys.stderr)
        return NO_DEVICE
    sm = manifest["sm"]
    if device.facts.sm // 10 != sm // 10 or device.facts.sm < sm:
        print(f"benchmarks.gpu: nothing was measured: made for sm_{sm}, this is {device.facts}", file=sys.stderr)
        return NO_DEVICE
    from benchmarks.gpu_peers import Peers

    print(device.facts, flush=True)
    try:
        found = measure(folder, manifest, device, Peers(device, enabled=not args.no_peers), args.time_budget_s)
    except DeviceError as error:
        print(f"benchmarks.gpu: the device failed: {error}", file=sys.stderr)
        return WRONG
    temporary = args.json.with_suffix(".tmp")
    temporary.write_text(json.dumps(found, indent=1))
    temporary.replace(args.json)
    for name, facts in found["summary"].items():
        print(f"{name}: {facts['mean']:.2f} of the library's speed (least {facts['least']:.2f}), bar {facts['bar']}")
    wrong = [r["case"] for r in found["rows"] if not r["right"]]
    print(f"{len(found['rows']) - len(wrong)} of {len(found['rows'])} cases right; {args.json}")
    return WRONG if wrong else 0


__all__ = ["NO_DEVICE", "UNPREPARED", "WRONG", "interleaved", "main", "storage", "summary"]
