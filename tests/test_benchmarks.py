"""The parts of the benchmarks that decide what is reported: turns, bars, inputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.latency_report import bars, table
from benchmarks.measure import interleave, ratio
from benchmarks.models import zoo_model


def row(model: str, against_ort: float, against_best: float, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "threads": 1,
        "median_ms": {"untuned": against_ort, "onnxruntime": 1.0},
        "ratios": {"untuned": {"onnxruntime": against_ort, "openvino": against_best}},
        "error_untuned": 1e-6,
        "compile_untuned_s": 3.0,
        **more,
    }


def test_bars_say_what_is_missed() -> None:
    lines = bars([row("a", 0.5, 0.8), row("resnet18", 0.95, 1.7), {"model": "b", "threads": 1, "failed": "X: y"}])
    missed = [line for line in lines if line.startswith("MISS")]
    assert len(missed) == 2
    assert any("resnet18" in line and "1.7" in line for line in missed)
    assert any("0.95" in line for line in missed)
    real = bars([row("a", 0.5, 0.8, error_real_untuned=2e-4)])
    assert any(line.startswith("MISS") and "a, real input" in line for line in real)


def test_table_shows_a_failure_and_leaves_it_out_of_the_means() -> None:
    lines = table([row("a", 0.5, 0.8), {"model": "b", "threads": 1, "failed": "X: y"}])
    assert any("FAILED: X: y" in line for line in lines)
    assert any(line.endswith("un/ORT: 0.500") for line in lines)


def test_contenders_take_turns() -> None:
    calls: list[str] = []
    clock = iter(range(10_000))
    samples = interleave(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        repeat=4,
        warmup=0,
        min_sample_s=1,
        clock=lambda: float(next(clock)),
    )
    assert calls == ["a", "b", *"abbaabba"]  # one to size the samples, then every round begins with the next one
    assert samples == {"a": [1.0] * 4, "b": [1.0] * 4}
    assert ratio(samples, "a", "b") == 1.0


def test_a_page_for_the_text_detector_holds_ink() -> None:
    x = zoo_model("ppocr4-det").random_inputs(np.random.default_rng(0))["x"]
    assert x.shape == (1, 3, 320, 320)
    assert 0.02 < float((x < 0).mean()) < 0.5
