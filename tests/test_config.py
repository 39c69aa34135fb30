import pytest

from tvmx.config import CompileConfig, Dim, TuneConfig, load_toml, parse_shape, to_toml
from tvmx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x=1,3,224,224", ("x", (1, 3, 224, 224))),
        ("x=N,3", ("x", ("N", 3))),
        ("x=N:1..8,3", ("x", (Dim("N", 1, 8), 3))),
        ("x=N:2..,3", ("x", (Dim("N", 2, None), 3))),
        ("a=b:0=4", ("a=b:0", (4,))),
        ("scalar=", ("scalar", ())),
    ],
)
def test_parse_shape(text, expected):
    assert parse_shape(text) == expected


@pytest.mark.parametrize("text", ["1,3", "x=-1,3", "x=3.5", "x=N:a..b", "x=N:8..1", "x=a b"])
def test_parse_shape_refuses(text):
    with pytest.raises(ConfigError):
        parse_shape(text)


def test_toml_round_trip(tmp_path):
    config = TuneConfig(threads=2, log='odd "name" \\ here', max_trials=7)
    path = tmp_path / "t.toml"
    path.write_text(to_toml(config, "tune"))
    assert load_toml(TuneConfig, path, "tune") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tune]\nmax_trails = 3", "max_trials"),
        ("[tune]\nmax_trials = 'many'", "must be int"),
        ("[tune]\nmax_trials = true", "must be int"),
        ("[tune]\nmax_trials = 0", ">= 1"),
        ("[tune", "cannot read"),
        ("tune = 3", "must be a table"),
    ],
)
def test_toml_refuses(tmp_path, text, message):
    path = tmp_path / "t.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_toml(TuneConfig, path, "tune")


@pytest.mark.parametrize("options", [{"threads": 0}, {"threads": 5000}, {"planner_budget_s": -1.0}])
def test_compile_config_refuses(options):
    with pytest.raises(ConfigError):
        CompileConfig(**options)
