"""Quantising and calibrating a model: composes tvmx.quantize with the compiler that runs what it watches."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from tvmx.config import CompileConfig, Shapes
from tvmx.errors import ConfigError
from tvmx.quantize import (
    Calibration,
    Plan,
    Preprocess,
    QuantizedModel,
    Scheme,
    collect,
    feeds,
    finish,
    input_specs,
    load_calibration,
    make_plan,
    prepare_model,
    watched,
)
from tvmx.quantize.balance import add_peaks, balance, balanceable
from tvmx.quantize.bias_correction import corrected_biases
from tvmx.quantize.cost import CostHook, measured
from tvmx.quantize.data import Feed, Source
from tvmx.quantize.equalize import equalize
from tvmx.quantize.graph import Array, OnnxGraph, node_name
from tvmx.quantize.metrics import Metric
from tvmx.quantize.moments import MomentCollector
from tvmx.quantize.observers import DEFAULT_OBSERVER
from tvmx.quantize.placement import HEAVY
from tvmx.quantize.quantizer import Draft, draft
from tvmx.quantize.scheme import ResolvedScheme
from tvmx.quantize.sensitivity import Sensitivity, SwitchedRuns, analyse
from tvmx.quantize.settings import QuantizeConfig
from tvmx.quantize.switched import switchable, switched_model
from tvmx.quantize.timing import case_of, measure_cases
from tvmx.target import Target, cpu_features, cpu_model, detect_host, resolve

log = logging.getLogger(__name__)

MEASURED_SAMPLES = 128
MEASURED_BYTES = 128 << 20  # of those samples
BALANCED_SAMPLES = 16
CORRECTED_SAMPLES = 4  # a run for each of them and each layer
PROFILED_RUNS = 20  # of every layer, where its speed is measured
MAX_SHAPES = 8  # programs compiled for one calibration; each takes seconds


def quantize(
    model: Any,
    calibration: Source | Calibration,
    observer: str | None = None,
    scheme: Scheme | None = None,
    *,
    max_drop: float | None = None,
    metric: str | Metric | None = None,
    target: str | Target = "native",
    threads: int | None = None,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    preprocess: Preprocess | None = None,
    config: QuantizeConfig | None = None,
) -> QuantizedModel:
    """Quantise a float32 ONNX model (path, bytes or ModelProto) after training; returns the QDQ model and a report.

    `calibration`: real inputs (see `tvmx.quantize.feeds`), or a Calibration made before, or its file. `observer`:
    minmax, ema, percentile, entropy, mse (the default), or "all", which compares their errors in the report and
    uses the default. `max_drop`: the share of accuracy that may go by `metric` ("auto", "top1", "cosine", "sqnr" or a
    function of the outputs); layers responsible for more stay in float. `preprocess` says how pictures become
    inputs. `config` holds the remaining options; what is given here wins over it. Raises ModelError, ConfigError or
    InputError.
    """
    given = {"observer": observer, "scheme": scheme, "max_drop": max_drop, "metric": metric}
    config = _merged(config, threads=threads, image=preprocess, **given)
    chosen = resolve(target if target != "native" else config.target, config.threads)
    with ExitStack() as stack:
        job = _Job.open(model, calibration, config, chosen, shapes, constants)
        found = job.calibrate(stack)
        used = DEFAULT_OBSERVER if config.observer == "all" else config.observer
        biases, measured = job.refine(found, used, config, stack)
        made = finish(job.plan, found, used, config.observer == "all", biases, measured)
        return job.warned(made)


def calibrate(
    model: Any,
    calibration: Source,
    *,
    target: str | Target = "native",
    threads: int | None = None,
    shapes: Shapes | None = None,
    constants: Mapping[str, np.ndarray] | None = None,
    preprocess: Preprocess | None = None,
    config: QuantizeConfig | None = None,
    every_tensor: bool = False,
) -> Calibration:
    """Only the statistics that `quantize` needs: `.save("ranges.json")`, and `quantize` takes them with any observer.

    `every_tensor` watches all float tensors, as `plan_precision(ranges=)` wants them, at the cost of time.
    Raises ModelError, ConfigError or InputError.
    """
    config = _merged(config, threads=threads, image=preprocess)
    # Every tensor that any scheme may quantise.
    scheme = dataclasses.replace(config.scheme, prefer="size", rounding="nearest", keep_first=False)
    config = dataclasses.replace(config, scheme=scheme)
    chosen = resolve(target if target != "native" else config.target, config.threads)
    with ExitStack() as stack:
        return _Job.open(model, calibration, config, chosen, shapes, constants).calibrate(stack, every_tensor)


def _merged(config: QuantizeConfig | None, **given: Any) -> QuantizeConfig:
    return dataclasses.replace(config or QuantizeConfig(), **{k: v for k, v in given.items() if v is not None})


@dataclass
class _Job:
    """A model with the plan for it and the data to calibrate it with."""

    plan: Plan
    target: Target
    data: Iterator[Feed]
    known: Calibration | None
    peaks: dict[str, Array]
    keep: int = 0  # samples that measuring will need
    moments: bool = False  # whether weights are rounded by what their layers read
    samples: list[Feed] = field(default_factory=list)  # the first of the data, kept to measure accuracy on

    @classmethod
    def open(
        cls,
        model: Any,
        calibration: Source | Calibration,
        config: QuantizeConfig,
        target: Target,
        shapes: Shapes | None,
        constants: Mapping[str, np.ndarray] | None,
    ) -> _Job:
        if isinstance(model, QuantizedModel):
            raise ConfigError("this model is quantised already")
        proto, name = prepare_model(model, shapes, constants)
        if config.scheme.equalize:
            proto, pairs = equalize(proto)
            log.info("%s: %d pairs of layers equalised", name, pairs)
        if isinstance(calibration, str | Path) and Path(calibration).suffix == ".json":
            calibration = load_calibration(calibration)
        known = calibration if isinstance(calibration, Calibration) else None
        data: Iterator[Feed] = iter(())
        if known is None:
            data = feeds(calibration, input_specs(OnnxGraph(proto)), config.image)
            first = next(data, None)
            if first is None:
                raise ConfigError("the calibration data is empty; give at least one sample, better a hundred")
            fixed = {k: v.shape for k, v in first.items()}
            data = itertools.chain([first], data)
        else:
            fixed = {i: s.shape for i, s in known.stats.items() if i in {v.name for v in proto.graph.input}}
        peaks = known.peaks if known is not None else {}
        if config.scheme.balance:
            graph = OnnxGraph(proto, fixed)
            if known is None:
                peaks, data = _channel_peaks(graph, data, target)
            proto, count = balance(graph, peaks)
            log.info("%s: %d convolutions balanced", name, count)
        scheme = config.scheme.for_target(target)
        plan = make_plan(proto, name, scheme, target, fixed, _cost_hook(proto, scheme, target, fixed, config))
        adaptive = config.scheme.rounding == "adaptive"
        measuring = config.measure or config.max_drop is not None or config.scheme.bias_correction
        keep = MEASURED_SAMPLES if measuring else 0
        return cls(plan, target, data, known, peaks if config.scheme.balance else {}, keep, adaptive)

    def calibrate(self, stack: ExitStack, every_tensor: bool = False) -> Calibration:
        if self.known is not None:
            return self.known
        layers = self.plan.placement.layers if self.moments else ()
        moments = MomentCollector.of(self.plan.graph, layers)
        every = self.float_results() if every_tensor else []
        tensors = tuple(dict.fromkeys((*self.plan.tensors, *self.float_inputs(), *moments.tensors, *every)))
        shown = watched(self.plan.graph, tensors)
        run = CompiledRun(shown.model, self.target, stack)
        found = collect(run, self._keeping(), shown.outputs, self.plan.placement.tensors, moments)
        return dataclasses.replace(found, peaks=self.peaks)

    def warned(self, model: QuantizedModel) -> QuantizedModel:
        """The result, with a warning where ranges had to do for data."""
        if self.known is None or not self.moments:
            return model
        text = "ranges hold no inputs to round weights by: they are rounded to nearest; give the data to do better"
        report = dataclasses.replace(model.report, warnings=(*model.report.warnings, text))
        return dataclasses.replace(model, report=report)

    def _keeping(self) -> Iterator[Feed]:
        room = MEASURED_BYTES
        for feed in self.data:
            room -= sum(a.nbytes for a in feed.values())
            if len(self.samples) < self.keep and (room >= 0 or not self.samples):
                self.samples.append(feed)
            yield feed

    def float_inputs(self) -> list[str]:
        """Float inputs are watched whether quantised or not: checks look at them, and they cost nothing."""
        return [name for name in self.plan.graph.inputs if self.plan.graph.is_float(name)]

    def float_results(self) -> list[str]:
        graph = self.plan.graph
        return [out for node in graph.nodes for out in node.output if out and graph.is_float(out)]

    def refine(
        self, found: Calibration, observer: str, config: QuantizeConfig, stack: ExitStack
    ) -> tuple[dict[str, Array], Sensitivity | None]:
        """Corrected biases, and what measuring said, as far as the options ask for either.

        With `max_drop`, correction is tried before any layer is left in float, unless the scheme says no or rounding
        to the data has corrected biases already.
        """
        correction, biases = config.scheme.bias_correction, dict[str, Array]()
        wanted = config.measure or config.max_drop is not None
        if not wanted and not correction:
            return biases, None
        made = draft(self.plan, found, observer)
        run = self._switched(made, stack)
        if not correction:
            correctable = correction is None and not self.moments
            measured = self._analyse(made, run, config, None if correctable else config.max_drop)
            enough = config.max_drop is None or measured.before >= 1 - config.max_drop
            if enough or not correctable:
                return biases, measured
        biases = corrected_biases(run, self.samples[:CORRECTED_SAMPLES], made.plan.graph, made.plan.placement)
        made = draft(self.plan, found, observer, biases)
        run = self._switched(made, stack) if wanted else run
        return biases, self._analyse(made, run, config, config.max_drop) if wanted else None

    def _switched(self, made: Draft, stack: ExitStack) -> CompiledRun:
        if not self.samples:
            raise ConfigError("measuring accuracy runs the model on real inputs; give them instead of ranges")
        proto = switched_model(made.plan.graph, made.plan.placement, made.inserted, show=True)
        return CompiledRun(proto, self.target, stack)

    def _analyse(self, made: Draft, run: CompiledRun, config: QuantizeConfig, max_drop: float | None) -> Sensitivity:
        graph, placement = made.plan.graph, made.plan.placement
        shown = {la.name: graph.nodes[la.node].output[0] for la in switchable(placement)}
        outputs = [name for name in graph.outputs if graph.is_float(name)]
        if not outputs:
            raise ConfigError("the model has no float32 output to measure accuracy by")
        runs = SwitchedRuns(run, self.samples, placement, outputs, shown)
        runs.limit()
        return analyse(runs, placement, config.metric, max_drop)


def _cost_hook(
    proto: ModelProto,
    scheme: ResolvedScheme,
    target: Target,
    shapes: Mapping[str, tuple[int, ...]],
    config: QuantizeConfig,
) -> CostHook | None:
    """What `measure_speed` found of each layer, as a cost hook; None where it is off or this machine is another."""
    if not config.measure_speed or scheme.scheme.prefer == "size":
        return None
    if not target.features <= cpu_features() or target.arch != detect_host().arch:
        raise ConfigError(f"measure_speed runs layers, and this machine cannot run code for {target.name}")
    graph = OnnxGraph(proto, shapes)
    cases = {
        node_name(node): case
        for node in graph.nodes
        if node.op_type in HEAVY and (case := case_of(graph, node, scheme.weight_limit)) is not None
    }
    machine = f"{cpu_model()} {target.threads} {' '.join(sorted(target.needed_features()))}"
    log_path = None if config.speed_log is None else Path(config.speed_log)
    times = measure_cases(cases.values(), lambda program: _kernel_seconds(program, target), log_path, machine)
    return measured({name: times[case.key] for name, case in cases.items() if case.key in times})


def _kernel_seconds(program: ModelProto, target: Target) -> list[float]:
    """Seconds of each product and convolution of a program, in its order."""
    from tvmx.api import compile as compile_model
    from tvmx.runtime import GraphExecutor

    with tempfile.TemporaryDirectory(prefix="tvmx-layers-") as folder:
        config = CompileConfig(planner_budget_s=0.2)
        path = compile_model(program, Path(folder) / "layers.so", target=target, config=config).path
        with GraphExecutor(path, threads=target.threads) as executor:
            for info in executor.inputs:
                executor.set_input(info.name, np.ones([int(d) for d in info.shape], info.dtype))
            kernels = executor.profile(PROFILED_RUNS).kernels
    return [k.seconds for k in kernels if re.search(r"matmul|conv[123]d", k.kernel)]


def _channel_peaks(graph: OnnxGraph, data: Iterator[Feed], target: Target) -> tuple[dict[str, Array], Iterator[Feed]]:
    """Peaks of each channel that a depthwise convolution reads, from the first samples; and the whole data again."""
    peaks: dict[str, Array] = {}
    names = balanceable(graph)
    if not names:
        return peaks, data
    first = list(itertools.islice(data, BALANCED_SAMPLES))
    shown = watched(graph, names)
    with ExitStack() as stack:
        run = CompiledRun(shown.model, target, stack)
        for feed in first:
            made = run(feed)
            add_peaks(peaks, {name: made[output] for name, output in shown.outputs.items()})
    return peaks, itertools.chain(first, data)


class CompiledRun:
    """Runs an ONNX model through tvmx itself, compiled once for each set of input shapes."""

    def __init__(self, proto: ModelProto, target: Target, stack: ExitStack) -> None:
        """Programs and their files live until `stack` closes."""
        self._proto = proto
        self._target = target
        self._stack = stack
        self._programs: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __call__(self, feed: Feed) -> Mapping[str, Array]:
        """Outputs by name; views that the next call overwrites. Raises ConfigError when shapes vary too much."""
        key = tuple(a.shape for a in feed.values())
        if key not in self._programs:
            if len(self._programs) == MAX_SHAPES:
                raise ConfigError(
                    f"calibration inputs come in more than {MAX_SHAPES} shapes; pad or sort them into fewer"
                )
            self._programs[key] = self._compile({name: a.shape for name, a in feed.items()})
        program = self._programs[key]
        for name, array in feed.items():
            program.set_input(name, array)
        program.run()
        return {t.name: program.get_output(t.name) for t in program.outputs}

    def _compile(self, shapes: dict[str, tuple[int, ...]]) -> Any:
        from tvmx.api import compile as compile_model
        from tvmx.runtime import GraphExecutor

        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tvmx-calibrate-")))
        config = CompileConfig(planner_budget_s=0.2)
        path = compile_model(
            self._proto, folder / "model.so", target=self._target, shapes=dict(shapes), config=config
        ).path
        executor = GraphExecutor(path)
        return self._stack.enter_context(executor)
