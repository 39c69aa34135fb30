"""The Tensor Core schedule as a tuning space: other decisions replay, and compute the same."""

from __future__ import annotations

import numpy as np
import pytest

from tests.schedules.cuda.products import Convolution, Product
from tvmx.debug.emulate import compiler, emulate
from tvmx.target import PRESETS

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")


@pytest.mark.parametrize(
    ("preset", "case"),
    [
        ("cuda-sm86", Convolution((1, 8, 8, 32), 64, (3, 3), pads=(1, 1, 1, 1))),
        ("cuda-sm75", Product((96, 64), (64, 96), dtype="int8")),
    ],
)
def test_random_points_of_the_space_are_right(preset: str, case: Product | Convolution) -> None:
    from tvm import relax, tirx

    from tvmx.pipeline import run_phases
    from tvmx.tune.space import spaces_for
    from tvmx.tune.task import extract_tasks

    target = PRESETS[preset]
    mod = run_phases(case.module(), target)
    (task,) = extract_tasks(mod)
    spaces = spaces_for(task, target)
    assert spaces[0].name == ("cuda.wmma" if preset == "cuda-sm75" else "cuda.mma")
    assert all(s.name.startswith("cuda.") for s in spaces)
    space = spaces[0]
    assert len(space.choices) >= 3, "tiles of m, n and k"
    call = mod["main"].body.blocks[0].bindings[0].value
    given = iter(case.inputs())
    args = [next(given) if isinstance(a, relax.Var) else a.value.numpy() for a in call.args[1].fields]
    seen = set()
    for seed in range(3):
        candidate = space.candidate([None] * len(space.choices) if seed else space.given, seed)
        assert candidate is not None
        seen.add(candidate.key)
        assert isinstance(candidate.func, tirx.PrimFunc)
        done = emulate(candidate.func, target, args)
        np.testing.assert_array_equal(done.outputs[0].astype("float64"), case.reference())
        assert done.conflicts == 0
    assert len(seen) > 1
