"""The search of one task: what has been measured, what to measure next, and who leads."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tvmx.target import Target
from tvmx.tune.evolve import evolve
from tvmx.tune.judge import NOISE
from tvmx.tune.log import TuningLog
from tvmx.tune.measure import Built
from tvmx.tune.model import CostModel
from tvmx.tune.record import Trial, Verdict
from tvmx.tune.space import Candidate, Space, spaces_for
from tvmx.tune.task import Task
from tvmx.tune.trace import key_of, skeleton

log = logging.getLogger(__name__)

ELITE = 16
FOREIGN = 4  # imported or outdated trials of a task that are measured again


@dataclass(frozen=True)
class SearchConfig:
    """How candidates are found. The defaults keep the search's own time small next to measuring."""

    batch: int = 16  # candidates a round
    population: int = 40
    generations: int = 2
    explore: float = 0.2  # share of a round that ignores the model
    patience: int = 4  # rounds without a better candidate that end a task
    min_gain: float = 0.01  # a winner must be this much faster than the default


class TaskSearch:
    """State of one task in a session. `start` must come before `propose`."""

    def __init__(self, task: Task, target: Target, config: SearchConfig, rng: random.Random) -> None:
        self.task = task
        self.target = target
        self.config = config
        self.rng = rng
        self.spaces: list[Space] = []
        self.default: Candidate | None = None
        self.default_hash = ""
        self.default_build: Built | None = None
        self.default_s: float | None = None  # seconds, of this session
        self.winner: Verdict | None = None
        self.winner_build: Built | None = None
        self.seconds: dict[str, float | None] = {}  # candidate key → seconds, None if it failed
        self.candidates: dict[str, Candidate] = {}  # the measured ones that still replay
        self.rejected: set[str] = set()
        self.seeds: list[Candidate] = []  # earlier winners that must prove themselves again
        self.promise = 0.0  # share of the default's time that they saved elsewhere; 0 once they were tried
        self.given_tried = False  # each rule's own choice of decisions
        self.trials = 0  # in this session and before
        self.rounds = 0
        self.idle_rounds = 0
        self.gains: list[float] = []  # seconds won in each round
        self.exhausted = False

    def prepare(self, tuning_log: TuningLog, model: CostModel, others: Sequence[TuningLog] = ()) -> None:
        """Make the spaces, and take over what the log knows of this task.

        Winners of `others`, of other thread counts, and over an older default are the first to be measured.
        """
        from tvmx.tune.apply import schedule_hash

        self.spaces = spaces_for(self.task, self.target)
        if not self.spaces:
            self.exhausted = True
            return
        self.default = self.spaces[0].candidate(self.spaces[0].given)
        if self.default is None:  # a trace that does not replay cannot be searched either
            log.warning("%s: the default of %s does not replay; not tuned", self.task.name, self.spaces[0].name)
            self.exhausted = True
            return
        self.default_hash = schedule_hash(self.default.func)
        known: list[Candidate] = []
        foreign: list[Trial] = []
        for trial in tuning_log.trials(self.task.workload, self.target):
            self.trials += 1
            candidate = self._again(trial)
            if candidate is None and trial.seconds is not None:
                foreign.append(trial)
            if candidate is not None:
                known.append(candidate)
                self._remember(candidate, trial.seconds)
        model.add(self.task, known, [self.seconds[c.key] for c in known])
        for trial in sorted(foreign, key=lambda t: t.seconds or 0.0)[:FOREIGN]:
            candidate = self._foreign(trial)
            self.seeds += [candidate] if candidate is not None else []
        self.winner = tuning_log.best(self.task.workload, self.target, self.default_hash)
        related = [w for source in (tuning_log, *others) for w in source.related(self.task.workload, self.target)]
        for verdict in related:
            if verdict is not self.winner:
                candidate = self._again(verdict) or self._foreign(verdict)
                if candidate is not None:
                    self.seeds.append(candidate)
                    self.promise = max(self.promise, 1 - 1 / verdict.speedup, self.config.min_gain)
        for verdict in tuning_log.verdicts(self.task.workload, self.target):
            undecided = verdict.reason.endswith(NOISE)  # a quieter machine may tell
            if verdict.default_hash == self.default_hash and verdict.status != "CONFIRMED" and not undecided:
                rejected = self._again(verdict)
                self.rejected |= {rejected.key} if rejected else set()

    @property
    def best_s(self) -> float | None:
        """Seconds of what `compile` would use now: the winner's or the default's."""
        if self.default_s is None:
            return None
        return self.default_s / self.winner.speedup if self.winner is not None else self.default_s

    @property
    def leader_s(self) -> float | None:
        """Fastest trial, confirmed or not."""
        times = [s for k, s in self.seconds.items() if s is not None and k not in self.rejected]
        return min(times, default=None)

    @property
    def finished(self) -> bool:
        return self.exhausted or self.idle_rounds >= self.config.patience

    def propose(self, model: CostModel) -> list[Candidate]:
        """The next round's candidates: mostly the model's favourites, some at random; none when there are no more.

        Earlier winners come first and alone: they are few and likely to win again. None is left where all are
        measured already; then the round is for their challenge of the default.
        """
        wanted = self.config.batch
        chosen: dict[str, Candidate] = {}

        def take(candidates: Sequence[Candidate], limit: int) -> None:
            for candidate in candidates:
                if len(chosen) >= limit:
                    return
                if candidate.key not in self.seconds:
                    chosen.setdefault(candidate.key, candidate)

        if self.promise:
            self.promise = 0.0
            take(self.seeds, wanted)
            return list(chosen.values())
        if not self.given_tried:
            self.given_tried = True
            take(self.seeds, wanted)
            take([c for s in self.spaces[1:] if (c := s.candidate(s.given))], wanted // 2)
        population = evolve(
            self.spaces,
            self.elite(),
            lambda candidates: model.predict(self.task, candidates).tolist(),
            self.rng,
            self.config.population,
            self.config.generations,
        )
        explore = round(wanted * self.config.explore)
        take(population, wanted - explore)
        rest = [c for c in population if c.key not in chosen]
        self.rng.shuffle(rest)
        take(rest, wanted)
        if not chosen:
            self.exhausted = True
        return list(chosen.values())

    def elite(self) -> list[Candidate]:
        """Measured candidates, fastest first; the default is always among them."""
        ok = [(s, k) for k, s in self.seconds.items() if s is not None and k in self.candidates]
        best = [self.candidates[k] for _, k in sorted(ok)[:ELITE]]
        assert self.default is not None
        return best if any(c.key == self.default.key for c in best) else [*best, self.default]

    def record(self, candidate: Candidate, seconds: float | None) -> None:
        """Take note of a measured candidate."""
        self.trials += 1
        self._remember(candidate, seconds)

    def challengers(self, count: int = 2) -> list[Candidate]:
        """Candidates that look faster than what is confirmed, fastest first."""
        best = self.best_s
        if best is None or self.default is None:
            return []
        limit = best * (1 - self.config.min_gain)
        winner = self._winner_key()
        found = [
            (s, k)
            for k, s in self.seconds.items()
            if s is not None and s < limit and k in self.candidates and k not in self.rejected
        ]
        return [self.candidates[k] for _, k in sorted(found)[:count] if k not in (winner, self.default.key)]

    def end_round(self, before: float | None) -> None:
        """Account for a round that began with `before` seconds as the best known."""
        self.rounds += 1
        after = self.best_s
        gain = (before - after) if before is not None and after is not None else 0.0
        self.gains.append(max(0.0, gain))
        better = before is not None and gain > self.config.min_gain * before
        self.idle_rounds = 0 if better else self.idle_rounds + 1

    @property
    def rate(self) -> float:
        """Iterations a second of the best known schedule."""
        return self.task.work / self.best_s if self.best_s else 0.0

    def expected_gain(self, peak_rate: float) -> float:
        """Seconds of the model's run time that the next round may win: recent gains, and hope that fades.

        There is more hope the further a kernel is from the highest rate that any kernel reaches here.
        """
        best = self.best_s
        if self.finished or best is None:
            return 0.0
        recent = sum(self.gains[-2:]) / 2 if self.gains else 0.0
        room = 0.03 + 0.25 * (1 - min(1.0, self.rate / peak_rate) if peak_rate else 1.0)
        hope = max(self.promise, room * 0.6**self.rounds * 0.7**self.idle_rounds) * best
        return self.task.occurrences * max(0.7 * recent, hope)

    def _remember(self, candidate: Candidate, seconds: float | None) -> None:
        old = self.seconds.get(candidate.key)
        self.seconds[candidate.key] = seconds if old is None else min(old, seconds or old)
        self.candidates[candidate.key] = candidate

    def _winner_key(self) -> str | None:
        again = self._again(self.winner) if self.winner is not None else None
        return again.key if again is not None else None

    def _foreign(self, record: Trial | Verdict) -> Candidate | None:
        """The candidate of a record that no space of today makes: another version's, or an imported one."""
        import tvm
        from tvm.s_tir import Schedule
        from tvm.s_tir.schedule import Trace

        sch = Schedule(tvm.IRModule({"main": self.task.func}), debug_mask="none", error_render_level="none")
        try:
            Trace.apply_json_to_schedule(record.trace, sch)
            space = Space(record.rule, self.task.func, sch.trace)
        except (RuntimeError, ValueError, TypeError):
            return None
        return space.candidate(space.given)

    def _again(self, record: Trial | Verdict) -> Candidate | None:
        """The candidate of a record, where its space is still the same."""
        try:
            mark = skeleton(record.trace)
            decisions = [d for _, d in record.trace[1]]
        except (TypeError, ValueError, IndexError):
            return None
        for space in self.spaces:
            if space.skeleton == mark and len(space.choices) == len(decisions):
                known = self.candidates.get(key_of(mark, decisions))
                return known or space.candidate(decisions)
        return None
