"""Programs with data-dependent shapes run through the Relax VM behind the same class."""

from __future__ import annotations

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
