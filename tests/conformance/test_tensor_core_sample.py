"""A few random shapes on each `make test`; `make conformance` runs 240."""

from __future__ import annotations

import pytest

from tests.conformance.tensor_core import random_case, run_many
from tvmx.debug.emulate import compiler


@pytest.mark.skipif(compiler() is None, reason="the emulator needs a C++ compiler")
def test_sampled_shapes_match_numpy() -> None:
    assert not run_many(8, start=1000)


def test_cases_depend_on_their_index_alone() -> None:
    assert [random_case(i) for i in (5, 6)] == [random_case(i) for i in (5, 6)]
    assert random_case(5) != random_case(5, seed=1)
