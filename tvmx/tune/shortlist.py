"""Which candidates of a task are worth building when nothing can be measured yet."""

from __future__ import annotations

import random
from collections.abc import Callable

from tvmx.target import Target
from tvmx.tune.evolve import draw, evolve
from tvmx.tune.predict import Predictor
from tvmx.tune.space import Candidate, spaces_for
from tvmx.tune.task import Task

EXPLORE = 0.25  # share of a list that is drawn at random: the model is not fitted to any device


def shortlist(
    task: Task, target: Target, count: int, rng: random.Random, stop: Callable[[], bool] = lambda: False
) -> list[Candidate]:
    """Up to `count` candidates: the default first, then each other rule's own choice, the model's favourites, and some
    at random. Empty where the task's default does not replay."""
    spaces = spaces_for(task, target)
    default = spaces[0].candidate(spaces[0].given) if spaces else None
    if default is None:
        return []
    chosen: dict[str, Candidate] = {default.key: default}

    def take(candidates: list[Candidate], limit: int) -> None:
        for candidate in candidates:
            if len(chosen) < limit:
                chosen.setdefault(candidate.key, candidate)

    take([c for s in spaces[1:] if (c := s.candidate(s.given))], count)
    if count <= len(chosen) or stop():
        return list(chosen.values())
    score = Predictor(task, target).rank if target.gpu is not None else lambda cs: [0.0] * len(cs)
    population = evolve(spaces, [default], score, rng, population=min(2 * count, 48), generations=2)
    room = count - len(chosen)
    take(population, len(chosen) + room - round(room * EXPLORE))
    for _ in range(4 * count):
        if len(chosen) >= count or stop():
            break
        space = rng.choice(spaces)
        found = space.candidate([draw(c, rng) for c in space.choices], rng.randrange(1 << 30))
        take([found] if found else [], count)
    take(population, count)
    for candidate in chosen.values():
        candidate.release()
    return list(chosen.values())


def share(tasks: list[Task], seconds: list[float], total: int, least: int = 4) -> list[int]:
    """How many of `total` candidates each task gets: by its part of the model's time, at least `least`, at most 64."""
    weights = [t.occurrences * s for t, s in zip(tasks, seconds)]
    whole = sum(weights) or 1.0
    counts = [min(64, max(least, round(total * w / whole))) for w in weights]
    while sum(counts) > total and max(counts) > 1:  # those that matter least give
        least_use = min((i for i, c in enumerate(counts) if c > 1), key=lambda i: weights[i] / counts[i])
        counts[least_use] -= 1
    return counts
