"""Every planner on random problems with aliases, pins, alignments, zero sizes and lives of one instant."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tvmx.errors import PlanError
from tvmx.memory import Buffer, Problem, engine, plan, validate
from tvmx.memory.planner import PLANNERS
from tvmx.memory.problem import INPLACE, VIEW

free = st.tuples(
    st.integers(-3, 20),
    st.sampled_from([1, 1, 2, 3, 9, 25]),
    st.sampled_from([0, 1, 7, 64, 100, 4096]),
    st.sampled_from([1, 3, 16, 64]),
    st.one_of(st.none(), st.none(), st.integers(0, 40)),
)
sharer = st.tuples(st.sampled_from(["reshape", "slot", "inplace"]), st.integers(0, 99), st.integers(1, 6))


@st.composite
def problems(draw):
    """Free and pinned buffers, and some that share the storage of one of them."""
    buffers = []
    for i, (start, life, size, align, pin) in enumerate(draw(st.lists(free, min_size=1, max_size=24))):
        offset = None if pin is None else pin * align * 16
        buffers.append(Buffer(f"b{i}", (start, start + life), size, align, offset))
    roots = dict(enumerate(buffers))
    for i, (kind, which, life) in enumerate(draw(st.lists(sharer, max_size=8))):
        if not roots:
            break
        owner = roots.pop(sorted(roots)[which % len(roots)])
        if kind == "inplace":
            buffers.append(
                Buffer(f"i{i}", (owner.end - 1, owner.end + life), owner.size, 1, None, owner.id, 0, INPLACE)
            )
            if owner.end - owner.start == 1:
                buffers.pop()
        elif kind == "reshape":
            buffers.append(Buffer(f"v{i}", (owner.end, owner.end + life), owner.size, 1, None, owner.id, 0, VIEW))
        else:
            half = owner.size // 2
            buffers.append(Buffer(f"s{i}", (owner.start - life, owner.start + 1), half, 1, None, owner.id, half, VIEW))
    return Problem(draw(st.permutations(buffers)))


def planned(problem, planner):
    """The plan, or none where random pins contradict each other."""
    try:
        return plan(problem, planner=planner, budget_s=0.0005)
    except PlanError:
        if all(b.offset is None for b in problem):
            raise
        return None


@pytest.mark.parametrize("core", ["c", "python"])
@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_every_plan_is_valid_and_not_below_its_bound(core, planner, problem):
    assume(core == "python" or engine.engine_name() == "c")
    with pytest.MonkeyPatch.context() as patch:
        if core == "python":
            patch.setattr(engine, "_core", None)
        solution = planned(problem, planner)
        if solution is not None:
            assert solution.engine == core
            validate(problem, solution)
            assert solution.height >= solution.lower_bound
