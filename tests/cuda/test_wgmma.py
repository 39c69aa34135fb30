"""Hopper's wgmma: emulated by its descriptors and register layout, planted faults caught, HGMMA in the machine code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.schedules.cuda.products import Product
from tvmx.cuda.lower import DeviceProgram, lower_kernel
from tvmx.cuda.nvcc import cuda_compiler
from tvmx.cuda.sass import disassembler, inspect_program
from tvmx.debug.emulate import KernelFault, compiler, run_program
from tvmx.target import PRESETS

TARGET = PRESETS["cuda-sm90"]
CASE = Product((128, 320), (320, 256))  # five steps through four buffers
emulated = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")


def kernel(case: Product) -> tuple[Any, list[np.ndarray]]:
    """The case's only kernel by rule cuda.wgmma, lowered, and its inputs."""
    from tvm import relax, tirx

    from tvmx.pipeline import run_phases
    from tvmx.schedule import Workload, apply_rule, rules_for

    mod = run_phases(case.module(), TARGET)
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    rules = rules_for(Workload.of(func), TARGET)
    assert rules[0].name == "cuda.mma"
    (rule,) = [r for r in rules if r.name == "cuda.wgmma"]
    call = mod["main"].body.blocks[0].bindings[0].value
    given = iter(case.inputs())
    arrays = [next(given) if isinstance(a, relax.Var) else a.value.numpy() for a in call.args[1].fields]
    return apply_rule(rule, func, TARGET).func, arrays


@pytest.fixture(scope="module")
def program() -> tuple[DeviceProgram, list[np.ndarray]]:
    func, arrays = kernel(CASE)
    return lower_kernel(func, TARGET), arrays


@emulated
@pytest.mark.parametrize("reverse", [False, True])
def test_numbers_are_exact(program: Any, reverse: bool) -> None:
    lowered, arrays = program
    done = run_program(lowered, arrays, reverse)
    np.testing.assert_array_equal(done.outputs[0].astype("float64"), CASE.reference())
    assert done.copy_conflicts == 0
    assert done.copies == 2 * 5 * 256 * 8, "two blocks, five steps of 256 rows of eight chunks"


@emulated
def test_bf16_with_operands_given() -> None:
    case = Product((256, 128), (128, 128), dtype="bfloat16", constant=False, transpose_b=True)
    case = replace(case, b=(128, 128))
    func, arrays = kernel(case)
    done = run_program(lower_kernel(func, TARGET), arrays)
    expected = case.reference()
    assert np.abs(done.outputs[0].astype("float64") - expected).max() <= 2**-7 * np.abs(expected).max()


FAULTS = {
    "no proxy fence": ('asm volatile("fence.proxy.async.shared::cta;\\n" ::: "memory");', "", "fence.proxy.async"),
    "no wait for copies": ('asm volatile("cp.async.wait_group 1;\\n" ::: "memory");', "", "in flight"),
    "no barrier": ("__syncthreads();\n    int next", "int next", "race|barrier|in flight|nobody wrote"),
    "buffers reused too early": (
        "wgmma.wait_group.sync.aligned 1;",
        "wgmma.wait_group.sync.aligned 4;",
        "wgmma in flight",
    ),
}


@emulated
@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault(program: Any, name: str) -> None:
    old, new, reason = FAULTS[name]
    lowered, arrays = program
    assert old in lowered.source
    with pytest.raises(KernelFault, match=reason):
        run_program(replace(lowered, source=lowered.source.replace(old, new)), arrays)


WRONG = {
    "swizzle": ("(chunk ^ (row & 7)) * 16", "chunk * 16"),
    "stride of row groups": ("(1024 >> 4) << 32", "(512 >> 4) << 32"),
    "step along k": ("left + s * 2", "left + s * 4"),
    "rows of a warpgroup": ("stage + group * 8192", "stage"),
    "registers": ("thread % 4 * 2;", "thread % 4;"),
    "read before they arrive": ('asm volatile("wgmma.wait_group.sync.aligned 0;\\n" ::: "memory");', ""),
}


@emulated
@pytest.mark.parametrize("name", WRONG)
def test_planted_mistake_gives_wrong_numbers(program: Any, name: str) -> None:
    old, new = WRONG[name]
    lowered, arrays = program
    assert old in lowered.source
    try:
        done = run_program(replace(lowered, source=lowered.source.replace(old, new)), arrays)
    except KernelFault:
        return
    assert not np.array_equal(done.outputs[0].astype("float64"), CASE.reference())


@pytest.mark.skipif(cuda_compiler() is None or disassembler() is None, reason="needs nvcc or NVRTC, and cuobjdump")
def test_machine_code(program: Any) -> None:
    (code,) = inspect_program(program[0], TARGET.gpu)
    assert code.shapes == ("HGMMA.64x128x16.F32",)
    assert (code.spills, code.stack) == (0, 0)
    assert code.instructions["LDGSTS"] > 0
    assert code.uses_tensor_cores
    assert code.macs > 0


def test_what_is_not_whole_tiles_is_left_to_mma() -> None:
    from tvm import tirx

    from tvmx.pipeline import run_phases
    from tvmx.schedule import Workload, rules_for

    for case in (
        Product((120, 128), (128, 128)),
        Product((128, 96), (96, 128)),
        Product((128, 128), (128, 128), "int8"),
    ):
        mod = run_phases(case.module(), TARGET)
        (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
        assert "cuda.wgmma" not in [r.name for r in rules_for(Workload.of(func), TARGET)]
