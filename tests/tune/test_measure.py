"""Builds and runs in worker processes: times, wrong outputs, and each kind of failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te
from tvm.script import tirx as T

from tests.tune.helpers import matmul
from tvmx.compat import fast_stack
from tvmx.errors import ConfigError, TuneError
from tvmx.pipeline import run_phases
from tvmx.schedule import apply_default
from tvmx.target import Target
from tvmx.tune.measure import Built, MeasureConfig, Measurer, signature
from tvmx.tune.run_arrays import aligned, difference, random_array
from tvmx.tune.run_cpu import Packed
from tvmx.tune.space import spaces_for
from tvmx.tune.task import Task, extract_tasks

INF = float("inf")

with fast_stack():

    @T.prim_func(s_tir=True)
    def copy(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in range(16):
            with T.sblock("copy"):
                v = T.axis.spatial(16, i)
                B[v] = A[v]

    @T.prim_func(s_tir=True)
    def twice(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in range(16):
            with T.sblock("copy"):
                v = T.axis.spatial(16, i)
                B[v] = A[v] * T.float32(2)

    @T.prim_func(s_tir=True)
    def forgets(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in range(15):
            with T.sblock("copy"):
                v = T.axis.spatial(15, i)
                B[v] = A[v]

    @T.prim_func(s_tir=True)
    def overlaps(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for task in T.parallel(4):  # each writes the next one's first element too, which the next one mends in time
            for i in range(5):
                if task * 4 + i < 16:
                    B[task * 4 + i] = T.if_then_else(i < 4, A[task * 4 + i], T.float32(-7))

    @T.prim_func(s_tir=True)
    def aborts(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        T.evaluate(T.call_extern("int32", "abort"))
        B[0] = A[0]

    @T.prim_func(s_tir=True)
    def sleeps(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        T.evaluate(T.call_extern("int32", "sleep", 60))
        B[0] = A[0]

    @T.prim_func(s_tir=True)
    def unbuildable(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32")):
        for i in T.thread_binding(16, thread="threadIdx.x"):  # there is no such thing on a CPU
            with T.sblock("copy"):
                v = T.axis.spatial(16, i)
                B[v] = A[v]


@pytest.fixture(scope="module")
def measurer(target: Target) -> Iterator[Measurer]:
    config = MeasureConfig(run_timeout_s=2.0, repeat=3, min_repeat_ms=0.2, compare_rounds=3, builders=1)
    with Measurer(target, config) as measurer:
        yield measurer


@pytest.fixture(scope="module")
def reference(measurer: Measurer) -> Built:
    return measurer.build([copy])[0]


def outcome(measurer: Measurer, reference: Built, func: Any) -> tuple[str, str]:
    built = measurer.build([func])[0]
    if built.path is None:
        return built.status, built.error
    result = measurer.trial(copy, reference, built, INF)
    return result.status, result.error


def test_times_are_positive_and_as_many_as_asked_for(measurer: Measurer) -> None:
    func = matmul()
    built = measurer.build([func])[0]
    result = measurer.trial(func, built, built, INF)
    assert result.status == "OK", result.error
    assert len(result.samples[0]) == 3
    assert all(0 < s < 0.1 for s in result.samples[0])
    slow = measurer.trial(func, built, built, 1e-9)
    assert len(slow.samples[0]) == 1  # given up after one look
    both = measurer.compare(func, [built, built], seed=3)
    assert [len(s) for s in both.samples] == [3, 3]


@pytest.mark.parametrize(
    ("func", "status", "words"),
    [
        (twice, "WRONG_OUTPUT", "max abs error"),
        (forgets, "WRONG_OUTPUT", ""),
        (aborts, "RUN_CRASH", "SIGABRT"),
        (sleeps, "RUN_TIMEOUT", "no answer"),
        (unbuildable, "BUILD_ERROR", ""),
    ],
)
def test_failures_are_told_apart(measurer: Measurer, reference: Built, func: Any, status: str, words: str) -> None:
    got, error = outcome(measurer, reference, func)
    assert got == status, error
    assert words in error
    assert outcome(measurer, reference, copy)[0] == "OK"  # the next one does not suffer


def test_compare_finds_a_wrong_output(measurer: Measurer, reference: Built) -> None:
    wrong = measurer.build([twice])[0]
    assert measurer.compare(copy, [reference, wrong], seed=1).status == "WRONG_OUTPUT"


def test_tasks_that_overlap_are_found_each_time(target: Target) -> None:
    with Measurer(replace(target, threads=2), MeasureConfig(builders=1, repeat=1)) as measurer:
        reference = measurer.build([copy])[0]
        for _ in range(5):
            got, error = outcome(measurer, reference, overlaps)
            assert got == "WRONG_OUTPUT", error


@pytest.mark.parametrize("rows", [32, 40])
def test_tiles_that_the_lanes_do_not_divide_are_right(target: Target, rows: int) -> None:
    """Such tiles are drawn: the epilogue of a parallel task must keep to its own columns."""
    two = replace(target, threads=2)
    func = next(t.func for t in extract_tasks(product(rows, 48, 1024, two)))
    (space,) = [s for s in spaces_for(Task("matmul", "", func, 1, 1), two) if s.name == "cpu.matmul"]
    others = space.given[:-1]
    with Measurer(two, MeasureConfig(builders=1, repeat=1)) as measurer:
        reference = measurer.build([apply_default(func, two).func])[0]
        for columns in (12, 24):
            candidate = space.candidate([*others, [48 // columns, 1, columns]])
            built = measurer.build([candidate.func])[0]
            assert measurer.trial(func, reference, built, INF).status == "OK"


def product(rows: int, columns: int, depth: int, target: Target) -> Any:
    """relu(x · constant) after all phases."""
    from tvm import relax

    x = relax.Var("x", relax.TensorType((rows, depth), "float32"))
    weight = relax.const(np.ones((depth, columns), np.float32))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, weight))))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return run_phases(builder.get(), target)


def test_build_timeout(target: Target) -> None:
    with Measurer(target, MeasureConfig(build_timeout_s=1e-4, builders=1)) as measurer:
        assert measurer.build([copy])[0].status == "BUILD_TIMEOUT"


def test_nothing_is_left_behind(target: Target) -> None:
    with Measurer(target, MeasureConfig(builders=1)) as measurer:
        path = measurer.build([copy])[0].path
        assert path is not None
        assert path.exists()
    assert not Path(path.parent).exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_parallel_kernels_run_with_the_targets_threads(tmp_path: Path, target: Target, threads: int) -> None:
    """A parallel loop writes each iteration's number of tasks: with n threads the work is cut into n tasks."""
    import dataclasses

    from tvmx.tune.run_cpu import Kernel

    n = 1 << 12
    a = te.placeholder((n,), name="a")
    func = te.create_prim_func([a, te.compute((n,), lambda i: a[i] + 1.0, name="b")])
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": func}))
    sch.parallel(sch.get_loops(sch.get_sblock("b"))[0])
    with Measurer(dataclasses.replace(target, threads=threads), MeasureConfig(builders=1)) as measurer:
        built = measurer.build([sch.mod["main"]])[0]
        before = len(list(Path("/proc/self/task").iterdir()))
        kernel = Kernel(str(built.path), threads)
        during = len(list(Path("/proc/self/task").iterdir()))
        x, y = aligned((n,), np.dtype("float32")), aligned((n,), np.dtype("float32"))
        kernel(Packed([x, y], ["float32", "float32"]))
        kernel.close()
    assert during - before == threads - 1
    np.testing.assert_array_equal(y, x + 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_arrays_are_aligned_and_packed(dtype: str, shape: tuple[int, ...]) -> None:
    array = random_array(np.random.default_rng(0), shape, dtype, positive=False)
    assert array.ctypes.data % 64 == 0
    packed = Packed([array], [dtype])
    assert packed.tensors[0].bits == 8 * array.itemsize
    assert difference(array, array.copy(), dtype) == ""


def test_difference_by_dtype() -> None:
    want = np.linspace(-1, 1, 4000, dtype=np.float32)
    assert difference(want + np.float32(5e-5), want, "float32") == ""
    assert "max abs error" in difference(want + np.float32(1e-3), want, "float32")
    bad = want.copy()
    bad[3] = np.nan
    assert difference(bad, want, "float32")
    assert difference(bad, bad, "float32") == ""
    whole = np.arange(4000, dtype=np.int32)
    assert "1 of 4000" in difference(np.where(whole == 7, 8, whole).astype(np.int32), whole, "int32")
    small = (whole % 100).astype(np.int8)
    off_by_one = small.copy()
    off_by_one[5] += 1
    assert difference(off_by_one, small, "int8") == ""  # a rounding at the midpoint
    off_by_one[:100] += 1
    assert difference(off_by_one, small, "int8")


def test_signature() -> None:
    assert signature(matmul(4, 5, 6)) == ([[[4, 6], "float32"], [[6, 5], "float32"], [[4, 5], "float32"]], [2])
    n = te.var("n")
    a = te.placeholder((n,), name="a")
    with pytest.raises(TuneError, match="static shape"):
        signature(te.create_prim_func([a, te.compute((n,), lambda i: a[i] + 1.0)]))


@pytest.mark.parametrize("change", [{"cache": "warm"}, {"repeat": 0}, {"run_timeout_s": 0.0}, {"builders": -1}])
def test_wrong_options(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        MeasureConfig(**change)
