"""The cost model: gradient-boosted trees over MetaSchedule's per-store features, shared by all tasks.

Its state is the measured candidates themselves; a later session rebuilds it from the log. Nothing is pickled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvmx.target import Target
from tvmx.tune.space import Candidate, last_line
from tvmx.tune.task import Task

log = logging.getLogger(__name__)

FEATURES = 164  # of a store, by MetaSchedule's PerStoreFeature
MIN_SAMPLES = 12  # below this the model knows nothing
MAX_SAMPLES = 3000  # the newest
ROUNDS = 100
PARAMS = {
    "objective": "reg:squarederror",
    "max_depth": 6,
    "eta": 0.12,
    "subsample": 0.9,
    "colsample_bytree": 0.5,
    "min_child_weight": 1.0,
    "verbosity": 0,
    "nthread": 1,  # for some hundred rows more threads only wait for each other
}


class CostModel:
    """Predicts, for a task, the best known time over a candidate's time: 1 is as good as the best, 0 a failure."""

    def __init__(self, target: Target, seed: int = 0) -> None:
        from tvmx.compat import load_tensor_intrinsics

        load_tensor_intrinsics()
        from tvm.s_tir import meta_schedule as ms

        self._ms = ms
        self._extractor = ms.feature_extractor.PerStoreFeature()
        self._tvm_target = target.tvm()
        self._contexts: dict[str, tuple[Any, Any]] = {}
        self._features: dict[tuple[str, str], np.ndarray] = {}  # workload, candidate key
        self._samples: list[tuple[str, np.ndarray, float | None]] = []  # workload, features, seconds
        self._booster: Any = None
        self._fitted = 0  # samples at the last fit
        self._params = {**PARAMS, "seed": seed}

    def add(self, task: Task, candidates: Sequence[Candidate], seconds: Sequence[float | None]) -> None:
        """Learn from measured candidates; None is a failure."""
        if not candidates:
            return
        for row, value in zip(self.features(task, candidates), seconds):
            self._samples.append((task.workload, row, value))

    def predict(self, task: Task, candidates: Sequence[Candidate]) -> np.ndarray:
        """Scores, higher is faster. All zero while there is too little to learn from."""
        if not candidates:
            return np.zeros(0)
        new = len(self._samples) - self._fitted
        if new >= max(MIN_SAMPLES, len(self._samples) // 20):
            self._fit()
        rows = self.features(task, candidates)
        if self._booster is None:
            return np.zeros(len(rows))
        import xgboost

        return np.asarray(self._booster.predict(xgboost.DMatrix(rows)), dtype=np.float64)

    def features(self, task: Task, candidates: Sequence[Candidate]) -> np.ndarray:
        """A row per candidate: over the stores of its lowered form, the mean and the maximum of each feature."""
        missing = {c.key: c for c in candidates if (task.workload, c.key) not in self._features}
        if missing:
            try:
                rows = self._extract(task, list(missing.values()))
            except Exception:  # one that does not lower takes the others with it
                rows = [self._extract_or_zero(task, c) for c in missing.values()]
            for (key, candidate), row in zip(missing.items(), rows):
                self._features[task.workload, key] = row
                candidate.release()
        return np.stack([self._features[task.workload, c.key] for c in candidates])

    def _extract(self, task: Task, candidates: list[Candidate]) -> list[np.ndarray]:
        context, arguments = self._context(task)
        measured = [self._ms.MeasureCandidate(c.sch, arguments) for c in candidates]
        matrices = [s.numpy().astype(np.float32) for s in self._extractor.extract_from(context, measured)]
        return [np.concatenate([m.mean(axis=0), m.max(axis=0)]) for m in matrices]

    def _extract_or_zero(self, task: Task, candidate: Candidate) -> np.ndarray:
        """Zeros for a candidate that does not lower: the builder will say why."""
        try:
            return self._extract(task, [candidate])[0]
        except Exception as error:
            log.info("%s: no features of %s: %s", task.name, candidate.key, last_line(error))
            return np.zeros(2 * FEATURES, np.float32)

    def _context(self, task: Task) -> tuple[Any, Any]:
        if task.workload not in self._contexts:
            import tvm

            mod = tvm.IRModule({"main": task.func})
            context = self._ms.TuneContext(mod=mod, target=self._tvm_target, num_threads=1)
            self._contexts[task.workload] = context, self._ms.arg_info.ArgInfo.from_prim_func(task.func)
        return self._contexts[task.workload]

    def _fit(self) -> None:
        self._fitted = len(self._samples)
        samples = self._samples[-MAX_SAMPLES:]
        import xgboost

        best: dict[str, float] = {}
        for workload, _, seconds in self._samples:
            if seconds is not None:
                best[workload] = min(best.get(workload, seconds), seconds)
        labels = [best[w] / s if s is not None else 0.0 for w, _, s in samples]
        matrix = xgboost.DMatrix(np.stack([row for _, row, _ in samples]), label=np.asarray(labels, np.float32))
        self._booster = xgboost.train(self._params, matrix, num_boost_round=ROUNDS)
