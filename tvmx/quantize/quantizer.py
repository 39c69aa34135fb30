"""The stage as a whole: placement → calibration → parameters → QDQ model and report. Runs nothing by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto

from tvmx.quantize.calibrate import Calibration
from tvmx.quantize.checks import data_warnings
from tvmx.quantize.cost import CostHook, layer_cost, modelled
from tvmx.quantize.graph import Array, OnnxGraph
from tvmx.quantize.insert import Inserted, insert_qdq
from tvmx.quantize.model import QuantizedModel, with_kept
from tvmx.quantize.observers import (
    OBSERVERS,
    ObserverOptions,
    observe,
    quantization_error,
    signal_power,
    sqnr_db,
)
from tvmx.quantize.placement import HEAVY, MAX_CONCAT_RATIO, Placement, place
from tvmx.quantize.qparams import QParams, QWeight, activation_qparams
from tvmx.quantize.report import LayerReport, QuantReport
from tvmx.quantize.scheme import ResolvedScheme
from tvmx.quantize.sensitivity import Sensitivity
from tvmx.target import Target

FIRST_SHARE = 0.05


@dataclass(frozen=True)
class Plan:
    """What is quantised in a prepared model. `refuse`: operators left in float by cost, sensitivity or ranges."""

    proto: ModelProto
    name: str
    graph: OnnxGraph
    scheme: ResolvedScheme
    placement: Placement
    refuse: Mapping[str, str] = field(default_factory=dict)

    def without(self, refuse: Mapping[str, str]) -> Plan:
        """The plan with more operators left in float: name → reason."""
        merged = {**self.refuse, **refuse}
        return dataclasses.replace(self, placement=place(self.graph, self.scheme, merged), refuse=merged)

    @property
    def tensors(self) -> tuple[str, ...]:
        """What calibration has to watch: each tensor with parameters of its own, and the parts of a Concat."""
        parts = [
            self.graph.nodes[la.node].input[i]
            for la in self.placement.layers
            if la.op == "Concat"
            for i in la.activations
        ]
        gates = [n.output[0] for n in self.graph.nodes if n.op_type in ("Sigmoid", "HardSigmoid", "Clip", "Tanh")]
        known = {*self.placement.tensors.values()}
        return tuple(dict.fromkeys((*self.placement.roots, *parts, *(g for g in gates if g in known))))


def make_plan(
    proto: ModelProto,
    name: str,
    scheme: ResolvedScheme,
    target: Target,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    cost: CostHook | None = None,
) -> Plan:
    """Place Q/DQ in a prepared model; `cost` (by default `cost.modelled`) may leave heavy operators in float.

    With `prefer="size"`, or an override that says int8, the cost model is not asked. Raises ConfigError.
    """
    graph = OnnxGraph(proto, input_shapes)
    plan = Plan(proto, name, graph, scheme, place(graph, scheme))
    if scheme.scheme.keep_first is None:
        plan = plan.without(_cheap_first(plan))
    if scheme.scheme.prefer == "size":
        return plan
    while refuse := _too_costly(plan, target, cost or modelled):  # what follows a float layer has to round again
        plan = plan.without(refuse)
    return plan


def _cheap_first(plan: Plan) -> dict[str, str]:
    """Convolutions of the model's own input with a small share of all products, and why they stay in float.

    Pictures have 8 bits already, on a grid of their own: a second rounding shifts every plain surface a little, and
    what is lost there no later layer can mend, whereas three channels hardly fill an integer instruction.
    """
    costs = {}
    for layer in plan.placement.layers:
        cost = layer_cost(plan.graph, plan.graph.nodes[layer.node], ()) if layer.op in HEAVY else None
        if cost is not None:
            costs[layer.name] = cost.macs
    total, refuse = sum(costs.values()), {}
    for layer in plan.placement.layers:
        node = plan.graph.nodes[layer.node]
        if layer.op != "Conv" or node.input[0] not in plan.graph.inputs or layer.name not in costs:
            continue
        if plan.scheme.scheme.precision_of(layer.name, layer.op) == "int8":
            continue
        share = costs[layer.name] / max(total, 1)
        if share <= FIRST_SHARE:
            refuse[layer.name] = f"it reads the model's input and has only {100 * share:.1f} % of the products"
    return refuse


def _too_costly(plan: Plan, target: Target, hook: CostHook) -> dict[str, str]:
    """The first layers, in graph order, that the cost model would rather leave in float, and why."""
    for layer in plan.placement.layers:
        if layer.op not in HEAVY or plan.scheme.scheme.precision_of(layer.name, layer.op) == "int8":
            continue
        node, limit = plan.graph.nodes[layer.node], plan.scheme.weight_limit
        sizes = layer_cost(plan.graph, node, plan.placement.rounded, layer.name, limit)
        reason = hook(sizes, target) if sizes is not None else None
        if reason is not None:
            return {layer.name: reason}
    return {}


def settle_concats(plan: Plan, calibration: Calibration) -> Plan:
    """Leave a Concat in float whose parts differ so much in range that one scale would flatten the smaller."""
    refuse = {}
    for layer in plan.placement.layers:
        if layer.op != "Concat":
            continue
        names = [plan.graph.nodes[layer.node].input[i] for i in layer.activations]
        peaks = [max(abs(s.low), abs(s.high)) if not s.empty else 0.0 for s in map(calibration.of, names)]
        peaks = [p for p in peaks if p > 0]
        if peaks and max(peaks) > MAX_CONCAT_RATIO * min(peaks):
            refuse[layer.name] = f"the ranges of its parts differ {max(peaks) / min(peaks):.0f} times"
    return plan.without(refuse) if refuse else plan


def choose_qparams(plan: Plan, calibration: Calibration, observer: str) -> dict[str, QParams]:
    """Parameters of each root tensor by one observer."""
    found = {}
    for root in plan.placement.roots:
        options = options_of(plan, root)
        low, high = observe(observer, calibration.of(root), options)
        found[root] = activation_qparams(low, high, options.dtype, options.symmetric)
    return found


def options_of(plan: Plan, root: str) -> ObserverOptions:
    """How a root tensor is quantised: symmetric int8 where the scheme or its use as a second operand asks for it."""
    signed = plan.scheme.symmetric or root in plan.placement.signed
    return ObserverOptions(plan.scheme.scheme.percentile, signed, "int8" if signed else "uint8")


@dataclass(frozen=True)
class Draft:
    """A plan with the parameters chosen and the QDQ model they give."""

    plan: Plan
    qparams: dict[str, QParams]
    inserted: Inserted


def draft(plan: Plan, calibration: Calibration, observer: str, biases: Mapping[str, Array] | None = None) -> Draft:
    """The QDQ model by one observer. `biases`: corrected float biases by layer."""
    plan = settle_concats(plan, calibration)
    qparams = choose_qparams(plan, calibration, observer)
    limit = plan.scheme.weight_limit
    made = insert_qdq(plan.graph, plan.placement, qparams, limit, biases, calibration.moments)
    return Draft(plan, qparams, made)


def finish(
    plan: Plan,
    calibration: Calibration,
    observer: str,
    compare_all: bool = False,
    biases: Mapping[str, Array] | None = None,
    measured: Sensitivity | None = None,
) -> QuantizedModel:
    """The QDQ model by one observer and its report.

    With `compare_all` the report holds the error of every observer. Layers that `measured` leaves in float stay in
    float here.
    """
    if measured is not None and measured.in_float:
        plan = plan.without(
            {
                name: f"max_drop keeps it in float: {100 * measured.noise[name]:.1f} % of the noise at the outputs"
                for name in measured.in_float
            }
        )
    made = draft(plan, calibration, observer, biases)
    plan = made.plan
    names = OBSERVERS if compare_all else {observer: None}
    report = QuantReport(
        layers=tuple(_layer_reports(made, calibration, measured)),
        kept=tuple((k.name, k.op, k.reason) for k in plan.placement.kept),
        weight_only=tuple((w.name, w.op) for w in plan.placement.weight_only),
        warnings=tuple(data_warnings(plan.graph, plan.placement, calibration)),
        observer=observer,
        samples=calibration.samples,
        bytes_before=_parameter_bytes(plan.proto),
        bytes_after=_parameter_bytes(made.inserted.model),
        observers={n: mean_sqnr(plan, calibration, choose_qparams(plan, calibration, n)) for n in names},
        accuracy=_accuracy(measured),
    )
    return QuantizedModel(with_kept(made.inserted.model, report.kept), plan.name, report)


def _accuracy(measured: Sensitivity | None) -> dict[str, Any]:
    if measured is None:
        return {}
    facts: dict[str, Any] = {"metric": measured.metric, "quantized": measured.before}
    if measured.in_float:
        facts |= {"with layers in float": measured.after, "layers in float": list(measured.in_float)}
    return facts


def mean_sqnr(plan: Plan, calibration: Calibration, qparams: Mapping[str, QParams]) -> float:
    """Mean SQNR in dB of the quantised tensors, by their histograms."""
    values = [tensor_sqnr(calibration, root, qparams[root]) for root in plan.placement.roots]
    finite = [v for v in values if np.isfinite(v)]
    return float(np.mean(finite)) if finite else float("inf")


def tensor_sqnr(calibration: Calibration, name: str, params: QParams) -> float:
    """SQNR in dB of one activation; inf for one that was constant or never finite."""
    stats = calibration.of(name)
    if stats.empty or stats.constant:
        return float("inf")
    return sqnr_db(signal_power(stats), quantization_error(stats, params))


def _layer_reports(made: Draft, calibration: Calibration, measured: Sensitivity | None) -> Iterator[LayerReport]:
    graph, placement = made.plan.graph, made.plan.placement
    noise = {root: tensor_sqnr(calibration, root, params) for root, params in made.qparams.items()}
    for layer in placement.layers:
        node = graph.nodes[layer.node]
        worst = min((placement.tensors[node.input[i]] for i in layer.activations), key=lambda root: noise[root])
        weight_db = float("inf")
        if layer.weight is not None:
            name = node.input[layer.weight]
            value = graph.constant(name)
            assert value is not None
            weight_db = _weight_sqnr(value, made.inserted.weights[(name, layer.weight_axis)])
        params = made.qparams[worst]
        yield LayerReport(
            name=layer.name,
            op=layer.op,
            input_range=(params.low, params.high),
            input_db=noise[worst],
            weight_db=weight_db,
            measured_db=None if measured is None else measured.measured_db.get(layer.name),
        )


def _weight_sqnr(weight: Array, quantized: QWeight) -> float:
    value = weight.astype(np.float64)
    return sqnr_db(float(np.mean(value**2)), float(np.mean((value - quantized.dequantized()) ** 2)))


def _parameter_bytes(model: ModelProto) -> int:
    total = 0
    for tensor in model.graph.initializer:
        elements = int(np.prod(tensor.dims, dtype=object)) if tensor.dims else 1
        total += elements * _ITEM_BYTES.get(tensor.data_type, 4)
    return total


_ITEM_BYTES = {1: 4, 2: 1, 3: 1, 4: 2, 5: 2, 6: 4, 7: 8, 9: 1, 10: 2, 11: 8, 16: 2}  # by ONNX element type
