"""Tensor Core kernels against cuBLAS and cuDNN on a GPU, untuned; and every schedule family against numpy.

    python -m benchmarks.gpu                                   # on a machine with a GPU and nvcc
    python -m benchmarks.gpu --prepare DIR --target cuda-sm80  # here; then, on a GPU machine without TVM:
    python DIR/run.py                                          # writes DIR/gpu.json

Exit codes: 0; 2 the folder was not prepared; 3 no CUDA device; 4 an output was wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu_cases, gpu_run
from benchmarks.gpu_cases import Case, as_dtype, small
from tvmx.cuda.driver import Device, DeviceError
from tvmx.target import PRESETS, Target

CARRIED = ("errors.py", "cuda/driver.py", "tune/run_arrays.py", "tune/run_cpu.py", "tune/run_cuda.py")
RUN = '''"""Measures this folder's kernels; see --help."""
import sys
from pathlib import Path

here = Path(__file__).resolve().parent
sys.path.insert(0, str(here / "lib"))
from benchmarks.gpu_run import main

sys.exit(main(here))
'''
PEAK_SOURCE = """#if 1
#define uint unsigned int
#endif
extern "C" __global__ void __launch_bounds__(256) peak({type}* out) {{
  unsigned a[4] = {{threadIdx.x, 1, 2, 3}}, b[2] = {{threadIdx.x, 5}};
  {type} c[8][4] = {{}};
  for (int i = 0; i < {loops}; ++i) {{
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("mma.sync.aligned.{shape}.row.col.{types} {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
                   "{{%0, %1, %2, %3}};\\n" : "+{reg}"(c[j][0]), "+{reg}"(c[j][1]), "+{reg}"(c[j][2]), "+{reg}"(c[j][3])
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }}
  {type} sum = 0;
  for (int j = 0; j < 8; ++j) for (int r = 0; r < 4; ++r) sum += c[j][r];
  out[threadIdx.x] = sum;
}}
"""
LOOPS, WARPS = 4096, 8


def prepare(folder: Path, target: Target, cases: list[Case], progress: bool = True) -> None:
    """Compile `cases` for `target` into `folder`, with what runs them. Needs nvcc, no GPU. Raises CompileError."""
    from tvmx.tune.record import versions

    assert target.gpu is not None, "a CUDA target"
    (folder / "kernels").mkdir(parents=True, exist_ok=True)
    entries = []
    for number, case in enumerate(cases):
        begin = time.monotonic()
        entries.append(_compile(folder, f"kernels/{number:03}", case, target))
        if progress:
            rules = ", ".join(s["rule"] for s in entries[-1]["steps"])
            print(f"{case.name}: {rules}, {time.monotonic() - begin:.1f} s", flush=True)
    _carry(folder)
    tvmx_version, tvm_version = versions()
    manifest = {
        "sm": target.gpu.sm,
        "target": target.name,
        "versions": {"tvmx": tvmx_version, "tvm": tvm_version},
        "cases": entries,
        "peaks": _peaks(folder, target) if target.gpu.has_mma else [],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _compile(folder: Path, stem: str, case: Case, target: Target) -> dict[str, Any]:
    """One case through the pipeline and the default schedules: its kernels, their tensors and constants."""
    import tvm
    from tvm import relax

    from tvmx.cuda.candidate import build_candidate
    from tvmx.cuda.lower import lower_kernel
    from tvmx.pipeline import run_phases

    assert target.gpu is not None
    mod = run_phases(module(case), target)
    main = mod["main"]
    names: dict[Any, str] = {p: n for p, n in zip(main.params, ("x", "w"))}
    tensors: dict[str, dict[str, Any]] = {}
    constants: dict[str, np.ndarray] = {}
    steps: list[dict[str, Any]] = []

    def known(expr: Any) -> str:
        if hasattr(expr, "value") and not isinstance(expr, relax.Var):
            name = f"c{len(constants)}"
            constants[name] = expr.value.numpy()
        else:
            name = names[expr]
        tensors.setdefault(name, _tensor(expr.ty))
        return name

    for block in main.body.blocks:
        for binding in block.bindings:
            call = binding.value
            op = getattr(getattr(call, "op", None), "name", "")
            if op == "relax.call_tir":
                name = f"t{len(steps)}"
                operands = [known(a) for a in call.args[1].fields]
                names[binding.var] = name
                tensors[name] = _tensor(binding.var.ty)
                scheduled = _scheduled(mod[call.args[0]], target, case.rule)
                program = lower_kernel(scheduled.func, target, f"k{len(steps)}")
                file = f"{stem}-{len(steps)}.so"
                build_candidate(program, target.gpu, folder / file)
                steps.append({"file": file, "rule": scheduled.rule, "tensors": [*operands, name]})
            else:  # a view or an alias
                names[binding.var] = known(call.args[0] if isinstance(call, tvm.ir.Call) else call)
    made = names[main.body.body]
    tensors[made] = {**tensors[made], "shape": list(case.output)}
    file = ""
    if constants:
        file = f"{stem}.npz"
        np.savez_compressed(folder / file, **constants)
    return {"case": case.to_json(), "steps": steps, "tensors": tensors, "constants": file, "output": made}


def _scheduled(func: Any, target: Target, rule: str) -> Any:
    """By the default, or by the named rule."""
    from tvmx.schedule import Workload, apply_default, apply_rule, rules_for

    if not rule:
        return apply_default(func, target)
    (chosen,) = [r for r in rules_for(Workload.of(func), target) if r.name == rule]
    return apply_rule(chosen, func, target)


def _tensor(ty: Any) -> dict[str, Any]:
    dtype = str(ty.dtype)
    kind = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    return {"shape": [int(d) for d in ty.shape], "bytes": kind.itemsize, "numpy": kind.name}


def module(case: Case) -> Any:
    """The case as a Relax program."""
    from tvm import relax

    op, builder = relax.op, relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(case.x, case.dtype))
    whole = case.dtype == "int8"
    if case.kind == "gemm":
        w = relax.Var("w", relax.TensorType(case.weight, case.dtype))
        with builder.function("main", [x, w]):
            with builder.dataflow():
                axes = [*range(len(case.weight) - 2), len(case.weight) - 1, len(case.weight) - 2]
                right = builder.emit(op.permute_dims(w, axes)) if case.transposed else w
                y = builder.emit_output(op.matmul(x, right, out_dtype="int32" if whole else None))
            builder.emit_func_output(y)
        return builder.get()
    weight = relax.const(as_dtype(small(case.weight, 1), case.dtype))
    one = relax.const(np.ones((1, 1, 1, case.weight[3]), "int32" if whole else case.dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(
                op.nn.conv2d(
                    x, weight, strides=[case.stride] * 2, padding=[case.pad] * 4, dilation=[case.dilation] * 2,
                    groups=case.groups, data_layout="NHWC", kernel_layout="HWIO", out_dtype="int32" if whole else None,
                )
            )  # fmt: skip
            y = builder.emit(op.add(y, one))
            if whole:
                y = builder.emit(op.multiply(builder.emit(op.astype(y, "float32")), relax.const(np.float32(2**-8))))
                y = builder.emit(op.clip(builder.emit(op.round(y)), -128, 127))
                y = builder.emit_output(op.astype(y, "int8"))
            else:
                y = builder.emit_output(op.nn.relu(y))
        builder.emit_func_output(y)
    return builder.get()


def _peaks(folder: Path, target: Target) -> list[dict[str, Any]]:
    """Kernels of nothing but matrix instructions."""
    from tvmx.cuda.candidate import build_candidate
    from tvmx.cuda.lower import Argument, DeviceProgram, Launch

    assert target.gpu is not None
    kinds = {
        "float16": ("m16n8k16", "f32.f16.f16.f32", "float", "f", 16 * 8 * 16),
        "int8": ("m16n8k32", "s32.s8.s8.s32", "int", "r", 16 * 8 * 32),
    }
    found = []
    for dtype, (shape, types, kind, register, macs) in kinds.items():
        out = Argument(0, "float32", (256,))
        launch = Launch("peak", (out,), (1, 1, 1), (32 * WARPS, 1, 1))
        source = PEAK_SOURCE.format(type=kind, shape=shape, types=types, reg=register, loops=LOOPS)
        file = f"kernels/peak-{dtype}.so"
        build_candidate(DeviceProgram("peak", source, (launch,), (out,)), target.gpu, folder / file)
        found.append({"dtype": dtype, "file": file, "out_bytes": 1024, "macs_a_block": 8 * macs * LOOPS * WARPS})
    return found


def _carry(folder: Path) -> None:
    import tvmx

    roots = {"tvmx": Path(str(tvmx.__file__)).parent, "benchmarks": Path(__file__).parent}
    files = [("tvmx", n) for n in CARRIED] + [("benchmarks", f"gpu_{n}.py") for n in ("cases", "run", "peers")]
    for package, name in files:
        into = folder / "lib" / package / name
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(roots[package] / name, into)
    for package in ("tvmx", "tvmx/cuda", "tvmx/tune", "benchmarks"):
        (folder / "lib" / package / "__init__.py").write_text("")
    (folder / "run.py").write_text(RUN)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="compile into a new folder, to be carried to a GPU")
    parser.add_argument("--target", default=None, help="such as cuda-sm80 (default: this machine's device)")
    parser.add_argument("--batch", type=int, default=32, help="of the convolutions")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--time-budget-s", type=float, default=420.0)
    args = parser.parse_args(argv)

    def cases(target: Target) -> list[Case]:
        assert target.gpu is not None
        return [c for c in gpu_cases.all_cases(args.batch, target.gpu.sm) if args.only in c.name]

    if args.prepare:
        target = PRESETS[args.target or "cuda-sm80"]
        prepare(args.prepare, target, cases(target))
        print(f"on the machine with the GPU: python {args.prepare}/run.py")
        return 0
    try:
        facts = Device().facts
    except DeviceError as error:
        print(
            f"benchmarks.gpu: nothing was measured: {error}. Prepare a folder here with --prepare DIR --target NAME "
            "and run it on a machine with a GPU",
            file=sys.stderr,
        )
        return gpu_run.NO_DEVICE
    name = args.target or next((n for n in (f"cuda-sm{facts.sm}", f"cuda-sm{facts.sm // 10}0") if n in PRESETS), None)
    if name is None:
        print(f"benchmarks.gpu: no preset for {facts}; name one with --target", file=sys.stderr)
        return gpu_run.NO_DEVICE
    with tempfile.TemporaryDirectory(prefix="tvmx-gpu-") as folder:
        prepare(Path(folder), PRESETS[name], cases(PRESETS[name]))
        return gpu_run.main(
            Path(folder), ["--json", str(args.json.absolute()), "--time-budget-s", str(args.time_budget_s)]
        )


if __name__ == "__main__":
    sys.exit(main())
