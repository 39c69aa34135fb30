"""Stream plans: dependencies kept whatever the device does, fast by the simulator, memory shared only where ordered."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvmx.errors import PlanError
from tvmx.executor.stream_check import Region, check_plan
from tvmx.executor.stream_memory import Use, plan_arena, regions_of
from tvmx.executor.streams import (
    Step,
    StreamPlan,
    Task,
    critical_path,
    issue,
    lower_bound,
    plan_streams,
    simulate,
)

US = 1e-6


def chain(length: int, share: float = 0.25) -> list[Task]:
    return [Task(f"t{i}", 10 * US, share, (i - 1,) if i else ()) for i in range(length)]


def fork_join(width: int, length: int, share: float = 0.25, seconds: float = 30 * US) -> list[Task]:
    tasks, ends = [Task("source", seconds, share)], []
    for branch in range(width):
        last = 0
        for i in range(length):
            tasks.append(Task(f"{branch}.{i}", seconds, share, (last,)))
            last = len(tasks) - 1
        ends.append(last)
    return [*tasks, Task("join", seconds, share, tuple(ends))]


def inception(blocks: int) -> list[Task]:
    """Four branches of 1, 2, 3 and 2 convolutions of unequal cost, joined by a concat, block after block."""
    tasks, last = [Task("stem", 60 * US, 0.4)], 0
    for block in range(blocks):
        ends = []
        for branch, costs in enumerate(((40,), (25, 80), (20, 40, 40), (10, 30))):
            at = last
            for i, cost in enumerate(costs):
                tasks.append(Task(f"b{block}.{branch}.{i}", cost * US, 0.25, (at,)))
                at = len(tasks) - 1
            ends.append(at)
        tasks.append(Task(f"b{block}.concat", 15 * US, 0.5, tuple(ends)))
        last = len(tasks) - 1
    return tasks


def transformer(layers: int) -> list[Task]:
    """Layers with parallel Q, K and V products, then a chain."""
    tasks, last = [Task("embed", 10 * US, 0.3)], 0
    for layer in range(layers):
        heads = []
        for name in "qkv":
            tasks.append(Task(f"l{layer}.{name}", 30 * US, 0.3, (last,)))
            heads.append(len(tasks) - 1)
        for i, name in enumerate(("scores", "softmax", "mix", "out", "norm", "up", "down", "norm2")):
            tasks.append(
                Task(f"l{layer}.{name}", (12 + 5 * i) * US, 0.6, tuple(heads) if i == 0 else (len(tasks) - 1,))
            )
        last = len(tasks) - 1
    return tasks


def dag(seed: int, count: int = 100, share: float = 0.25) -> list[Task]:
    chance = random.Random(seed)
    return [
        Task(
            f"t{i}", chance.uniform(20, 100) * US, share,
            tuple(sorted({chance.randrange(max(0, i - 12), i) for _ in range(chance.randrange(3))})) if i else (),
        )
        for i in range(count)
    ]  # fmt: skip


GRAPHS = {
    "chain": chain(40),
    "fork-join 4": fork_join(4, 10),
    # source and join run alone: with short branches that is more than 5 % over the load bound for any plan
    "fork-join 7": fork_join(7, 40),
    "inception": inception(6),
    "transformer": transformer(6),
    **{f"random {seed}": dag(seed) for seed in range(4)},
}


def uses_of(tasks: list[Task]) -> list[Use]:
    """A buffer a task, read by all that depend on it."""
    return [
        Use(f"b{i}", 64 * (1 + i * 7 % 11), (i,), tuple(j for j, t in enumerate(tasks) if i in t.after))
        for i in range(len(tasks))
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_time_is_near_the_bound(name: str) -> None:
    tasks = GRAPHS[name]
    plan = plan_streams(tasks, max_streams=4)
    check_plan(tasks, plan)
    time = simulate(tasks, plan).makespan
    assert time <= sum(t.seconds for t in tasks) * (1 + 1e-9)
    assert time <= 1.05 * lower_bound(tasks, 4), f"{time / lower_bound(tasks, 4):.3f} of the bound"


def test_no_stream_is_added_that_brings_nothing() -> None:
    assert plan_streams(chain(20)).streams == 1
    full = fork_join(4, 5, share=1.0)  # each kernel fills the device
    assert plan_streams(full).streams == 1
    assert plan_streams(full).events == 0
    assert plan_streams(fork_join(2, 8), max_streams=4).streams == 2
    assert plan_streams(fork_join(4, 8), max_streams=1).streams == 1


def test_streams_cost_events_only_where_streams_meet() -> None:
    plan = plan_streams(fork_join(3, 6), max_streams=3)
    waits = [s for s in plan.steps if s.what == "wait"]
    assert plan.streams == 3
    assert len(waits) == 4, "the two other streams wait for the source, the join for them"


def test_an_implied_dependency_gets_no_event() -> None:
    # c on the other stream depends on b and, through it, on a
    tasks = [Task("a", US), Task("b", US, after=(0,)), Task("c", US, after=(0, 1))]
    plan = issue(tasks, [0, 1, 2], [0, 0, 1], 2)
    assert [s for s in plan.steps if s.what == "wait"] == [Step("wait", 1, 0), Step("wait", 0, 1)]
    check_plan(tasks, plan)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 5), st.sampled_from([0.1, 0.4, 1.0]))
def test_random_plans_hold(seed: int, count: int, streams: int, share: float) -> None:
    tasks = dag(seed, count, share)
    plan = plan_streams(tasks, streams)
    uses = uses_of(tasks)
    arena = plan_arena(uses, plan, budget_s=0.05)
    check_plan(tasks, plan, regions_of(uses, arena.offsets))
    assert plan.streams <= streams
    assert arena.height >= arena.lower_bound
    line = simulate(tasks, plan)
    assert line.makespan <= sum(t.seconds for t in tasks) * (1 + 1e-9)
    assert line.makespan >= critical_path(tasks) * (1 - 1e-9)
    for index, task in enumerate(tasks):
        assert all(line.ends[a] <= line.starts[index] + 1e-12 for a in task.after)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_every_missing_event_is_seen(seed: int) -> None:
    tasks = dag(seed, 24)
    # any assignment at all, not only good ones
    chance = random.Random(seed)
    plan = issue(tasks, range(len(tasks)), [chance.randrange(3) for _ in tasks], 3)
    check_plan(tasks, plan)
    for at, step in enumerate(plan.steps):
        if step.what == "wait":
            broken = dataclasses.replace(plan, steps=plan.steps[:at] + plan.steps[at + 1 :])
            with pytest.raises(PlanError, match=r"may begin before|may end before"):
                check_plan(tasks, broken)


def test_planted_reuse_is_seen() -> None:
    tasks = fork_join(2, 3)
    plan = plan_streams(tasks, 2)
    assert plan.streams == 2
    uses = uses_of(tasks)
    good = plan_arena(uses, plan).offsets
    check_plan(tasks, plan, regions_of(uses, good))
    shared = {**good, "b4": good["b1"]}  # the first kernels of both branches
    with pytest.raises(PlanError, match=r"share bytes .* may run at once"):
        check_plan(tasks, plan, regions_of(uses, shared))


def test_a_branch_reuses_its_own_memory() -> None:
    """Lifetimes on a line, stretched to be safe, would keep every buffer of a branch until the join."""
    tasks = fork_join(2, 20)
    plan = plan_streams(tasks, 2)
    uses = [Use(f"b{i}", 1024, (i,), tuple(j for j, t in enumerate(tasks) if i in t.after)) for i in range(len(tasks))]
    arena = plan_arena(uses, plan, budget_s=0.5)
    check_plan(tasks, plan, regions_of(uses, arena.offsets))
    assert plan.streams == 2
    assert arena.height <= 6 * 1024, "two buffers at work in each branch, and the source's"


def test_a_buffer_written_in_parts() -> None:
    """The parts of a concatenation, computed where they belong by two streams."""
    tasks = [Task("a", 30 * US, 0.3), Task("b", 30 * US, 0.3), Task("c", 30 * US, 0.3, (0, 1))]
    plan = plan_streams(tasks, 2)
    assert plan.streams == 2
    whole = Use("ab", 128, (0, 1), (2,))
    arena = plan_arena([whole, Use("c", 64, (2,))], plan)
    assert arena.offsets["c"] >= 128, "c is written while its parts are read"
    with pytest.raises(PlanError, match="share bytes"):
        check_plan(tasks, plan, regions_of([whole, Use("w", 64, (1,))], {"ab": 0, "w": 64}))


def test_one_stream_is_planned_like_any_program() -> None:
    tasks = chain(12)
    uses = uses_of(tasks)
    arena = plan_arena(uses, plan_streams(tasks))
    assert arena.height == arena.lower_bound


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([("launch", 0, 0)], "never launched"),
        ([("launch", 0, 0), ("launch", 0, 0), ("launch", 0, 1)], "launched twice"),
        ([("launch", 0, 0), ("launch", 1, 1)], "before the run does"),
        (
            [("record", 0, 0), ("wait", 1, 0), ("launch", 0, 0), ("launch", 1, 1), ("record", 1, 1), ("wait", 0, 1)],
            "may begin before a",
        ),
        ([("wait", 1, 0)], "before it is recorded"),
        ([("record", 0, 0), ("record", 0, 0)], "recorded twice"),
        ([("launch", 5, 0)], "names stream 5"),
        ([("launch", 0, 0), ("record", 0, 0), ("wait", 1, 0), ("launch", 1, 1)], "may end before task b"),
    ],
)
def test_wrong_plans_are_refused(steps: list[tuple[str, int, int]], reason: str) -> None:
    tasks = [Task("a", US), Task("b", US, after=(0,))]
    plan = StreamPlan(2, 2, tuple(Step(*s) for s in steps))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=reason):
        check_plan(tasks, plan)


def test_reading_before_writing_is_seen() -> None:
    tasks = [Task("a", US), Task("b", US)]
    plan = issue(tasks, [0, 1], [0, 0], 1)
    with pytest.raises(PlanError, match="a may read 'x' before b has written it"):
        check_plan(tasks, plan, [Region("x", 0, 64, (1,), (0,))])


def test_tasks_come_in_order() -> None:
    with pytest.raises(ValueError, match="must come after"):
        plan_streams([Task("a", US, after=(1,)), Task("b", US)])


def test_a_plan_that_waits_for_ever_does_not_simulate() -> None:
    tasks = [Task("a", US)]
    with pytest.raises(ValueError, match="never recorded"):
        simulate(tasks, StreamPlan(1, 1, (Step("wait", 0, 0), Step("launch", 0, 0))))
