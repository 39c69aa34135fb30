"""Spaces: what may be measured for a task. One per schedule rule that claims it, and MetaSchedule's own rules.

A space is a trace with sampling instructions. A candidate is the trace under other decisions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvmx.schedule import Workload, apply_rule, rules_for
from tvmx.schedule.build import UNROLL_EXPLICIT, UNROLL_STEP
from tvmx.target import Target
from tvmx.tune.task import Task
from tvmx.tune.trace import Decision, Decisions, decisions_of, key_of, plain, skeleton, trace_json

log = logging.getLogger(__name__)

SMALL_WORK = 1 << 22  # iterations below which MetaSchedule's large spaces are worth a try for any kernel


@dataclass(frozen=True)
class Choice:
    """One sampling instruction: its kind, and the limit or the number of options that it draws from."""

    kind: str  # "SamplePerfectTile" | "SampleCategorical" | ...
    limit: int  # max_innermost_factor, or number of candidates
    parts: int = 0  # factors of a tile
    extent: int = 0  # their product


class Candidate:
    """Decisions of a space that give a valid schedule. `key` is equal for equal candidates in every process.

    The schedule itself is made on demand and can be released: thousands of them would fill the memory.
    """

    def __init__(self, origin: Space, decisions: Decisions, key: str, sch: Any = None) -> None:
        self.origin = origin
        self.decisions = decisions
        self.key = key
        self._sch = sch

    @property
    def space(self) -> str:
        """The space's name: the schedule rule."""
        return self.origin.name

    @property
    def sch(self) -> Any:
        if self._sch is None:
            self._sch = self.origin.schedule(self.decisions, 0)
            assert self._sch is not None, f"{self.key} was valid before"
        return self._sch

    def release(self) -> None:
        """Drop the schedule until it is wanted again."""
        self._sch = None

    @property
    def func(self) -> Any:
        return self.sch.mod["main"]

    @property
    def trace(self) -> Any:
        """JSON."""
        return trace_json(self.sch.trace)


class Space:
    """A trace over a task's kernel, its choices, and what is done after it (MetaSchedule's postprocessors)."""

    def __init__(self, name: str, func: Any, trace: Any, finish: Callable[[Any], bool] | None = None) -> None:
        import tvm

        self.name = name
        self.trace = trace
        self.mod = tvm.IRModule({"main": func})
        self.finish = finish
        choices, given = [], []
        for inst in trace.insts:
            if inst.kind.name.startswith("Sample"):
                decision = plain(trace.get_decision(inst))
                choices.append(_choice(inst, decision))
                given.append(decision)
        self.choices = tuple(choices)
        self.given: Decisions = tuple(given)
        self.skeleton = skeleton(trace_json(trace))
        self._valid: dict[str, bool] = {}

    def candidate(self, decisions: Sequence[Decision], seed: int = 0) -> Candidate | None:
        """The candidate with these decisions; None in place of one draws it. None where they do not fit."""
        if all(d is not None for d in decisions):
            key = key_of(self.skeleton, decisions)
            if key in self._valid:
                return Candidate(self, tuple(decisions), key) if self._valid[key] else None
            self._valid[key] = False
        sch = self.schedule(decisions, seed)
        if sch is None:
            return None
        drawn = decisions_of(sch.trace)[: len(self.choices)]
        key = key_of(self.skeleton, drawn)
        self._valid[key] = True
        return Candidate(self, drawn, key, sch)

    def schedule(self, decisions: Sequence[Decision], seed: int) -> Any:
        """The trace replayed under these decisions, or None where they do not fit."""
        from tvm.s_tir import Schedule

        queue = iter(decisions)

        def decide(inst: Any, inputs: Any, attrs: Any, decision: Any) -> Any:
            return next(queue) if inst.kind.name.startswith("Sample") else decision

        sch = Schedule(self.mod, seed=seed + 1, debug_mask="none", error_render_level="none")
        try:
            self.trace.apply_to_schedule(sch, remove_postproc=False, decision_provider=decide)
            if self.finish is not None and not self.finish(sch):
                return None
        except Exception:  # each primitive has errors of its own; whichever it is, the decisions do not fit
            return None
        return sch


