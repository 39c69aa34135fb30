"""The operators that import, by domain: `python -m tvmx.frontend.operators` prints what docs/operators.md lists."""

from __future__ import annotations

from collections.abc import Iterator

from tvmx.frontend import fallback
from tvmx.frontend.importer import load_families
from tvmx.frontend.node import CONVERTERS
from tvmx.frontend.rewrite import CLAIMED


def supported() -> dict[str, tuple[str, ...]]:
    """Domain ("" is ONNX's own) → operators with a converter, a rewrite, or a trusted converter of TVM's."""
    load_families()
    names: dict[str, set[str]] = {}
    for domain, operator in _pairs():
        names.setdefault(domain, set()).add(operator)
    return {domain: tuple(sorted(found)) for domain, found in sorted(names.items())}


def _pairs() -> Iterator[tuple[str, str]]:
    yield from CONVERTERS
    for name in CLAIMED:
        domain, _, operator = name.rpartition(":")
        yield domain, operator
    for domain, operators in fallback.TRUSTED.items():
        yield from ((domain, operator) for operator in operators)


def page() -> str:
    """One paragraph of Markdown per domain."""
    return "\n\n".join(f"**{domain or 'ai.onnx'}**: {', '.join(found)}" for domain, found in supported().items())


if __name__ == "__main__":
    print(page())
