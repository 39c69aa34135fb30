"""apply_schedules: every kernel gets a schedule, tuned where a confirmed one replays."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.tune.helpers import matmul, module
from tvmx.schedule import apply_default
from tvmx.target import Target
from tvmx.tune.apply import apply_schedules, is_scheduled, schedule_hash
from tvmx.tune.workload import canonical, decode, encode, workload_hash


@dataclass(frozen=True)
class Found:
    rule: str
    trace: Any
    default_hash: str


class FakeLog:
    """Answers one workload."""

    def __init__(self, key: str, winner: Found) -> None:
        self.key, self.winner = key, winner

    def best(self, workload: str, target: Target, default_hash: str) -> Found | None:
        return self.winner if workload == self.key and default_hash == self.winner.default_hash else None

    def outdated(self, workload: str, target: Target, default_hash: str) -> bool:
        return workload == self.key and default_hash != self.winner.default_hash

    def workload(self, workload: str) -> Any:
        return None


def run(mod: Any, target: Target) -> np.ndarray:
    vm = relax.VirtualMachine(tvm.compile(mod, target.tvm()), tvm.cpu())
    rng = np.random.default_rng(0)
    args = [rng.standard_normal((64, 64)).astype("float32") for _ in range(2)]
    return vm["main"](*map(tvm.runtime.tensor, args)).numpy()


def other_trace() -> Any:
    sch = tvm.s_tir.Schedule(tvm.IRModule({"main": matmul(64, 64, 64)}))
    i, j, r = sch.get_loops(sch.get_sblock("C"))
    sch.reorder(i, r, j)
    return sch.trace.as_json()


def test_defaults_cover_every_kernel_and_compute_the_same(target: Target) -> None:
    mod = module()
    out, rules = apply_schedules(mod, target)
    assert set(rules) == {"matmul", "add_one"}
    assert all(is_scheduled(f) for f in out.functions.values() if isinstance(f, tvm.tirx.PrimFunc))
    np.testing.assert_allclose(run(out, target), run(mod, target), rtol=1e-4, atol=1e-4)


def test_scheduled_functions_are_left_alone(target: Target) -> None:
    once, _ = apply_schedules(module(), target)
    twice, rules = apply_schedules(once, target)
    assert rules == {}
    tvm.ir.assert_structural_equal(once, twice)


def test_a_winner_replays_and_keeps_the_name(target: Target) -> None:
    kernel = matmul(64, 64, 64)
    default = schedule_hash(apply_default(kernel, target).func)
    log = FakeLog(workload_hash(kernel), Found("test.rule", other_trace(), default))
    out, rules = apply_schedules(module(), target, log)
    assert rules["matmul"] == "tuned:test.rule"
    assert rules["add_one"].startswith("cpu.")
    assert schedule_hash(out["matmul"]) != default
    np.testing.assert_allclose(run(out, target), run(module(), target), rtol=1e-4, atol=1e-4)


def test_a_trace_that_does_not_fit_gives_way(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    kernel = matmul(64, 64, 64)
    default = schedule_hash(apply_default(kernel, target).func)
    trace = [[["GetSBlock", [], ["nowhere", "main"], ["b0"]]], []]
    with caplog.at_level(logging.WARNING):
        _, rules = apply_schedules(module(), target, FakeLog(workload_hash(kernel), Found("test.rule", trace, default)))
    assert not rules["matmul"].startswith("tuned:")
    assert "no longer replays" in caplog.text


def test_a_winner_over_another_default_gives_way(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    log = FakeLog(workload_hash(matmul(64, 64, 64)), Found("test.rule", other_trace(), "0" * 16))
    with caplog.at_level(logging.WARNING):
        _, rules = apply_schedules(module(), target, log)
    assert not rules["matmul"].startswith("tuned:")
    assert "1 tuned schedules beat other defaults" in caplog.text


def test_hash_ignores_names_and_sees_shapes() -> None:
    assert workload_hash(matmul(name="a")) == workload_hash(matmul(name="b"))
    assert workload_hash(matmul(name="a")) != workload_hash(matmul(65, name="a"))


def test_encode_decode() -> None:
    func = matmul()
    tvm.ir.assert_structural_equal(decode(encode(func)), canonical(func))
    for bad in ("", "%%%", encode(func)[:-8], encode(func).swapcase()):
        with pytest.raises(ValueError, match=r"stored workload|base64|cut off"):
            decode(bad)