def spaces_for(task: Task, target: Target) -> list[Space]:
    """The spaces of a task, its default first. The default's own decisions are `spaces[0].given`."""
    workload = Workload.of(task.func)
    spaces: list[Space] = []
    for rule in rules_for(workload, target):
        try:
            scheduled = apply_rule(rule, task.func, target)
            spaces.append(Space(rule.name, task.func, scheduled.trace))
            variant = unrolled(rule.name, task.func, scheduled.trace) if target.kind == "cpu" else None
            spaces += [variant] if variant is not None else []
        except Exception as error:  # a rule may raise what it likes: the next one has its turn
            log.info("%s: schedule rule %s refused: %s", task.name, rule.name, last_line(error))
    if target.kind != "cpu":
        return spaces
    if workload.anchor is not None and (task.work <= SMALL_WORK or not spaces or spaces[0].name == "cpu.generic"):
        spaces += metaschedule_spaces(task, target)
    return spaces


def unrolled(name: str, func: Any, trace: Any) -> Space | None:
    """A rule's space with one question more: how far the compiler unrolls the loops below each outermost one.

    The rules unroll what holds accumulators; whether the loops around gain from it depends on the CPU's front end
    more than on anything that a model knows.
    """
    import tvm
    from tvm.s_tir import Schedule

    sch = Schedule(tvm.IRModule({"main": func}), debug_mask="none", error_render_level="none")
    trace.apply_to_schedule(sch, remove_postproc=False)
    step = sch.sample_categorical([16, 64, 256], [0.4, 0.3, 0.3], decision=0)
    explicit = sch.sample_categorical([0, 1], [0.5, 0.5], decision=1)
    found = False
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        outer = sch.get_loops(block)[:1]
        if outer and UNROLL_STEP not in sch.get(outer[0]).annotations:  # several blocks may share a loop
            sch.annotate(outer[0], UNROLL_STEP, step)
            sch.annotate(outer[0], UNROLL_EXPLICIT, explicit)
            found = True
    return Space(f"{name}+unroll", func, sch.trace) if found else None


def metaschedule_spaces(task: Task, target: Target) -> list[Space]:
    """MetaSchedule's generic CPU rules (multi-level tiling, no vector intrinsics) as spaces of the task.

    Where a rule raises (multi-level tiling does when it moves a consumer whose indices it cannot invert, such as
    the output transform of a Winograd convolution), the rules without it are tried. May be empty.
    """
    from tvmx.compat import load_tensor_intrinsics

    load_tensor_intrinsics()
    from tvm.s_tir import meta_schedule as ms

    # Custom rules are looked up by name and warned about on stderr where there is none, as on CPUs.
    custom = ms.schedule_rule.ApplyCustomRule
    rules = [r for r in ms.ScheduleRule.create("llvm") if not isinstance(r, custom)]
    plain_tiling = ms.schedule_rule.MultiLevelTiling("SSRSRS", max_innermost_factor=64)  # nothing is moved below it
    attempts = [
        rules,
        [plain_tiling if isinstance(r, ms.schedule_rule.MultiLevelTiling) else r for r in rules],
        [r for r in rules if not isinstance(r, ms.schedule_rule.MultiLevelTiling)],
    ]
    for attempt in attempts:
        try:
            return _metaschedule_spaces(task, target, attempt)
        except Exception as error:  # the generator passes on whatever a primitive raises
            log.info("%s: MetaSchedule finds no space: %s", task.name, last_line(error))
    return []


def _metaschedule_spaces(task: Task, target: Target, rules: list[Any]) -> list[Space]:
    import tvm
    from tvm.s_tir import meta_schedule as ms

    generator = ms.space_generator.PostOrderApply(
        sch_rules=rules,
        postprocs=[
            ms.postproc.DisallowDynamicLoop(),
            ms.postproc.RewriteParallelVectorizeUnroll(),
            ms.postproc.RewriteReductionBlock(),
        ],
        mutator_probs={},
    )
    context = ms.TuneContext(
        mod=tvm.IRModule({"main": task.func}),
        target=target.tvm(),
        space_generator=generator,
        num_threads=1,
        rand_state=1,
    )
    designs = context.generate_design_space()

    def finish(sch: Any) -> bool:
        sch.enter_postproc()
        # The context owns the generator, and that owns the postprocessors' state.
        return context is not None and all(p.apply(sch) for p in generator.postprocs)

    return [Space(f"metaschedule.{i}", task.func, d.trace, finish) for i, d in enumerate(designs)]


def last_line(error: BaseException) -> str:
    """What TVM puts last is what went wrong; before it comes its stack."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"


def _choice(inst: Any, decision: Decision) -> Choice:
    kind = str(inst.kind.name)
    if kind == "SamplePerfectTile":
        return Choice(kind, int(inst.attrs[1]), int(inst.attrs[0]), math.prod(decision))
    if kind == "SampleCategorical":
        return Choice(kind, len(inst.attrs[0]))
    return Choice(kind, 0)
