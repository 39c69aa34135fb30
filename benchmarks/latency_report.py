"""The latency table, and what the figures say of the project's bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def table(rows: Sequence[Row], means: bool = True) -> list[str]:
    """One line a model and thread count, then the geometric means of the ratios."""
    lines = [
        f"{'model':14}{'thr':>4}{'untuned':>10}{'tuned':>10}{'ORT':>10}{'OpenVINO':>10}"
        f"{'un/ORT':>8}{'un/best':>8}{'tu/best':>8}{'tu/un':>8}{'error':>9}{'compile':>9}"
    ]
    found: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['model']:14}{row['threads']:4}  FAILED: {row['failed']}")
            continue
        ms = row["median_ms"]
        cells = [f"{ms[k]:10.3f}" if k in ms else f"{'-':>10}" for k in ("untuned", "tuned", "onnxruntime", "openvino")]
        ratios = row["ratios"]
        against = {
            "un/ORT": ratios["untuned"]["onnxruntime"],
            "un/best": max(ratios["untuned"].values()),
            "tu/best": max(ratios["tuned"].values()) if "tuned" in ratios else None,
            "tu/un": row.get("tuned_over_untuned"),
        }
        for key, value in against.items():
            if value is not None:
                found.setdefault((row["threads"], key), []).append(value)
        shown = "".join(f"{v:8.2f}" if v is not None else f"{'-':>8}" for v in against.values())
        lines.append(
            f"{row['model']:14}{row['threads']:4}{''.join(cells)}{shown}"
            f"{row['error_untuned']:9.1e}{row['compile_untuned_s']:8.1f}s"
        )
    for (threads, key), values in sorted(found.items()) if means else ():
        lines.append(f"geometric mean, {threads} thread(s), {key}: {statistics.geometric_mean(values):.3f}")
    return lines


def bars(rows: Sequence[Row]) -> list[str]:
    """One line a bar: untuned (and tuned) against the peers, ResNet-18, errors, compile time."""
    lines = []
    good = [row for row in rows if "failed" not in row]
    for threads in sorted({row["threads"] for row in good}):
        here = [row for row in good if row["threads"] == threads]
        ort = {r["model"]: r["ratios"]["untuned"]["onnxruntime"] for r in here}
        best = {r["model"]: max(r["ratios"]["untuned"].values()) for r in here}
        worst = max(best, key=lambda name: best[name])
        at = f"{threads} thread(s)"
        lines.append(_bar(f"{at}: untuned, mean over ONNX Runtime", statistics.geometric_mean(ort.values()), 1.0))
        lines.append(_bar(f"{at}: untuned, mean over the better peer", statistics.geometric_mean(best.values()), 1.3))
        lines.append(_bar(f"{at}: untuned, worst over the better peer ({worst})", best[worst], 1.6))
        if "resnet18" in ort:
            lines.append(_bar(f"{at}: resnet18 untuned over ONNX Runtime", ort["resnet18"], 0.9))
        tuned = [max(r["ratios"]["tuned"].values()) for r in here if "tuned" in r["ratios"]]
        if tuned:
            lines.append(_bar(f"{at}: tuned, mean over the better peer", statistics.geometric_mean(tuned), 1.0))
    errors = {
        f"{row['model']}, {kind} input": row[key]
        for row in good
        for kind, key in (("random", "error_untuned"), ("real", "error_real_untuned"))
        if row.get(key) is not None
    }
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        lines.append(_bar(f"largest error, share of the output's range ({worst})", errors[worst], 1e-4))
        slow = max(good, key=lambda row: row["compile_untuned_s"])
        lines.append(_bar(f"slowest untuned build, s ({slow['model']})", slow["compile_untuned_s"], 60.0))
    return lines


def _bar(what: str, value: float, limit: float) -> str:
    return f"{'ok  ' if value <= limit else 'MISS'}  {what}: {value:.3g} (at most {limit:g})"
