"""Whole networks for CUDA targets as libraries, with no GPU: seconds, kernels, share of FLOPs on Tensor Cores.

`python -m benchmarks.gpu_build --json build.json` compiles a ResNet-50-like and a BERT-like network in FP16 and INT8
for sm_80 and sm_90. Exits with 1 where one takes over ten minutes, spills, or has less than 95 % of its FLOPs there.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import networks

NETWORKS = {"resnet50": networks.resnet50, "bert": networks.bert}
SHOWN = ("seconds", "kernels", "calls", "tensor_core_share", "spilled_bytes", "streams", "library_bytes", "arena_bytes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_build", description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--targets", nargs="+", default=["cuda-sm80", "cuda-sm90"])
    parser.add_argument("--precisions", nargs="+", default=["fp16", "int8"], choices=["fp16", "int8"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    rows = []
    for name in args.networks:
        for precision in args.precisions:
            model = NETWORKS[name](quantized=precision == "int8").SerializeToString()
            for target in args.targets:
                row = build(model, target)
                rows.append({"network": name, "precision": precision, "target": target, **row})
                print(f"{name} {precision} {target}: " + ", ".join(f"{k} {row[k]}" for k in SHOWN), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    bad = [r for r in rows if r["seconds"] > 600 or r["spilled_bytes"] or r["tensor_core_share"] < 0.95]
    return 1 if bad else 0


def build(model: bytes, target: str) -> dict[str, Any]:
    """Compile once; the report of the build, with the seconds of all stages."""
    from tvmx import api

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # a quantised model says itself what is int8; its float parts are fp16
        report = api.compile(model, Path(folder) / "m.so", target=target, precision="fp16").report
    stages = {**report["seconds"], **report["build_seconds"]}
    entry = {"streams": report["streams"]["main"], "calls": report["nodes"]["main"]}
    return {**report, **entry, "seconds": round(time.perf_counter() - began, 1), "stages": stages}


if __name__ == "__main__":
    sys.exit(main())
