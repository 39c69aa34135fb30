"""Random Tensor Core products and convolutions through the CPU emulation, odd sizes and all target presets.

`python -m tests.conformance.tensor_core --count 240` (part of `make conformance`).
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from tests.schedules.cuda.products import Convolution, Product, check

PRESETS = ("cuda-sm75", "cuda-sm80", "cuda-sm86", "cuda-sm89", "cuda-sm89-l4", "cuda-sm90", "cuda-sm90-h200")
SIZES = (1, 2, 3, 5, 7, 8, 13, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 96, 100, 128, 130)


def random_case(index: int, seed: int = 0) -> tuple[str, Convolution | Product]:
    """The same case for the same index and seed, whatever else runs."""
    rng = np.random.default_rng((seed, index))

    def pick(options: tuple) -> int:  # type: ignore[type-arg]
        return int(rng.choice(options))

    preset = PRESETS[index % len(PRESETS)]
    dtype = ("float16", "int8")[int(rng.random() < 0.4)]
    if dtype == "float16" and preset != "cuda-sm75" and rng.random() < 0.3:
        dtype = "bfloat16"
    if rng.random() < 0.45:
        m, n, k = (pick(SIZES) for _ in range(3))
        batch = () if rng.random() < 0.6 else (pick((1, 2, 3)),)
        constant = bool(rng.random() < 0.5) and not batch
        swapped = bool(rng.random() < 0.4) and not constant
        right = (*batch, n, k) if swapped else (*batch, k, n)
        return preset, Product((*batch, m, k), right, dtype, constant, swapped)
    kernel = [(1, 1), (3, 3), (5, 3), (2, 2), (7, 7)][int(rng.choice(5, p=(0.3, 0.4, 0.1, 0.1, 0.1)))]
    strides = (pick((1, 1, 2)), pick((1, 1, 2)))
    dilation = (pick((1, 1, 2)), 1) if kernel != (1, 1) else (1, 1)
    groups = pick((1, 1, 1, 2))
    depth, mine = pick((3, 8, 16, 20, 32, 48, 64)), pick((8, 9, 16, 24, 33, 64))
    if groups > 1:
        depth, mine = max(depth, 8), max(mine, 8)
    pads = tuple(int(v) for v in rng.integers(0, 3, 4)) if kernel != (1, 1) else (0, 0, 0, 0)
    low = max((kernel[0] - 1) * dilation[0] + 1, kernel[1])
    height, width = (int(v) for v in rng.integers(low, low + 9, 2))
    x = (pick((1, 1, 2, 3)), height, width, depth * groups)
    epilogue = "requantize" if dtype == "int8" and rng.random() < 0.5 else "relu"
    return preset, Convolution(
        x, mine * groups, kernel, strides, pads, dilation, groups, dtype, epilogue, bool(rng.random() < 0.85)
    )  # type: ignore[arg-type]


def run_many(count: int, start: int = 0, seed: int = 0, verbose: bool = False) -> list[str]:
    """Emulate cases start .. start + count; returns what failed, in words."""
    from tvmx.target import PRESETS as TARGETS

    failed = []
    for index in range(start, start + count):
        preset, case = random_case(index, seed)
        began = time.perf_counter()
        try:
            outcome = check(case, TARGETS[preset], reverse=index % 2 == 1)
            assert not outcome.conflicts, f"{outcome.conflicts} bank conflicts"
            verdict = f"ok {outcome.rules}"
        except Exception as error:  # whatever a case raises is its finding
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
            verdict = f"FAIL {reason}"
            failed.append(f"{index} {preset} {case}: {reason}")
        if verbose:
            print(f"{index:4} {time.perf_counter() - began:5.1f} s {preset:15} {case} {verdict}", flush=True)
    return failed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.conformance.tensor_core", description=__doc__)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-v", "--verbose", action="store_true")
    args = parser.parse_args(argv)
    failed = run_many(args.count, args.start, args.seed, args.verbose)
    for line in failed:
        print(line)
    print(f"{args.count - len(failed)} of {args.count} random Tensor Core kernels match numpy in emulation")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
