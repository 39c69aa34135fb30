"""com.microsoft DynamicQuantizeLSTM: the LSTM of recurrent.py over integer products."""

from __future__ import annotations

from tvmx.frontend.rewrite.integer import scaled_integer_product
from tvmx.frontend.rewrite.qparams import scalar
from tvmx.frontend.rewrite.recurrent import KINDS, Product, Weights, unroll
from tvmx.frontend.rewrite.rule import Match, RewriteRule


def _product(m: Match, w: str, scale: str, zero: str) -> Product:
    return lambda x: scaled_integer_product(m, x, w, scale, zero)


def _one_direction(m: Match, index: int, direction: int) -> str:
    """Entry `direction` of W [D, I, 4H], of a scale [D, 4H] as [4H], of a scale [D] as a scalar."""
    e = m.emit
    if m.rank(index) == 1:
        name = e.slice(m.input(index), 0, direction, direction + 1)
        return scalar(m, name)
    return e.select(m.input(index), 0, direction)


def int8_weights(m: Match, gates: int, directions: int) -> Weights:
    """W [D, I, 4H] and R [D, H, 4H] in 8 bit; inputs 8..11 are their scales and zero points.

    x and h are quantised when they are used, as ONNX Runtime does: x once for all steps.
    """
    e = m.emit
    hidden = m.dim(2, 1)

    def weights(value: int, scale: int, zero: int, d: int) -> Product:
        args = [_one_direction(m, k, d) if m.input(k) else "" for k in (value, scale, zero)]
        return _product(m, *args)

    inputs = [weights(1, 8, 9, d) for d in range(directions)]
    recurrent = [weights(2, 10, 11, d) for d in range(directions)]
    return Weights(
        hidden,
        lambda x: e.concat([product(x) for product in inputs], 1),
        lambda direction, first, last: recurrent[direction],
    )


RULES = (
    RewriteRule(
        "unroll_dynamicquantizelstm",
        ("com.microsoft:DynamicQuantizeLSTM",),
        lambda m: unroll(m, KINDS["DynamicQuantizeLSTM"], int8_weights),
    ),
)
