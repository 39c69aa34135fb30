"""Plans per shape: sequences of shapes, head-room, bounds, eviction, trimming, the time of a miss."""

import random

import pytest

from tvmx.errors import InputError, PlanError
from tvmx.memory import Buffer, PlanCache, Problem, plan, validate


def chain(dims):
    """Ten layers with a residual and a view whose offset depends on the shape."""
    n = dims["N"]
    buffers = [Buffer(f"t{i}", (i, i + 2 + 3 * (i % 4 == 0)), 4096 * n * (1 + i % 3)) for i in range(10)]
    return Problem([*buffers, Buffer("half", (2, 5), 2048 * n, 64, None, "t1", 2048 * n)])


def checked(cache, n):
    solution = cache.plan({"N": n})
    validate(chain({"N": n}), solution)
    assert solution.height <= cache.arena_bytes
    return solution


@pytest.mark.parametrize(
    "shapes",
    [range(1, 60), range(60, 0, -1), [1, 50] * 10, [7] * 10],
    ids=["growing", "shrinking", "alternating", "same"],
)
def test_any_sequence_of_shapes_gets_valid_plans(shapes):
    cache = PlanCache(chain)
    for n in shapes:
        checked(cache, n)
    stats = cache.stats
    assert stats.hits + stats.near_hits + stats.misses == len(shapes)


def test_same_shape_is_planned_once():
    cache = PlanCache(chain)
    assert checked(cache, 7) is checked(cache, 7)
    assert (cache.stats.misses, cache.stats.hits) == (1, 1)


def test_near_shapes_use_the_head_room_of_a_plan():
    cache = PlanCache(chain)
    checked(cache, 100)
    block = cache.arena_bytes
    for n in (101, 105, 110, 95):
        checked(cache, n)
    assert (cache.stats.misses, cache.stats.near_hits) == (1, 4)
    assert cache.arena_bytes == block
    checked(cache, 111)
    assert cache.stats.misses == 2


def test_much_smaller_shape_gets_a_plan_of_its_own():
    cache = PlanCache(chain)
    checked(cache, 100)
    assert checked(cache, 50).height < 0.6 * cache.arena_bytes


def test_head_room_ends_at_the_declared_bound():
    cache = PlanCache(chain, bounds={"N": (1, 8)})
    exact = checked(cache, 8)
    assert cache.arena_bytes == exact.height


@pytest.mark.parametrize("n", [0, 9])
def test_shape_outside_its_bounds_is_an_error_that_says_the_bounds(n):
    cache = PlanCache(chain, bounds={"N": (1, 8)})
    with pytest.raises(InputError, match=rf"'N' is {n}, outside its declared bounds \[1, 8\]"):
        cache.plan({"N": n})


def test_missing_dim_is_an_error():
    with pytest.raises(InputError, match="'N' is not given"):
        PlanCache(chain, bounds={"N": (1, 8)}).plan({})


def test_least_recently_used_plan_goes_first():
    cache = PlanCache(chain, limit=2)
    for n in (1, 20, 1, 400):
        checked(cache, n)
    assert cache.stats.evictions == 1
    checked(cache, 1)
    assert cache.stats.misses == 3
    checked(cache, 20)
    assert cache.stats.misses == 4


def test_trim_forgets_plans_and_says_what_the_arena_may_shrink():
    cache = PlanCache(chain)
    checked(cache, 100)
    checked(cache, 10)
    before = cache.arena_bytes
    freed = cache.trim(keep=1)
    assert cache.stats.entries == 1
    assert freed == before - cache.arena_bytes > 0
    assert cache.trim() > 0
    assert cache.stats.arena_bytes == 0


@pytest.mark.parametrize("options", [{"limit": 0}, {"head_room": -0.1}, {"head_room": 2.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(PlanError):
        PlanCache(chain, **options)


def random_lives(dims):
    rng = random.Random(1)
    lives = [(i, i + 1 + rng.choice([1, 1, 2, 3, 20])) for i in range(500)]
    return Problem(Buffer(f"t{i}", life, 64 * dims["N"] * rng.randrange(1, 999)) for i, life in enumerate(lives))


def test_a_model_of_500_tensors_is_planned_near_its_bound_for_every_shape():
    cache = PlanCache(random_lives, limit=3)
    for n in (1, 21, 181):
        found, fixed = cache.plan({"N": n}), plan(random_lives({"N": n}))
        assert found.height <= 1.1 * min(1.1 * fixed.lower_bound, plan(random_lives({"N": n}), planner="greedy").height)
    assert cache.stats.misses == 3
