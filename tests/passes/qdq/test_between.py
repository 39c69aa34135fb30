"""No float tensor lies between two integer kernels unless an operator needs it, and the report says which."""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op as R

from tests.passes.qdq.helpers import module, native, passes, run
from tvmx.graph import from_relax
from tvmx.passes.qdq.between import floats_between
from tvmx.pipeline import fuse, lower, qdq

RNG = np.random.default_rng(6)
STEP = (relax.const(np.float32(0.05)), relax.const(np.uint8(120)))


def q(emit, x):
    return emit(R.quantize(x, *STEP, -1, "uint8"))


def dq(emit, x):
    return emit(R.dequantize(x, *STEP, -1, "float32"))


def rounded(emit, x):
    return dq(emit, q(emit, x))


def conv(emit, x, depth=16, out=16, stride=1, kernel=3):
    weight = RNG.integers(-60, 60, (kernel, kernel, depth, out)).astype(np.int8)
    scaled = emit(
        R.dequantize(relax.const(weight), relax.const(np.float32(0.01)), relax.const(np.int8(0)), 3, "float32")
    )
    pads = [kernel // 2] * 4
    return emit(R.nn.conv2d(x, scaled, strides=[stride] * 2, padding=pads, data_layout="NHWC", kernel_layout="HWIO"))


def graph_of(body, shape=(1, 12, 12, 16)):
    """(the lowered graph of a program over uint8 codes, the program)"""
    mod = module([(shape, "uint8")], lambda emit, v: q(emit, body(emit, dq(emit, v))))
    return from_relax(passes(mod, native(), qdq, lower, fuse), ["x"], ["y"]), mod


def listed(body):
    """(kept_by of each float tensor between integer kernels, the graph)"""
    graph, _ = graph_of(body)
    return [t.kept_by for t in floats_between(graph)], graph


def residual(emit, x):
    """Both operands of the sum come from convolutions; each is rounded."""
    a, b = rounded(emit, conv(emit, x)), rounded(emit, conv(emit, x, kernel=1))
    return conv(emit, rounded(emit, emit(R.add(a, b))))


def gate(emit, x):
    """Squeeze and excite: means of codes, a small convolution, its rounded result spread over the large tensor."""
    x = rounded(emit, conv(emit, x))
    small = rounded(emit, emit(R.mean(x, [1, 2], True)))
    small = rounded(emit, emit(R.sigmoid(conv(emit, small, kernel=1))))
    return conv(emit, rounded(emit, emit(R.multiply(x, small))))


def softmax(emit, x):
    x = rounded(emit, conv(emit, x))
    return conv(emit, rounded(emit, emit(R.nn.softmax(x, -1))))


def test_a_sum_of_two_convolutions_reads_codes():
    found, graph = listed(residual)
    assert found == []
    assert len(graph.nodes) == 3


def test_means_and_gates_read_codes():
    found, graph = listed(gate)
    assert found == []
    assert any("mean" in n.kernel and "_int8" in n.kernel for n in graph.nodes)


def test_a_softmax_is_named():
    found, _ = listed(softmax)
    assert found
    assert all("softmax" in names for names in found)


def test_what_lies_before_a_softmax_is_kept_by_it():
    """The sum is an element-wise kernel of its own; floats go in and come out because a softmax reads them."""

    def body(emit, x):
        x = rounded(emit, conv(emit, x))
        mean = emit(R.mean(emit(R.nn.relu(conv(emit, x))), [1, 2], True))
        return conv(emit, rounded(emit, emit(R.nn.softmax(emit(R.add(conv(emit, x), mean)), -1))))

    found, _ = listed(body)
    assert found
    assert all(names for names in found)


def test_a_float_convolution_is_named():
    def body(emit, x):
        x = rounded(emit, conv(emit, x))
        weight = relax.const(RNG.standard_normal((3, 3, 16, 16)).astype(np.float32))
        x = emit(R.nn.conv2d(x, weight, padding=[1] * 4, data_layout="NHWC", kernel_layout="HWIO"))
        return conv(emit, rounded(emit, x))

    found, _ = listed(body)
    assert found
    assert all(names == ("float conv2d",) for names in found)


def test_a_tensor_that_nothing_keeps_is_a_gap():
    """Two readers, one of which rounds: the other convolution reads floats, and the sum is no operator that asks."""

    def body(emit, x):
        x = emit(R.nn.relu(conv(emit, x)))
        return emit(R.add(conv(emit, rounded(emit, x)), x))

    found, _ = listed(body)
    assert () in found


def test_numbers_of_a_gate_are_those_of_its_float_meaning():
    _, mod = graph_of(gate)
    x = RNG.integers(0, 256, (1, 12, 12, 16)).astype(np.uint8)
    found, _ = run(mod, native(), [x])
    plain, _ = _unfused(mod, x)
    assert np.abs(found.astype(int) - plain.astype(int)).max() <= 1


def _unfused(mod, x):
    """Without the quantisation rules: dequantize, float operators, quantize."""
    import tvm
    from tvm.relax import VirtualMachine

    from tvmx.schedule import apply_default

    target = native()
    mod = passes(mod, target, lower, fuse)
    for gv, func in mod.functions_items():
        if isinstance(func, tvm.tirx.PrimFunc):
            mod[gv] = apply_default(func, target).func.with_attr("global_symbol", gv.name_hint)
    with tvm.transform.PassContext(opt_level=3, config={"tirx.disable_assert": True}):
        executable = tvm.compile(mod, target.tvm())
    return VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy(), None


def test_the_gates_of_a_recurrent_cell_are_named():
    def body(emit, x):
        x = rounded(emit, conv(emit, x))
        gates = emit(R.split(conv(emit, x, out=32), 2, -1))
        opened, value = (emit(relax.TupleGetItem(gates, k)) for k in (0, 1))
        return conv(emit, rounded(emit, emit(R.multiply(emit(R.sigmoid(opened)), emit(R.tanh(value))))))

    found, _ = listed(body)
    assert found
    assert all(names == ("gates of a recurrent cell",) for names in found)
