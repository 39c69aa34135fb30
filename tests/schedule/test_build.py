"""What kernels go through before TVM's own pipeline."""

from __future__ import annotations

import pytest

from tvmx.schedule.build import UNROLL_EXPLICIT, UNROLL_STEP, mark_predicates
from tvmx.schedule.tir import walk


@pytest.mark.parametrize("explicit", [0, 1])
def test_loops_that_llvm_may_unroll_are_plain(explicit):
    import tvm
    from tvm import te, tirx
    from tvm.s_tir import Schedule

    x = te.placeholder((8, 4), name="x")
    func = te.create_prim_func([x, te.compute((8, 4), lambda i, j: x[i, j] * 2, name="y")])
    sch = Schedule(tvm.IRModule({"main": func}))
    outer, inner = sch.get_loops(sch.get_sblock("y"))
    sch.unroll(inner)
    sch.annotate(outer, UNROLL_STEP, 16)
    sch.annotate(outer, UNROLL_EXPLICIT, explicit)
    kinds, notes = [], []

    def visit(loop):
        kinds.append(loop.kind)
        notes.extend(loop.annotations)

    walk(mark_predicates(sch.mod)["main"].body, tirx.For, visit)
    assert (tirx.ForKind.UNROLLED in kinds) == bool(explicit)
    assert (UNROLL_STEP in notes) == bool(explicit)
