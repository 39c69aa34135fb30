"""Programs with data-dependent shapes run through the Relax VM behind the same class."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from tests.executor.programs import FakeModel, lowered
from tvmx.errors import CompileError, InputError
from tvmx.executor import EntryProgram, build_artifact
from tvmx.graph import NotStraightLine, from_relax
from tvmx.runtime import GraphExecutor, TensorInfo
from tvmx.target import resolve


@dataclass(frozen=True)
class _Dim:
    min: int
    max: int | None


def _head_program():
    """`y = relu(x)[0:count]` with a count that only the run knows."""
    from tvm import relax

    def body(b, x, count):
        def int64(*values):
            return relax.const(np.array(values, "int64"), "int64")  # const() narrows without the dtype

        return b.emit(relax.op.dynamic_strided_slice(b.emit(relax.op.nn.relu(x)), int64(0), count, int64(1)))

    mod = lowered([("x", (8,), "float32"), ("count", (1,), "int64")], body)
    with pytest.raises(NotStraightLine) as reason:
        from_relax(mod, ["x", "count"], ["y"])
    model = FakeModel(
        inputs=(TensorInfo("x", (8,), "float32"), TensorInfo("count", (1,), "int64")),
        outputs=(TensorInfo("y", ("n",), "float32"),),
    )
    return EntryProgram("main", model, None, mod, {}, str(reason.value))


def _program(entry="main"):
    from tvm import relax

    def body(b, x):
        return b.emit(relax.op.nonzero(b.emit(relax.op.nn.relu(x))))

    mod = lowered([("x", ("N", 4), "float32")], body)
    with pytest.raises(NotStraightLine) as reason:
        from_relax(mod, ["x"], ["where"])
    model = FakeModel(
        inputs=(TensorInfo("x", ("N", 4), "float32"),),
        outputs=(TensorInfo("where", (2, "found"), "int64"),),
        bounds={"N": _Dim(1, 8)},
    )
    return EntryProgram(entry, model, None, mod, {}, str(reason.value))


def test_data_dependent_shape_runs_and_says_why(tmp_path):
    target = resolve("native", 2)
    result = build_artifact([_program()], target, tmp_path / "m.so")
    assert result.report["executor"] == "vm"
    with GraphExecutor(result.path, threads=2) as ex:
        assert ex.manifest.reason == result.report["reason"]
        for n in (3, 8, 1):
            x = np.random.default_rng(n).standard_normal((n, 4)).astype("float32")
            got = ex({"x": x})["where"]
            np.testing.assert_array_equal(got, np.nonzero(np.maximum(x, 0)))
        with pytest.raises(InputError, match="1 to 8"):
            ex({"x": np.zeros((9, 4), "float32")})


def test_entries_of_vm_programs_are_refused(tmp_path):
    with pytest.raises(CompileError, match="file of its own"):
        build_artifact([_program("a"), _program("b")], resolve("native", 1), tmp_path / "m.so")


_RUN = """
import sys, numpy as np
from tvmx.runtime import GraphExecutor
with GraphExecutor(sys.argv[1], threads=2) as ex:
    for count in (3, 8, 0, 5):
        x = np.arange(8, dtype="float32") - 2
        y = ex({"x": x, "count": np.array([count])})["y"]
        assert np.array_equal(y, np.maximum(x, 0)[:count]), y
assert not [m for m in sys.modules if m == "tvm" or m.startswith("tvm.")]
"""


def test_the_vm_runs_without_the_compiler(tmp_path):
    path = build_artifact([_head_program()], resolve("native", 2), tmp_path / "m.so").path
    subprocess.run([sys.executable, "-c", _RUN, str(path)], check=True)


def test_a_function_that_only_python_provides_is_named(tmp_path):
    path = build_artifact([_program()], resolve("native", 2), tmp_path / "m.so").path
    code = "import sys; from tvmx.runtime import GraphExecutor; GraphExecutor(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "relax.run.nonzero, which only TVM's Python package provides" in done.stderr
