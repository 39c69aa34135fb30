"""Whole networks for CUDA targets, with no GPU: every kernel compiled, and how much of the work Tensor Cores do.

`python -m benchmarks.gpu_survey --json survey.json` compiles a ResNet-50-like and a BERT-like network in FP16 and
INT8 for sm_80 and sm_90 and prints kernel → schedule → Tensor Core or not. Needs nvcc and cuobjdump; `--no-code`
goes by the schedules alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks import networks

NETWORKS = {"resnet50": networks.resnet50, "bert": networks.bert}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_survey", description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--targets", nargs="+", default=["cuda-sm80", "cuda-sm90"])
    parser.add_argument("--precisions", nargs="+", default=["fp16", "int8"], choices=["fp16", "int8"])
    parser.add_argument("--no-code", action="store_true", help="lower to CUDA source only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)

    from tvmx import api
    from tvmx.cuda.survey import survey_model
    from tvmx.precision import rules_from
    from tvmx.target import resolve

    results, bad = [], 0
    for name in args.networks:
        for precision in args.precisions:
            model = api.import_onnx(NETWORKS[name](quantized=precision == "int8").SerializeToString())
            for target in args.targets:
                began = time.perf_counter()
                # a quantised model says itself what is int8; its float parts are fp16
                lowered = api.lower(model, resolve(target), precision=rules_from("fp16"))
                found = survey_model(lowered, resolve(target), code=not args.no_code)
                seconds = time.perf_counter() - began
                print(f"\n{name} {precision}, {seconds:.0f} s, {found.spills} bytes spilled\n{found}", flush=True)
                bad += found.tensor_core_share < 0.95 or found.spills > 0
                results.append({"network": name, "precision": precision, "seconds": seconds, **found.to_json()})
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
