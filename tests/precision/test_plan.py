"""Plans: printed, saved, diffed, read back."""

import json

import pytest

from tvmx.errors import ConfigError
from tvmx.precision import Assignment, Entry, PrecisionPlan, load_rules, rules_from


def _plan(*precisions, io="keep"):
    return PrecisionPlan(
        tuple(Entry(f"/op:{i}", "matmul", Assignment(p), f'why "{i}"') for i, p in enumerate(precisions)), io
    )


def test_saved_plans_are_rules_that_name_every_operator(tmp_path):
    plan = PrecisionPlan(
        (Entry('odd "name"\\x', "add", Assignment("fp16", "fp16"), "line\nbreak"), *_plan("fp32", "bf16").entries),
        "fp16",
    )
    for suffix in ("toml", "json"):
        path = tmp_path / f"plan.{suffix}"
        plan.save(path)
        assert load_rules(path) == plan.rules()
    assert PrecisionPlan.from_json(json.loads((tmp_path / "plan.json").read_text())) == plan
    with pytest.raises(ConfigError, match=r"\.toml or \.json"):
        plan.save(tmp_path / "plan.txt")
    assert rules_from(plan).operators['odd "name"\\x'] == Assignment("fp16", "fp16")


def test_diff_lists_what_changes():
    assert _plan("fp32", "fp16").diff(_plan("fp32", "fp16")) == []
    assert _plan("fp32", "fp16").diff(_plan("bf16", "fp16", "fp32", io="fp16")) == [
        "/op:0: fp32 -> bf16",
        "/op:2: - -> fp32",
        "io: keep -> fp16",
    ]


def test_print_holds_every_operator_and_reason():
    text = str(_plan("fp32", "fp16"))
    assert "/op:0" in text
    assert 'why "1"' in text
    assert text.splitlines()[-1] == "2 operators: 1 fp32, 1 fp16; inputs and outputs: keep"


def test_only_all_float32_is_the_identity():
    assert _plan("fp32", "fp32").is_identity
    assert not _plan("fp32", "fp16").is_identity
    assert not _plan("fp32", io="bf16").is_identity


def test_names_are_unique_and_unknown_ones_list_neighbours():
    with pytest.raises(ConfigError, match="twice"):
        PrecisionPlan((*_plan("fp32").entries, *_plan("fp16").entries))
    assert _plan("fp32", "fp16")["/op:1"].precision == "fp16"
    with pytest.raises(ConfigError, match="did you mean '/op:1'"):
        _plan("fp32", "fp16")["/pp:1"]


@pytest.mark.parametrize("data", [{}, {"entries": [{}], "io": "keep"}, {"entries": 3, "io": "keep"}])
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(ConfigError, match="not a precision plan"):
        PrecisionPlan.from_json(data)
