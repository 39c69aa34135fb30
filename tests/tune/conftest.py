"""Fixtures of the tuning tests."""

from __future__ import annotations

import pytest

from tvmx.target import Target, resolve


@pytest.fixture(scope="session")
def target() -> Target:
    return resolve("native", threads=1)
