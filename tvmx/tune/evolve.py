"""Moves through a space: mutation, crossover, and the generations between two measured rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from tvmx.tune.space import Candidate, Choice, Space
from tvmx.tune.trace import Decision, Decisions

T = TypeVar("T")
Score = Callable[[Sequence[Candidate]], Sequence[float]]


def mutate_tile(factors: Sequence[int], limit: int, rng: random.Random) -> list[int]:
    """Move one prime factor from one loop to another: `[4, 2, 8] → [4, 4, 4]`. `limit` bounds the last factor."""
    out = list(factors)
    sources = [i for i, f in enumerate(out) if f > 1]
    if not sources or len(out) < 2:
        return out
    for _ in range(8):
        source = rng.choice(sources)
        goal = rng.choice([i for i in range(len(out)) if i != source])
        prime = rng.choice(prime_factors(out[source]))
        if goal == len(out) - 1 and out[goal] * prime > limit > 0:
            continue
        out[source] //= prime
        out[goal] *= prime
        return out
    return out


def prime_factors(n: int) -> list[int]:
    """`12 → [2, 2, 3]`."""
    out, p = [], 2
    while p * p <= n:
        while n % p == 0:
            out.append(p)
            n //= p
        p += 1
    return [*out, n] if n > 1 else out


def draw(choice: Choice, rng: random.Random) -> Decision:
    """Any decision; None where only the schedule knows what there is to choose from."""
    if choice.kind == "SampleCategorical":
        return rng.randrange(choice.limit)
    if choice.kind != "SamplePerfectTile":
        return None
    factors = [1] * choice.parts
    primes = prime_factors(choice.extent)
    rng.shuffle(primes)
    for prime in primes:
        fits = [i for i in range(choice.parts) if i < choice.parts - 1 or factors[i] * prime <= choice.limit]
        factors[rng.choice(fits or [0])] *= prime
    return factors


def mutate_choice(choice: Choice, decision: Decision, rng: random.Random) -> Decision:
    """A neighbouring decision, sometimes any."""
    if rng.random() < 0.2 or decision is None:
        return draw(choice, rng)
    if choice.kind == "SamplePerfectTile":
        return mutate_tile(decision, choice.limit, rng)
    if choice.kind == "SampleCategorical" and choice.limit > 1:
        near = [d for d in (decision - 1, decision + 1) if 0 <= d < choice.limit]
        return rng.choice(near)
    return draw(choice, rng)


def mutate(space: Space, decisions: Decisions, rng: random.Random) -> list[Decision]:
    """Change one decision, sometimes two or three."""
    out = list(decisions)
    count = 1 + (rng.random() < 0.35) + (rng.random() < 0.15)
    for i in rng.sample(range(len(out)), min(count, len(out))):
        out[i] = mutate_choice(space.choices[i], out[i], rng)
    return out


def crossover(a: Decisions, b: Decisions, rng: random.Random) -> list[Decision]:
    """Each decision from one parent or the other."""
    return [rng.choice(pair) for pair in zip(a, b)]


def evolve(
    spaces: Sequence[Space],
    elite: Sequence[Candidate],
    score: Score,
    rng: random.Random,
    population: int = 64,
    generations: int = 3,
    random_share: float = 0.3,
) -> list[Candidate]:
    """Candidates by falling score, grown from `elite` (measured ones, best first) and random draws.

    Spaces share the population evenly at first; the fittest take it over.
    """
    by_name = {s.name: s for s in spaces}
    pool: dict[str, Candidate] = {c.key: c for c in elite if c.space in by_name}
    wide = [s for s in spaces if s.choices]
    parents = list(pool.values())
    for _ in range(4 * population):
        if len(pool) >= population or not wide:
            break
        if parents and rng.random() > random_share:
            parent = rng.choice(parents[: max(4, len(parents) // 2)])
            space = by_name[parent.space]
            child = space.candidate(mutate(space, parent.decisions, rng), rng.randrange(1 << 30))
        else:
            space = rng.choice(wide)
            child = space.candidate([draw(c, rng) for c in space.choices], rng.randrange(1 << 30))
        if child is not None:
            pool.setdefault(child.key, child)
    ranked = rank(list(pool.values()), score)
    for _ in range(generations - 1 if wide else 0):
        children = dict.fromkeys(c.key for c in ranked)
        fresh: list[Candidate] = []
        for _ in range(population):
            parent = pick(ranked, rng)
            space = by_name[parent.space]
            if not space.choices:
                continue
            if rng.random() < 0.25:
                other = pick([c for c in ranked if c.space == parent.space], rng)
                decisions = crossover(parent.decisions, other.decisions, rng)
            else:
                decisions = mutate(space, parent.decisions, rng)
            child = space.candidate(decisions, rng.randrange(1 << 30))
            if child is not None and child.key not in children:
                children[child.key] = None
                fresh.append(child)
        ranked = rank(ranked[: population // 2], score) + rank(fresh, score)
        ranked = rank(ranked, score)[:population]
    return ranked


def rank(candidates: list[Candidate], score: Score) -> list[Candidate]:
    """Best score first."""
    scores = score(candidates) if candidates else []
    order = sorted(range(len(candidates)), key=lambda i: -scores[i])
    return [candidates[i] for i in order]


def pick(ranked: Sequence[T], rng: random.Random) -> T:
    """One of them, the first ones more often."""
    return ranked[int(len(ranked) * rng.random() ** 2)]
