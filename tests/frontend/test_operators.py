"""docs/operators.md lists what imports, no more and no less."""

from pathlib import Path

from tvmx.frontend.operators import page, supported


def test_the_page_is_current():
    text = (Path(__file__).parents[2] / "docs" / "operators.md").read_text()
    assert page() in text, "run `python -m tvmx.frontend.operators` and put what it prints into docs/operators.md"


def test_domains():
    found = supported()
    assert {"Conv", "LSTM", "QLinearConv", "If", "NonZero"} <= set(found[""])
    assert "QLinearAdd" in found["com.microsoft"]
