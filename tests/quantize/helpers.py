"""Quantising in tests: ONNX Runtime stands in for the compiled program, so that a test takes milliseconds."""

from __future__ import annotations

import numpy as np
import onnx

from tests.onnx_models import reference
from tvmx.quantize import Scheme, collect, feeds, finish, input_specs, make_plan, prepare_model, watched
from tvmx.quantize.moments import MomentCollector
from tvmx.target import PRESETS

TARGET = PRESETS["x86_64-avx512-vnni"]


def normal_feeds(proto, count=8, seed=0):
    """`count` feeds of standard normal inputs in the model's declared shapes."""
    rng = np.random.default_rng(seed)
    shapes = {i.name: [d.dim_value or 1 for d in i.type.tensor_type.shape.dim] for i in proto.graph.input}
    return [{k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(count)]


def plan_of(proto, scheme=None, target=TARGET):
    prepared, name = prepare_model(proto)
    return make_plan(prepared, name, (scheme or Scheme(prefer="size")).for_target(target), target)


def calibration_of(plan, data, tensors=None, adaptive=False):
    moments = MomentCollector.of(plan.graph, plan.placement.layers if adaptive else ())
    tensors = tuple(dict.fromkeys((*(tensors or plan.tensors), *moments.tensors)))
    shown = watched(plan.graph, tensors)
    stream = feeds(data, input_specs(plan.graph))
    return collect(lambda feed: reference(shown.model, feed), stream, shown.outputs, plan.placement.tensors, moments)


def quantized(proto, data=None, observer="minmax", scheme=None, **options):
    """The QuantizedModel of a small float model."""
    plan = plan_of(proto, scheme)
    return finish(plan, calibration_of(plan, data or normal_feeds(proto)), observer, **options)


def sqnr(model, other, data, output=None):
    """Of one output (the first) over all feeds, in dB."""
    a, b = ([reference(m, f) for f in data] for m in (model, other))
    name = output or next(iter(a[0]))
    signal = np.concatenate([x[name].ravel() for x in a]).astype(np.float64)
    noise = signal - np.concatenate([x[name].ravel() for x in b])
    return 10 * np.log10((signal**2).mean() / max((noise**2).mean(), 1e-30))


def ops(proto):
    return [n.op_type for n in proto.graph.node]


def constants(proto):
    """Initialisers by name."""
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
