"""If, Loop, Scan inlined and unrolled: against ONNX Runtime running the control flow itself."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from tests.frontend.rewrite.check import assert_same, backend_cases, check_backend_case, ops_of, ort_run
from tvmx.errors import ModelError
from tvmx.frontend.rewrite import control_flow, rewrite_all, split_if

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def model_of(text: str, version: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {version}]>\n{text}')


IF = """
agraph (float[2,3] x, bool c) => (float[2,3] y) <bool yes = {{1}}> {{
    z = Neg(x)
    y = If ({condition}) <
        then_branch = g1 () => (float[2,3] a) {{ a = Add(x, z) }},
        else_branch = g2 () => (float[2,3] b) {{ t = {heavy}
            b = Mul(t, z) }}
    >
}}
"""


@pytest.mark.parametrize("value", [True, False])
def test_if_of_a_constant_takes_one_branch(value):
    model = model_of(IF.format(condition="yes", heavy="Exp(x)"))
    model.graph.initializer[0].int32_data[:] = [int(value)]
    rewritten = assert_same(model, {"x": X, "c": np.array(True)}, ["If", "Where"])
    assert ("Exp" in ops_of(rewritten)) is not value


@pytest.mark.parametrize("value", [True, False])
def test_if_of_an_input_with_cheap_branches_selects(value):
    model = model_of(IF.format(condition="c", heavy="Exp(x)"))
    rewritten = assert_same(model, {"x": X, "c": np.array(value)}, ["If"])
    assert "Where" in ops_of(rewritten)


def heavy_if():
    return model_of(IF.format(condition="c", heavy="Softmax(x)").replace("Softmax(x)", "MatMul(x, w)"))


def with_weight(model):
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32) * 3, "w"))
    return model


def test_if_of_an_input_with_a_heavy_branch_is_refused():
    with pytest.raises(ModelError, match=r"\(If\).*holds MatMul.*constants="):
        rewrite_all(with_weight(heavy_if()))


def test_division_is_not_run_when_its_branch_is_not_taken():
    with pytest.raises(ModelError, match="holds Div"):
        rewrite_all(model_of(IF.format(condition="c", heavy="Div(x, z)")))


@pytest.mark.parametrize("value", [True, False])
def test_split_if_makes_two_programs(value):
    model = with_weight(heavy_if())
    split = split_if(model)
    feeds = {"x": X, "c": np.array(value)}
    assert [i.name for i in split.condition.graph.input] == ["c"]
    (flag,) = ort_run(split.condition, feeds)
    assert flag.shape == ()
    program = split.then if flag else split.otherwise
    assert "If" not in ops_of(program)
    for part in (split.then, split.otherwise):
        assert [i.name for i in part.graph.input] == ["x", "c"]
        assert [o.name for o in part.graph.output] == ["y"]
    np.testing.assert_allclose(ort_run(program, feeds)[0], ort_run(model, feeds)[0], rtol=1e-6)


def test_split_if_without_an_if_is_none():
    assert split_if(model_of("agraph (float[2] x) => (float[2] y) { y = Neg(x) }")) is None


def test_nested_ifs_on_shapes_disappear():
    text = """
    agraph (float[2,3] x) => (float[1] y) <int64 two = {2}, int64[1] zero = {0}> {
        s = Shape(x)
        r = Size(s)
        c = Equal(r, two)
        y = If (c) <
            then_branch = g1 () => (float[1] a) {
                d = Gather(s, zero)
                e = Squeeze(d)
                f = Equal(e, two)
                a = If (f) <
                    then_branch = g3 () => (float[1] p) { m = ReduceMax<keepdims=0>(x)
                        p = Unsqueeze(m, zero) },
                    else_branch = g4 () => (float[1] q) { q = ReduceMean<axes=[0,1], keepdims=0>(x) }
                > },
            else_branch = g2 () => (float[1] b) { b = ReduceMin<axes=[0,1], keepdims=0>(x) }
        >
    }
    """
    rewritten = rewrite_all(model_of(text))
    assert [n.op_type for n in rewritten.graph.node] == ["ReduceMax", "Unsqueeze"]
    np.testing.assert_array_equal(ort_run(rewritten, {"x": X})[0], [5.0])


LOOP = """
agraph (float[2,3] x, bool c) => (float[2,3] last, float[N,2,3] all) <int64 n = {4}, bool yes = {1}> {
    w = Neg(x)
    last, all = Loop (%s, %s, x) <
        body = g (int64 i, bool cin, float[2,3] s) => (bool cout, float[2,3] s2, float[2,3] o) <int64 three = {3}> {
            f = Cast<to=1>(i)
            t = Add(s, f)
            s2 = Add(t, w)
            o = Mul(s2, x)
            cout = %s
        }
    >
}
"""


@pytest.mark.parametrize(
    ("trips", "condition", "after", "steps"),
    [
        ("n", "yes", "Identity(cin)", 4),
        ("n", "", "Less(i, three)", 4),
        ("n", "yes", "Less(three, i)", 1),
        ("", "yes", "Less(i, three)", 4),
    ],
)
def test_loop_with_known_trip_count(trips, condition, after, steps):
    model = model_of(LOOP % (trips, condition, after))
    rewritten = assert_same(model, {"x": X, "c": np.array(True)}, ["Loop"])
    assert sum(n.op_type == "Mul" for n in rewritten.graph.node) == steps


def test_loop_that_never_runs_keeps_its_state():
    model = model_of(LOOP % ("n", "yes", "Identity(cin)"))
    model.graph.initializer[0].int64_data[:] = [0]
    assert_same(model, {"x": X, "c": np.array(True)}, ["Loop"])


def test_loop_with_unknown_trip_count_is_refused():
    text = LOOP.replace("bool c)", "bool c, int64 m)") % ("m", "yes", "Identity(cin)")
    with pytest.raises(ModelError, match=r"\(Loop\): the trip count \('m'\) is not a constant"):
        rewrite_all(model_of(text))


def test_endless_loop_is_refused(monkeypatch):
    monkeypatch.setattr(control_flow, "LOOP_STEPS", 50)
    with pytest.raises(ModelError, match=r"\(Loop\): the loop does not end within 50"):
        rewrite_all(model_of(LOOP % ("", "yes", "Identity(cin)")))


def test_loop_that_collects_under_a_run_time_condition_is_refused():
    text = LOOP % ("n", "c", "Identity(cin)")
    with pytest.raises(ModelError, match="run-time condition"):
        rewrite_all(model_of(text))


@pytest.mark.parametrize("start", [0.5, 3.0, 100.0])
def test_loop_ending_on_data_is_masked(start):
    """while (mean(s) < 10) s = 2 s, at most 6 times."""
    text = """
    agraph (float[2,3] x) => (float[2,3] last) <int64 n = {6}, bool yes = {1}, float ten = {10.0}> {
        m0 = ReduceMean<keepdims=0>(x)
        c = Less(m0, ten)
        last = Loop (n, c, x) <
            body = g (int64 i, bool cin, float[2,3] s) => (bool cout, float[2,3] s2) {
                s2 = Add(s, s)
                m = ReduceMean<keepdims=0>(s2)
                cout = Less(m, ten)
            }
        >
    }
    """
    assert_same(model_of(text), {"x": np.full((2, 3), start, np.float32)}, ["Loop"])


SCAN = """
agraph (float[3] h, float[5,3] a, float[2,4,5] b) => (float[3] last, float[{ya}] y, float[{za}] z) {{
    last, y, z = Scan <num_scan_inputs=2, scan_input_axes=[0,{axis}], scan_input_directions=[{d0},{d1}],
        scan_output_axes=[{y},{z}], scan_output_directions=[{d1},{d0}],
        body = g (float[3] s, float[3] p, float[2,4] q) => (float[3] s2, float[3] o, float[2,4] r) {{
            s1 = Mul(s, p)
            s2 = Tanh(s1)
            o = Identity(s2)
            m = ReduceMean<keepdims=0>(s2)
            r = Add(q, m)
        }}
    > (h, a, b)
}}
"""


@pytest.mark.parametrize(("d0", "d1"), [(0, 0), (1, 0), (0, 1)])
@pytest.mark.parametrize("axes", [(2, 0, 0), (-1, 1, 2), (2, -1, -2)])
def test_scan(d0, d1, axes):
    axis, y, z = axes
    y_dims, z_dims = [3], [2, 4]
    y_dims.insert(y % 2, 5)
    z_dims.insert(z % 3, 5)
    dims = {"ya": ",".join(map(str, y_dims)), "za": ",".join(map(str, z_dims))}
    model = model_of(SCAN.format(d0=d0, d1=d1, axis=axis, y=y, z=z, **dims))
    rng = np.random.default_rng(0)
    feeds = {i: rng.standard_normal(s).astype(np.float32) for i, s in [("h", 3), ("a", (5, 3)), ("b", (2, 4, 5))]}
    assert_same(model, feeds, ["Scan"])


def test_weights_in_a_loop_body_are_shared_between_iterations():
    text = """
    agraph (float[2,3] x) => (float[2,3] y) <int64 n = {5}, bool yes = {1}> {
        y = Loop (n, yes, x) <
            body = g (int64 i, bool cin, float[2,3] s) => (bool cout, float[2,3] t)
                <float[3,3] w = {1,0,0,0,1,0,0,0,1}> {
                t = MatMul(s, w)
                cout = Identity(cin)
            }
        >
    }
    """
    rewritten = assert_same(model_of(text), {"x": X}, ["Loop"])
    assert len(rewritten.graph.initializer) == 1


@pytest.mark.parametrize("case", backend_cases("loop11", "scan9_sum", "scan_sum"))
def test_onnx_node_tests(case):
    check_backend_case(case, ["If", "Loop", "Scan"], bound=["trip_count", "cond"])
