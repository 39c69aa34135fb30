"""Machine code of each schedule family: the expected matrix instructions, no spills, no stack."""

from __future__ import annotations

from typing import Any

import pytest

from tests.schedules.cuda.products import Convolution, Product
from tvmx.cuda.lower import lower_kernel
from tvmx.cuda.nvcc import cuda_compiler, parse_ptxas
from tvmx.cuda.sass import disassembler, functions, inspect_program, resident_blocks
from tvmx.target import PRESETS

needs_compiler = pytest.mark.skipif(
    cuda_compiler() is None or disassembler() is None, reason="reading machine code needs nvcc or NVRTC, and cuobjdump"
)


def first_program(case: Any, preset: str) -> Any:
    """The first kernel of the lowered program, scheduled by default, and its rule."""
    import tvm
    from tvm import tirx

    from tvmx.pipeline import run_phases
    from tvmx.schedule import apply_default

    target = PRESETS[preset]
    mod = run_phases(case.module(), target)
    kernels = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert kernels, tvm.__version__
    products = [f for f in kernels if "tensor_core" in str(f.attrs["global_symbol"])] if len(kernels) > 1 else kernels
    scheduled = apply_default(products[0], target)
    return scheduled.rule, lower_kernel(scheduled.func, target)


CONV = Convolution((1, 28, 28, 64), 64, (3, 3), pads=(1, 1, 1, 1))
CONV8 = Convolution((1, 28, 28, 64), 64, (3, 3), pads=(1, 1, 1, 1), dtype="int8", epilogue="requantize")
CASES = {
    "conv f16 sm80": (CONV, "cuda-sm80", "HMMA.16816.F32", True),
    "gemm s8 sm90": (Product((512, 512), (512, 512), dtype="int8"), "cuda-sm90", "IMMA.16832.S8.S8", True),
    "gemm bf16 sm80": (Product((512, 512), (512, 512), dtype="bfloat16"), "cuda-sm80", "HMMA.16816.F32.BF16", True),
    "conv f16 sm75": (CONV, "cuda-sm75", "HMMA.1688.F32", False),
    "conv s8 sm75": (CONV8, "cuda-sm75", "IMMA.8816.S8.S8", False),
}


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_family(name: str) -> None:
    case, preset, shape, asynchronous = CASES[name]
    rule, program = first_program(case, preset)
    assert rule == ("cuda.mma" if asynchronous else "cuda.wmma")
    (code,) = inspect_program(program, PRESETS[preset].gpu)
    assert code.shapes == (shape,)
    assert (code.spills, code.stack) == (0, 0)
    assert code.instructions["LDSM"] > 0 or not asynchronous
    assert ("LDGSTS" in code.instructions) == asynchronous
    assert not {"LDL", "STL"} & set(code.instructions)
    assert code.blocks_per_sm >= 1
    assert code.shared_bytes <= PRESETS[preset].gpu.shared_bytes_per_block
    assert code.macs > 0
    assert code.uses_tensor_cores
    assert shape in str(code)


def test_parsers_need_no_compiler() -> None:
    text = """ptxas info    : Compiling entry function 'k' for 'sm_80'
    ptxas info    : Function properties for k
        8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
    ptxas info    : Used 40 registers, used 1 barriers, 96 bytes smem, 376 bytes cmem[0]"""
    (found,) = parse_ptxas(text)
    assert (found.kernel, found.registers, found.stack) == ("k", 40, 8)
    assert (found.spill_stores, found.spill_loads, found.static_shared) == (4, 12, 96)
    sass = """		Function : k
        /*0000*/                   LDSM.16.M88.4 R4, [R2] ;    /* 0x00 */
        /*0010*/              @!P0 HMMA.16816.F32 R8, R4, R6, R8 ;    /* 0x00 */
"""
    assert functions(sass) == {"k": [("LDSM", ".16.M88.4"), ("HMMA", ".16816.F32")]}


def test_occupancy() -> None:
    gpu = PRESETS["cuda-sm80"].gpu
    assert resident_blocks(256, 128, 0, gpu) == 2  # registers
    assert resident_blocks(256, 32, 60 * 1024, gpu) == 2  # shared memory
    assert resident_blocks(1024, 32, 0, gpu) == 2  # threads
    assert resident_blocks(32, 16, 0, gpu) == 32  # blocks
