"""Compile every model of `benchmarks.models` and compare it with ONNX Runtime.

python -m benchmarks.models --check [NAME ...] [--out checks.json]

One line a check: the model, what it is fed, the largest error of any output as a share of that output's range, the
seconds to compile. A model has several checks where its shapes decide which code it becomes: fixed, and symbolic dims
that one library serves at several lengths.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lock_step import cut
from benchmarks.measure import machine
from benchmarks.models import Inputs, ModelUnavailable, model_path, zoo

FLOAT = 1e-4  # the bar for float32, as a share of the range
# Activations quantised at run time, compared end to end: ONNX Runtime differs from itself by as much. What such a
# model is held to is FLOAT between its quantisers and equal codes at them (`lock_step.py`, docs/operators.md).
DYNAMIC_INT8 = 5e-2

Feed = Callable[[np.random.Generator], Inputs]


@dataclass(frozen=True)
class Check:
    """A model at some shapes, and what to feed it: each of `feeds` runs through the one compiled library."""

    model: str
    feeds: Sequence[Feed]
    shapes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    tolerance: float = FLOAT
    lock_step: bool = False  # cut at the run-time quantisers (`lock_step.py`) in place of end to end

    def what(self) -> str:
        """The shapes it is compiled for."""
        shapes = " ".join(f"{k}={'x'.join(map(str, v))}" for k, v in self.shapes.items())
        bound = " ".join(f"{k}:={np.asarray(v).tolist()}" for k, v in self.constants.items())
        cut = "cut at quantisers" if self.lock_step else ""
        return " ".join(filter(None, (cut, shapes, bound))) or "as in the model"


@dataclass(frozen=True)
class Result:
    """What one check found; `error` is a share of the range, None where the model did not run."""

    model: str
    what: str
    error: float | None
    tolerance: float
    seconds: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error <= self.tolerance

    def __str__(self) -> str:
        error = "-" if self.error is None else f"{self.error:.1e}"
        verdict = "ok" if self.ok else "MISS"
        return f"{self.model:20} {self.what:52.52} {error:>8} {self.seconds:6.1f} s  {verdict} {self.note}".rstrip()


def _normal(scale: float = 1.0, **shapes: tuple[int, ...]) -> Feed:
    return lambda rng: {k: (rng.standard_normal(s) * scale).astype(np.float32) for k, s in shapes.items()}


def _uniform(low: float, high: float, **shapes: tuple[int, ...]) -> Feed:
    return lambda rng: {k: rng.uniform(low, high, s).astype(np.float32) for k, s in shapes.items()}


def _tokens(batch: int, length: int, vocabulary: int, **zeros: None) -> Feed:
    def make(rng: np.random.Generator) -> Inputs:
        mask = np.ones((batch, length), np.int64)
        mask[:, length - length // 8 :] = 0
        ids = rng.integers(1, vocabulary, (batch, length), dtype=np.int64)
        return {"input_ids": ids, "attention_mask": mask, **{z: np.zeros((batch, length), np.int64) for z in zeros}}

    return make


def _vad(length: int, rate: int | None, batch: int = 1) -> Feed:
    def make(rng: np.random.Generator) -> Inputs:
        feed = _normal(0.1, input=(batch, length), state=(2, batch, 128))(rng)
        return feed if rate is None else {**feed, "sr": np.array(rate, np.int64)}

    return make


def _captcha(width: int) -> Feed:
    """Dark strokes on a light ground, as the recogniser takes pictures: grey in [-1, 1]."""

    def make(rng: np.random.Generator) -> Inputs:
        picture = np.full((64, width), 0.9)
        for left in range(8, width - 24, 24):
            glyph = np.kron(rng.random((8, 4)) < 0.45, np.ones((5, 4), bool))
            picture[12 : 12 + glyph.shape[0], left : left + glyph.shape[1]][glyph] = -0.8
        picture += rng.standard_normal(picture.shape) * 0.05
        return {"input1": picture[None, None].clip(-1, 1).astype(np.float32)}

    return make


def _decoder(batch: int, length: int, encoded: int) -> Feed:
    def make(rng: np.random.Generator) -> Inputs:
        return {
            "input_ids": rng.integers(1, 32000, (batch, length), dtype=np.int64),
            "encoder_hidden_states": (rng.standard_normal((batch, encoded, 512)) * 0.1).astype(np.float32),
            "encoder_attention_mask": np.ones((batch, encoded), np.int64),
        }

    return make


def checks() -> list[Check]:
    """Every model, at the shapes it is meant for."""
    sr = {"sr": np.array(16000, np.int64)}
    tokens = {"input_ids": (1, 64), "attention_mask": (1, 64)}
    named = {"input_ids": ("B", "S"), "attention_mask": ("B", "S")}
    vad = {"input": (1, 576), "state": (2, 1, 128)}
    return [
        *(Check(m.name, [m.random_inputs, *_real(m)], m.shapes, m.constants) for m in zoo()),
        Check("minilm-l3", [_tokens(1, 7, 20000), _tokens(2, 33, 20000)], named),
        Check("ppocr-cls", [_normal(x=(1, 3, 48, 192))], {"x": (1, 3, 48, 192)}),
        Check("ppocr-cls", [_normal(x=(1, 3, 48, 192)), _normal(x=(3, 3, 48, 192))], {"x": ("N", 3, 48, 192)}),
        Check("minilm-l6-int8", [_tokens(1, 64, 20000, token_type_ids=None)], {**tokens, "token_type_ids": (1, 64)}),
        Check("minilm-l6-int8", [_tokens(1, 9, 20000, token_type_ids=None), _tokens(2, 40, 20000, token_type_ids=None)],
              {**named, "token_type_ids": ("B", "S")}),
        Check("silero-vad", [_vad(576, 16000)], vad),
        Check("silero-vad-if", [_vad(576, None)], vad, sr),
        Check("silero-vad-if", [_vad(256 + 32, None)], {**vad, "input": (1, 288)}, {"sr": np.array(8000, np.int64)}),
        Check("silero-vad-if", [_vad(576, 16000)], vad),
        Check("silero-vad-op15", [_vad(576, None)], vad, sr),
        Check("silero-vad-op15", [_vad(576, 16000, 3)], {"input": (3, 576), "state": (2, 3, 128)}),
        Check("silero-vad-half", [_vad(576, None)], vad),
        Check("silero-vad-openvino", [_vad(576, None)]),
        Check("silero-vad-sequence", [_normal(0.1, input=(5, 576), h=(1, 1, 128), c=(1, 1, 128))], {"input": (5, 576)}),
        Check("melspec", [_normal(0.1, input=(1, 32000))], {"input": (1, 32000)}),
        Check("melspec", [_normal(0.1, input=(1, n)) for n in (1280, 16000, 32000)], {"input": (1, "T")}),
        Check("speech-embed", [_normal(input_1=(1, 76, 32, 1)), _normal(input_1=(4, 76, 32, 1))],
              {"input_1": ("N", 76, 32, 1)}),
        Check("mtcnn-p", [_uniform(-1, 1, input_1=(1, 96, 128, 3))], {"input_1": (1, 96, 128, 3)}),
        Check("mtcnn-p", [_uniform(-1, 1, input_1=(1, 12, 12, 3)), _uniform(-1, 1, input_1=(2, 61, 87, 3))],
              {"input_1": ("N", "H", "W", 3)}),
        Check("mtcnn-r", [_uniform(-1, 1, input_2=(n, 24, 24, 3)) for n in (1, 7)], {"input_2": ("N", 24, 24, 3)}),
        Check("mtcnn-o", [_uniform(-1, 1, input_3=(n, 48, 48, 3)) for n in (1, 7)], {"input_3": ("N", 48, 48, 3)}),
        *_dynamic("ddddocr-old", _captcha(160), {"input1": (1, 1, 64, 160)}),
        *_dynamic("ddddocr-old", _captcha(96), {"input1": (1, 1, 64, 96)}),
        *_dynamic("traceforge", _tokens(1, 64, 32000), tokens),
        Check("traceforge", [_tokens(1, 17, 32000), _tokens(2, 40, 32000)], named, tolerance=DYNAMIC_INT8),
        *_dynamic("traceforge-decoder", _decoder(1, 8, 32),
                  {"input_ids": (1, 8), "encoder_hidden_states": (1, 32, 512), "encoder_attention_mask": (1, 32)}),
    ]  # fmt: skip


def _dynamic(model: str, feed: Feed, shapes: Mapping[str, tuple[int, ...]]) -> list[Check]:
    """A model with run-time quantisers, end to end and in lock step."""
    return [Check(model, [feed], shapes, tolerance=DYNAMIC_INT8), Check(model, [feed], shapes, lock_step=True)]


def _real(model: Any) -> list[Feed]:
    """The model's real inputs as feeds; none where what they are made from is not installed."""
    if model.real_inputs is None:
        return []
    try:
        return [lambda rng, given=given: given for _, given in model.real_inputs()]
    except ModelUnavailable:
        return []


