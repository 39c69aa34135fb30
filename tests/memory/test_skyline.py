"""Plans by chains on the skyline: valid, the same without the core, near the bound where very many blocks meet."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_problems import GENERATORS, coarse, crowd, together
from tvmx.memory import Buffer, Problem, engine, fallback, fallback_skyline, plan
from tvmx.memory.blocks import lower_bound, merge
from tvmx.memory.boxes import boxes
from tvmx.memory.components import component, components
from tvmx.memory.restarts import Budget
from tvmx.memory.skyline import chained

needs_core = pytest.mark.skipif(
    engine.engine_name() != "c", reason="the compiled core is not built: python setup.py build_ext -i"
)
rows = st.lists(
    st.tuples(
        st.integers(0, 12), st.integers(1, 8), st.integers(1, 40), st.sampled_from([1, 2, 3, 8]), st.integers(1, 9)
    ),
    min_size=1,
    max_size=40,
)


def columns_of(rows):
    """Start, end, size, alignment, score as the core takes them."""
    rows = sorted((start, start + life, -score, size, align) for start, life, size, align, score in rows)
    start, end, score, size, align = (np.array(c) for c in zip(*rows))
    int32s = start.astype(np.int32), end.astype(np.int32)
    return (*int32s, size.astype(np.int64), align.astype(np.int64), -score.astype(np.float64))


@settings(max_examples=200, deadline=None)
@given(rows, st.sampled_from([0.0, 0.3, 1e9]), st.sampled_from([0.0, 1.0]))
def test_no_two_blocks_overlap_and_the_core_plans_like_python(rows, waste, flush):
    start, end, size, align, score = columns_of(rows)
    status, _, offsets = fallback_skyline.skyline(start, end, size, align, score, waste, flush, 10**9)
    assert status == engine.SOLVED
    assert not (offsets % align).any()
    for i in range(len(start)):
        meets = (start < end[i]) & (end > start[i]) & (offsets < offsets[i] + size[i]) & (offsets + size > offsets[i])
        assert meets.sum() == 1
    if engine.engine_name() == "c":
        same, _, again = engine.skyline(start, end, size, align, score, waste, flush, 10**9)
        assert same == status
        assert again.tolist() == offsets.tolist()


@pytest.mark.parametrize(
    "skyline",
    [pytest.param(engine.skyline, marks=needs_core, id="core"), pytest.param(fallback_skyline.skyline, id="python")],
)
def test_a_plan_that_takes_too_many_steps_is_given_up(skyline):
    blocks = merge(crowd(300))
    part = component(blocks, components(blocks)[0], 1 << 30)
    order = np.lexsort((part.end, part.start))
    columns = part.start[order], part.end[order], part.size[order].astype(np.int64), part.align[order].astype(np.int64)
    assert skyline(*columns, np.ones(len(order)), 1.0, 0.0, 10)[0] == engine.OUT_OF_STEPS


@needs_core
def test_core_refuses_blocks_that_are_not_sorted():
    one = np.ones(2, dtype=np.int64)
    start, end = np.array([1, 0], dtype=np.int32), np.array([2, 1], dtype=np.int32)
    with pytest.raises(ValueError, match="not sorted"):
        engine.skyline(start, end, one, one, np.ones(2), 1.0, 0.0, 100)


def test_chains_fill_a_coarse_grid():
    blocks = merge(coarse(2000))
    part = component(blocks, components(blocks)[0], 1 << 22)
    bound = lower_bound(blocks)
    found = chained(part, part.units_below(bound), 0, 10**6, Budget.of(10))
    assert found is not None
    assert int((found + part.size).max()) * part.unit <= 1.05 * bound


@needs_core
@pytest.mark.parametrize("name", ["coarse", "crowd", "together", "nested", "instants"])
def test_large_crowds_are_planned_near_the_bound(name):
    solution = plan(GENERATORS[name](6000, 0))
    assert solution.height <= 1.05 * solution.lower_bound


@needs_core
def test_same_seed_gives_the_same_large_plan():
    problem = coarse(4500)
    first, again = (plan(problem, budget_s=0.1, seed=7) for _ in range(2))
    assert first.offsets == again.offsets
    assert first.steps == again.steps


def test_lowest_first_ends_where_all_live_together(monkeypatch):
    monkeypatch.setattr(fallback, "LOOKS", 50)
    monkeypatch.setattr(fallback, "LOOKS_PER_BLOCK", 1)
    blocks = merge(together(400))
    part = component(blocks, components(blocks)[0], 1 << 40)
    rank = np.arange(len(part.size), dtype=np.int32)
    wide = part.size.astype(np.int64)
    offsets = fallback.stack(part.start, part.end, wide, part.align.astype(np.int64), rank)
    for i in range(len(wide)):
        meets = (part.start < part.end[i]) & (part.end > part.start[i])
        assert (meets & (offsets < offsets[i] + wide[i]) & (offsets + wide > offsets[i])).sum() == 1


def test_boxes_end_where_thousands_meet_at_one_instant():
    spans = [(0, 1)] * 1500 + [(1, 2)] * 1500
    blocks = merge(Problem(Buffer(str(i), life, 1 + i % 7, 1) for i, life in enumerate(spans)))
    joined = component(blocks, np.arange(len(blocks)), 1 << 20)
    for level in boxes(joined):
        assert len(level.part.size) < len(blocks)
