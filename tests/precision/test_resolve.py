"""Rules + operators → plan, on operators made by hand."""

import dataclasses

import pytest

from tvmx.errors import ConfigError
from tvmx.precision import Assignment, PrecisionRules, resolve
from tvmx.precision.operator import Operator
from tvmx.target import PRESETS

GPU = PRESETS["cuda-sm80"]
CPU = PRESETS["x86_64-avx512"]


def _chain(*kinds, **changes):
    """Operators that each read the one before; `changes` maps a kind to fields."""
    return [
        dataclasses.replace(
            Operator(f"/{kind}.{i}", kind, (f"/{kind}.{i}",), producers=(i - 1,) if i else (), elements=100),
            **changes.get(kind.replace(".", "_"), {}),
        )
        for i, kind in enumerate(kinds)
    ]


def _precisions(rules, operators, target=GPU):
    return [e.precision for e in resolve(rules, operators, target).entries]


def test_sensitive_kinds_stay_unless_named():
    operators = _chain("matmul", "nn.softmax", "add", "mean")
    assert _precisions(PrecisionRules("fp16"), operators) == ["fp16", "fp32", "fp16", "fp32"]
    named = PrecisionRules("fp16", kinds={"softmax": Assignment("fp16")}, operators={"/mean*": Assignment("bf16")})
    assert _precisions(named, operators) == ["fp16", "fp16", "fp16", "bf16"]


def test_names_win_over_kinds():
    rules = PrecisionRules(kinds={"matmul": Assignment("fp16")}, operators={"/matmul.1": Assignment("fp32")})
    assert _precisions(rules, _chain("matmul", "matmul")) == ["fp16", "fp32"]


def test_first_and_last_layer_by_option():
    operators = _chain("matmul", "matmul", "add", "matmul", "add")
    rules = PrecisionRules("fp16", keep_first=True, keep_last=True)
    assert _precisions(rules, operators) == ["fp32", "fp16", "fp16", "fp32", "fp16"]


def test_onnx_operator_types_name_kinds():
    operators = _chain("matmul", matmul={"types": ("Gemm",)})
    assert _precisions(PrecisionRules(kinds={"Gemm": Assignment("fp16")}), operators) == ["fp16"]
    # known to ONNX though not in this program: rules may serve many models
    assert _precisions(PrecisionRules(kinds={"Conv": Assignment("bf16")}), operators) == ["fp32"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (PrecisionRules(operators={"/matmull.0": Assignment("fp16")}), "did you mean '/matmul.0'"),
        (PrecisionRules(operators={"/enc*": Assignment("fp16")}), "no operator is named"),
        (PrecisionRules(ranges={"/x": 1.0}), "no operator is named '/x'"),
        (PrecisionRules(kinds={"sofmax": Assignment("fp16")}), "did you mean 'softmax'"),
        (PrecisionRules("int8"), "tvmx quantize"),
        (PrecisionRules(operators={"/matmul.0": Assignment("int8")}), "tvmx quantize"),
    ],
)
def test_mistakes_are_errors_that_help(rules, message):
    with pytest.raises(ConfigError, match=message):
        resolve(rules, _chain("matmul"), GPU)


def test_names_of_other_programs_are_known():
    rules = PrecisionRules(operators={"/else": Assignment("fp16")})
    assert resolve(rules, _chain("matmul"), GPU, also_known=["/else"]).entries[0].precision == "fp32"


def test_constants_beyond_float16_keep_what_follows_until_it_is_bounded():
    operators = _chain("matmul", "add", "multiply", "nn.softmax", "matmul", add={"largest": 1e5})
    rules = PrecisionRules("fp16", kinds={"softmax": Assignment("fp16")})
    plan = resolve(rules, operators, GPU)
    assert [e.precision for e in plan.entries] == ["fp16", "fp32", "fp32", "fp32", "fp16"]
    assert "100000 exceeds float16" in plan.entries[1].reason
    assert "reads the result of /add.1" in plan.entries[2].reason
    assert _precisions(PrecisionRules(operators={"*": Assignment("bf16")}), operators)[1] == "bf16"


def test_observed_ranges_settle_what_constants_leave_open():
    operators = _chain("matmul", "add", "multiply", add={"largest": 1e5})
    rules = PrecisionRules("fp16", ranges={"/add.1": 100.0, "/matmul.0": 1e6})
    plan = resolve(rules, operators, GPU)
    assert plan.entries[0].precision == "fp32"
    assert "observed magnitude 1e+06" in plan.entries[0].reason
    assert resolve(PrecisionRules("fp16", ranges={"/add.1": 100.0}), operators, GPU).entries[2].precision == "fp16"


def test_infinities_and_vanishing_constants_stay():
    operators = _chain("add", "multiply", add={"finite": False}, multiply={"smallest": 1e-12})
    plan = resolve(PrecisionRules("fp16"), operators, GPU)
    assert "infinity" in plan.entries[0].reason
    assert _precisions(PrecisionRules("fp16"), _chain("add", add={"smallest": 1e-12})) == ["fp32"]


def test_the_models_own_types_stay():
    operators = _chain("matmul", "add", matmul={"quantized": True}, add={"dtype": "float16"})
    assert _precisions(PrecisionRules("bf16"), operators) == ["int8", "fp16"]
    assert _precisions(PrecisionRules("fp32"), operators) == ["int8", "fp16"]
    floating = PrecisionRules(operators={"/matmul.0": Assignment("fp32")})
    assert _precisions(floating, operators)[0] == "fp32"


def test_moves_take_what_comes_in_or_what_all_readers_want():
    operators = _chain("matmul", "reshape", "nn.softmax", "reshape", "matmul")
    assert _precisions(PrecisionRules("fp16"), operators) == ["fp16", "fp16", "fp32", "fp16", "fp16"]
    result = [*operators[:3], dataclasses.replace(operators[3], result=True), operators[4]]
    assert _precisions(PrecisionRules("fp16"), result)[3] == "fp32"


def test_a_cpu_without_arithmetic_stores_where_memory_decides():
    busy = {"macs": 1 << 30, "weights": 1 << 20}
    bound = {"macs": 1 << 26, "weights": 1 << 26}
    operators = _chain("matmul", "nn.conv2d", "add", matmul=busy, nn_conv2d=bound)
    plan = resolve(PrecisionRules("fp16"), operators, CPU)
    assert [e.precision for e in plan.entries] == ["fp32", "fp16", "fp32"]
    assert "no fp16 arithmetic" in plan.entries[0].reason
    assert "float32 arithmetic" in plan.entries[1].reason
    assert plan.entries[1].storage
    assert _precisions(PrecisionRules("fp16", prefer="size"), operators, CPU) == ["fp16", "fp16", "fp32"]
    sse = resolve(PrecisionRules("fp16"), operators, PRESETS["x86_64-sse"])
    assert "no conversion" in sse.entries[1].reason


def test_a_saved_plan_assigns_the_same_again():
    operators = _chain("matmul", "reshape", "nn.softmax", "add", "matmul", "mean", add={"largest": 1e5})
    for target in (GPU, CPU):
        for rules in (PrecisionRules("fp16"), PrecisionRules("bf16", prefer="size", io="bf16")):
            plan = resolve(rules, operators, target)
            assert plan.diff(resolve(plan.rules(), operators, target)) == []
