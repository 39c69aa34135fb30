"""The emulator finds what is planted, and passes what is right."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from tvmx.compat import load_tensor_intrinsics
from tvmx.cuda.lower import DeviceProgram, lower_kernel
from tvmx.debug.emulate import KernelFault, compiler, run_program, run_serial
from tvmx.debug.emulate.source import parse_asm, to_cpp, translate
from tvmx.errors import CompileError, InputError
from tvmx.target import PRESETS

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")

TARGET = PRESETS["cuda-sm80"]


@pytest.fixture(scope="module")
def program() -> DeviceProgram:
    """relu(a @ b) with f16 operands, a pipeline of async copies, four warps."""
    return lower_kernel(scheduled(), TARGET)


def scheduled():
    load_tensor_intrinsics()
    from tvm import te

    from tvmx.passes.legalize import gemm_te
    from tvmx.passes.legalize.gemm_model import Tile
    from tvmx.schedule import Workload, apply_rule, rules_for

    a, b = te.placeholder((1, 60, 96), "float16", "a"), te.placeholder((1, 64, 96), "float16", "b")
    p = gemm_te.Gemm(1, 60, 64, 96, Tile(64, 64, 32, 2, 2, 2), "float32", 8, 8)

    def rows(g, i, j):
        return [i < 60], a[g, i, j]

    c = gemm_te.product(rows, gemm_te.packed(b), "float16", True, p)
    func = te.create_prim_func([a, b, gemm_te.unpack(c, (1, 60, 64), p, "float32")])
    return apply_rule(rules_for(Workload.of(func), TARGET)[0], func, TARGET).func


def arrays():
    rng = np.random.default_rng(3)
    return [(rng.integers(-4, 5, s) / 4).astype("float16") for s in ((1, 60, 96), (1, 64, 96))]


def expected():
    a, b = arrays()
    return a.astype("float32") @ b.astype("float32").swapaxes(1, 2)


def broken(program: DeviceProgram, old: str, new: str, count: int = 1) -> DeviceProgram:
    head, body = program.source.split('extern "C"', 1)
    found = re.search(old, body)
    assert found, f"the kernel has no {old}"
    return replace(program, source=head + 'extern "C"' + re.sub(old, new, body, count=count))


@pytest.mark.parametrize("reverse", [False, True])
def test_right_kernel_is_exact_and_conflict_free(program: DeviceProgram, reverse: bool) -> None:
    done = run_program(program, arrays(), reverse)
    np.testing.assert_array_equal(done.outputs[0], expected())
    assert done.conflicts == 0
    # 3 steps of 64 × 32 elements of each operand, 8 to a copy
    assert done.copies == 3 * 2 * 64 * 32 // 8
    # 4 × 4 fragments, 96 / 16 steps, two m16n8k16 each
    assert done.mmas == 4 * 4 * 6 * 2


def test_a_missing_barrier_is_a_race(program: DeviceProgram) -> None:
    barriers = program.source.split('extern "C"', 1)[1].count("__syncthreads();")
    assert barriers >= 4
    for which in range(barriers):
        head, body = program.source.split('extern "C"', 1)
        pieces = body.split("__syncthreads();")
        joined = "__syncthreads();".join(pieces[: which + 1]) + ";" + "__syncthreads();".join(pieces[which + 1 :])
        with pytest.raises(KernelFault, match=r"race|in flight"):
            run_program(replace(program, source=head + 'extern "C"' + joined), arrays())


def test_a_missing_wait_is_seen(program: DeviceProgram) -> None:
    name = re.search(r"void (tvm_builtin_ptx_cp_async_wait_group\w*_0)\(\)", program.source)[1]
    with pytest.raises(KernelFault, match="in flight"):
        run_program(broken(program, rf"{name}\(\);", ";"), arrays())


def test_a_wrong_lane_map_gives_wrong_numbers(program: DeviceProgram) -> None:
    # Lanes 16-31 of ldmatrix must address the right half of the fragment.
    wrong = broken(program, r"\(\(\(\(int\)threadIdx\.x\) >> 4\) \* 8\)", "0", count=0)
    done = run_program(wrong, arrays())
    assert np.abs(done.outputs[0] - expected()).max() > 1


def test_a_store_past_the_end_is_seen(program: DeviceProgram) -> None:
    # The bound check of the last rows: 60 of 64 exist.
    head, body = program.source.split('extern "C"', 1)
    body, n = re.subn(r"< 15\)", "< 16)", body)
    if n == 0:
        body, n = re.subn(r"< 60\)", "< 64)", body)
    assert n, "a bound check"
    with pytest.raises(KernelFault, match=r"offset .* of argument"):
        run_program(replace(program, source=head + 'extern "C"' + body), arrays())


KERNEL = """
#define uint unsigned int
#endif
extern "C" __global__ void __launch_bounds__(64) k(float* __restrict__ a, float* __restrict__ b) {
  __shared__ float s[64];
  BODY
}
"""


def tiny(body: str, threads: int = 64) -> DeviceProgram:
    from tvmx.cuda.lower import Argument, Launch

    a, b = Argument(0, "float32", (64,)), Argument(1, "float32", (64,))
    return DeviceProgram("k", KERNEL.replace("BODY", body), (Launch("k", (a, b), (1, 1, 1), (threads, 1, 1)),), (a, b))


FAULTS = {
    "barrier in a branch": ("if (threadIdx.x < 32) __syncthreads(); b[threadIdx.x] = a[threadIdx.x];", "barrier"),
    "read of nothing": ("b[threadIdx.x] = s[threadIdx.x];", "nobody wrote"),
    "neighbour": ("s[threadIdx.x] = 1; b[threadIdx.x] = s[63 - threadIdx.x];", "no barrier between|nobody wrote"),
    "two writers": ("b[threadIdx.x / 2] = a[threadIdx.x];", "another thread"),
    "far away": ("b[threadIdx.x] = a[threadIdx.x + (1 << 28)];", "no tensor"),
    "before the start": ("b[threadIdx.x] = a[(int)threadIdx.x - 1];", "offset -4"),
    "misaligned": ("((float2*)b)[0] = *(float2*)(a + 1);", "past a multiple"),
    "shared overrun": ("s[threadIdx.x + 1] = 1;", "of shared memory"),
    "half a warp": ("if (threadIdx.x % 32 < 16) b[threadIdx.x] = __shfl_xor_sync(~0u, a[0], 1);", "warp operation"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    body, reason = FAULTS[name]
    with pytest.raises(KernelFault, match=reason):
        run_program(tiny(body), [np.arange(64, dtype="float32")])


def test_barriers_and_shuffles_work() -> None:
    x = np.arange(64, dtype="float32")
    body = "s[threadIdx.x] = a[threadIdx.x]; __syncthreads(); b[threadIdx.x] = s[63 - threadIdx.x];"
    np.testing.assert_array_equal(run_program(tiny(body), [x]).outputs[0], x[::-1])
    body = "b[threadIdx.x] = __shfl_down_sync(~0u, a[threadIdx.x], 1);"
    shifted = run_program(tiny(body), [x]).outputs[0]
    np.testing.assert_array_equal(shifted, np.r_[x[1:32], 31, x[33:], 63])


def test_unknown_ptx_is_named() -> None:
    with pytest.raises(KernelFault, match="does not know this instruction: tcgen05"):
        run_program(tiny('asm volatile("tcgen05.fence::before_thread_sync;");'), [np.zeros(64, "float32")])
    assert "tvmx_cp_wait(2)" in translate(parse_asm('"cp.async.wait_group 2;" ::: "memory"'))
    with pytest.raises(CompileError, match="prelude"):
        to_cpp("__global__ void k() {}")


def test_inputs_are_checked(program: DeviceProgram) -> None:
    with pytest.raises(InputError, match="takes float16"):
        run_program(program, [np.zeros((1, 60, 95), "float16"), arrays()[1]])


def test_serial_run_of_an_untensorised_schedule() -> None:
    import tvm
    from tvm import te
    from tvm.s_tir import Schedule

    a = te.placeholder((8, 12), "float32", "a")
    func = te.create_prim_func([a, te.compute((8, 12), lambda i, j: a[i, j] * 2, "double")])
    sch = Schedule(tvm.IRModule({"main": func}))
    block = sch.get_sblock("double")
    read = sch.cache_read(block, 0, "shared")
    i, j = sch.get_loops(block)
    sch.bind(i, "blockIdx.x")
    sch.compute_at(read, i)
    sch.bind(j, "threadIdx.x")
    x = np.random.default_rng(0).standard_normal((8, 12)).astype("float32")
    np.testing.assert_array_equal(run_serial(sch.mod["main"], [x])[0], x * 2)
    with pytest.raises(CompileError, match="emulate"):
        run_serial(scheduled(), arrays())