def run_check(check: Check, folder: Path, threads: int) -> Result:
    """Compile, run every feed, compare every output with ONNX Runtime's of the same name."""
    import tvmx
    from tvmx.runtime import GraphExecutor

    if check.lock_step:
        return _lock_step(check, folder, threads)
    path = folder / "check.so"
    start = time.perf_counter()
    try:
        compiled = tvmx.compile(
            str(model_path(check.model)), path, threads=threads, shapes=check.shapes or None,
            constants=check.constants or None,
        )  # fmt: skip
    except tvmx.TvmxError as error:
        seconds = time.perf_counter() - start
        return Result(check.model, check.what(), None, check.tolerance, seconds, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    session = _session(check, threads)
    names = [o.name for o in session.get_outputs()]
    worst = 0.0
    with GraphExecutor(path, threads=threads) as executor:
        for seed, feed in enumerate(check.feeds):
            inputs = feed(np.random.default_rng(seed))
            want = session.run(names, {**inputs, **_constants(check, session)})
            have = executor(inputs)
            worst = max([worst, *(share(have[name], value) for name, value in zip(names, want, strict=True))])
    note = f"VM: {compiled.report['vm_reason']}" if compiled.report.get("vm_reason") else ""
    return Result(check.model, check.what(), worst, check.tolerance, seconds, note)


def _lock_step(check: Check, folder: Path, threads: int) -> Result:
    """The operators between the quantisers, and the quantisers bit for bit: else an infinite error."""
    import onnx

    import tvmx
    from tvmx.runtime import GraphExecutor

    rest, quantisers = cut(onnx.load(model_path(check.model)), check.feeds[0](np.random.default_rng(0)))
    errors, seconds = [], 0.0
    for part in (rest, quantisers):
        path, start = folder / "part.so", time.perf_counter()
        tvmx.compile(part.proto, path, threads=threads, shapes={n: a.shape for n, a in part.inputs.items()})
        seconds += time.perf_counter() - start
        with GraphExecutor(path, threads=threads) as executor:
            have = executor({i.name: part.inputs[i.name] for i in executor.inputs})
        errors.append(max(share(have[name], want) for name, want in part.expected.items()))
        if part is quantisers and errors[-1]:
            errors.append(float("inf"))
    return Result(check.model, check.what(), max(errors), check.tolerance, seconds)


def _session(check: Check, threads: int) -> Any:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(str(model_path(check.model)), options, providers=["CPUExecutionProvider"])


def _constants(check: Check, session: Any) -> Inputs:
    wanted = {i.name for i in session.get_inputs()}
    return {name: np.asarray(value) for name, value in check.constants.items() if name in wanted}


def share(have: np.ndarray, want: np.ndarray) -> float:
    """Largest absolute error as a share of the range of `want`; infinite for another shape, dtype or NaN pattern."""
    if have.shape != want.shape or have.dtype != want.dtype:
        return float("inf")
    if not want.size:
        return 0.0
    a, b = have.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    span = float(np.nanmax(b) - np.nanmin(b)) or float(np.nanmax(np.abs(b))) or 1.0
    return float(np.nanmax(np.abs(a - b)) / span)


def run_checks(names: Sequence[str], threads: int = 1, out: Path | None = None) -> int:
    """Run the checks of the models named (all without names), print a line each. 1 when one misses, else 0."""
    found = [c for c in checks() if not names or c.model in names]
    results = []
    print(f"{'model':20} {'compiled for':52} {'error':>8} {'compile':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for check in found:
            try:
                results.append(run_check(check, Path(folder), threads))
            except ModelUnavailable as reason:
                print(f"{check.model:20} skipped: {reason}", flush=True)
                continue
            print(results[-1], flush=True)
    print(f"{sum(r.ok for r in results)} of {len(results)} agree with ONNX Runtime")
    if out is not None:
        from tvmx.report.files import write_text

        rows = [{**asdict(r), "ok": r.ok} for r in results]
        write_text(out, json.dumps({"machine": machine(), "rows": rows}, indent=1))
    return 0 if all(r.ok for r in results) else 1
