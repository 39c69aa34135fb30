"""Rules: what files and names mean, and what is refused."""

import pytest

from tvmx.errors import ConfigError
from tvmx.precision import Assignment, PrecisionRules, load_rules, rules_from
from tvmx.precision.files import rules_from_table, rules_table
from tvmx.precision.rules import match

TOML = """
default = "fp16"
prefer = "size"
keep_last = true
[kinds]
Softmax = "fp16"
[operators]
"/enc/*" = "fp32"
"/enc/fc" = { precision = "fp16", accumulate = "fp16" }
[ranges]
"/x" = 70000
"""


def test_a_file_holds_all_options(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(TOML)
    rules = load_rules(path)
    assert rules.default == "fp16"
    assert rules.prefer == "size"
    assert rules.keep_last
    assert rules.kinds == {"Softmax": Assignment("fp16", "fp32")}
    assert rules.operators["/enc/fc"].accumulate == "fp16"
    assert rules.ranges == {"/x": 70000}
    assert rules_from_table(rules_table(rules)) == rules
    assert rules_from(str(path), io="fp16").io == "fp16"


def test_an_exact_name_wins_over_globs_and_the_first_glob_over_later_ones():
    patterns = {"/a/*": Assignment("fp16"), "/a/b*": Assignment("bf16"), "/a/bc": Assignment("fp32")}
    assert match(patterns, ("/a/bc",)) == ("/a/bc", Assignment("fp32"))
    assert match(patterns, ("/a/bd",)) == ("/a/*", Assignment("fp16"))
    assert match(patterns, ("/c", "/a/bc")) == ("/a/bc", Assignment("fp32"))
    assert match(patterns, ("/c",)) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('defualt = "fp16"', "did you mean default"),
        ('default = "fp15"', "fp15.*fp32, fp16"),
        ("default = 16", "must be a str"),
        ('[operators]\nx = "fp8"', "'x'.*fp8"),
        ('[operators]\nx = { precision = "bf16", accumulate = "bf16" }', "cannot accumulate"),
        ("[operators]\nx = 16", "write"),
        ('io = "int8"', "io precision"),
        ('prefer = "cheap"', "speed"),
        ("operators = 3", "must be a table"),
        ("[ranges]\nx = -1", "magnitude"),
        ("version = 9", "newer"),
        ("= 3", "cannot read"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_rules(path)
    assert str(path) in str(error.value)


def test_a_missing_file_and_an_unknown_precision_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read.*none\.toml"):
        rules_from(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="did you mean fp16"):
        rules_from("fp61")


def test_nothing_asked_is_trivial():
    assert rules_from(None).trivial
    assert rules_from("fp32").trivial
    assert not rules_from("fp16").trivial
    assert not PrecisionRules(operators={"x": Assignment("fp16")}).trivial
    assert not PrecisionRules(io="fp16").trivial
