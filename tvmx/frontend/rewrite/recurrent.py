"""RNN, GRU and LSTM (opset 7 and later), unrolled over a static sequence length.

The input projection of all steps, gates and directions is one matrix product
[T*B, I] x [I, D*G*H]; a step then costs one [B, H] x [H, G*H] product and element-wise work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import helper

from tvmx.frontend.rewrite.activations import Activation, activations
from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.emit import Emitter
from tvmx.frontend.rewrite.rule import Match, RewriteRule

Product = Callable[[str], str]  # [rows, n] -> [rows, m], a product with fixed weights


@dataclass(frozen=True)
class Cell:
    """What one step needs to know. `hidden` is H; the functions emit nodes."""

    e: Emitter
    hidden: int
    elem: int
    acts: list[Activation]
    recur: Product  # h -> h R^T, all gates
    clip: float | None = None
    # GRU: h -> products with the z and r rows, and with the h row, of R; bias added to that
    recur_zr: Product | None = None
    recur_h: Product | None = None
    bias_h: str = ""
    linear_before_reset: bool = False
    # LSTM
    peephole: list[str] = field(default_factory=list)  # i, o, f
    input_forget: bool = False

    def gate(self, pre: str, first: int, last: int | None = None) -> str:
        """Columns of gates first..last-1 of [B, G*H]."""
        last = first + 1 if last is None else last
        return self.e.slice(pre, 1, first * self.hidden, last * self.hidden)

    def bound(self, x: str) -> str:
        """The `clip` attribute: bounds what goes into an activation."""
        return x if self.clip is None else self.e.clip(x, -self.clip, self.clip, self.elem)


State = tuple[str, str]  # hidden and cell state, "" for zero
Step = Callable[[Cell, str, State], State]


def rnn_step(cell: Cell, x: str, state: State) -> State:
    """h' = f(x W^T + h R^T + b)"""
    pre = cell.e.add2(x, cell.recur(state[0])) if state[0] else x
    return cell.acts[0](cell.bound(pre)), ""


def gru_step(cell: Cell, x: str, state: State) -> State:
    """z, r, then h' = (1 - z) g(...) + z h; the two forms of linear_before_reset."""
    e, h = cell.e, state[0]
    f, g = cell.acts
    if not h:
        # h = 0: nothing recurs but the bias that linear_before_reset puts inside r * (...).
        z = f(cell.bound(cell.gate(x, 0)))
        new = cell.gate(x, 2)
        if cell.linear_before_reset and cell.bias_h:
            new = e.add2(new, e.mul(f(cell.bound(cell.gate(x, 1))), cell.bias_h))
        new = g(cell.bound(new))
        return e.sub(new, e.mul(z, new)), ""
    if cell.linear_before_reset:
        recurrent = cell.recur(h)
        pre = e.add2(cell.gate(x, 0, 2), cell.gate(recurrent, 0, 2))
        linear = cell.gate(recurrent, 2)
        if cell.bias_h:
            linear = e.add2(linear, cell.bias_h)
        r = f(cell.bound(cell.gate(pre, 1)))
        new = e.add2(cell.gate(x, 2), e.mul(r, linear))
    else:
        assert cell.recur_zr is not None
        assert cell.recur_h is not None
        pre = e.add2(cell.gate(x, 0, 2), cell.recur_zr(h))
        r = f(cell.bound(cell.gate(pre, 1)))
        new = e.add2(cell.gate(x, 2), cell.recur_h(e.mul(r, h)))
    z = f(cell.bound(cell.gate(pre, 0)))
    new = g(cell.bound(new))
    # (1 - z) n + z h, with one product less
    return e.add2(new, e.mul(z, e.sub(h, new))), ""


def lstm_step(cell: Cell, x: str, state: State) -> State:
    """Gates i, o, f, c; peepholes P; c' = f c + i g; h' = o h(c')."""
    e, (h, c) = cell.e, state
    f, g, out = cell.acts
    pre = e.add2(x, cell.recur(h)) if h else x
    i, o, forget, new = (cell.gate(pre, k) for k in range(4))
    if cell.peephole and c:
        i = e.add2(i, e.mul(cell.peephole[0], c))
    i = f(cell.bound(i))
    new = e.mul(i, g(cell.bound(new)))
    if c:
        if cell.input_forget:
            keep = e.sub(e.like(1.0, cell.elem, "one"), i)
        else:
            if cell.peephole:
                forget = e.add2(forget, e.mul(cell.peephole[2], c))
            keep = f(cell.bound(forget))
        new = e.add2(e.mul(keep, c), new)
    if cell.peephole:
        o = e.add2(o, e.mul(cell.peephole[1], new))
    return e.mul(f(cell.bound(o)), out(new)), new


@dataclass(frozen=True)
class Kind:
    """The operator's constants: number of gates and the activations of one direction."""

    gates: int
    acts: tuple[str, ...]
    step: Step


KINDS = {
    "RNN": Kind(1, ("Tanh",), rnn_step),
    "GRU": Kind(3, ("Sigmoid", "Tanh"), gru_step),
    "LSTM": Kind(4, ("Sigmoid", "Tanh", "Tanh"), lstm_step),
    "DynamicQuantizeLSTM": Kind(4, ("Sigmoid", "Tanh", "Tanh"), lstm_step),
}


@dataclass(frozen=True)
class Weights:
    """Products with W (all directions at once) and R (one per direction), whatever their format."""

    hidden: int
    project: Product  # [rows, I] -> [rows, D*G*H]
    recur: Callable[[int, int, int], Product]  # direction, first gate, last gate -> product


def float_weights(m: Match, gates: int, directions: int) -> Weights:
    """W is [D, G*H, I], R is [D, G*H, H]."""
    e = m.emit
    _, rows, features = m.shape(1)
    hidden = m.dim(2, 2)
    if rows != gates * hidden:
        raise Refuse(f"W has {rows} rows for {gates} gates of {hidden}", "repair the model")
    w = e.reshape(e.transpose(m.input(1), (2, 0, 1)), (features, directions * rows))
    r_all = e.transpose(m.input(2), (0, 2, 1))
    by_direction: dict[tuple[int, int, int], str] = {}

    def recur(direction: int, first: int, last: int) -> Product:
        key = (direction, first, last)
        if key not in by_direction:
            r = e.reshape(e.slice(r_all, 0, direction, direction + 1), (hidden, rows))
            if (first, last) != (0, gates):
                r = e.slice(r, 1, first * hidden, last * hidden)
            by_direction[key] = r
        return lambda h: e.matmul(h, by_direction[key])

    return Weights(hidden, lambda x: e.matmul(x, w), recur)


def _direction_row(m: Match, index: int, direction: int) -> str:
    """Row `direction` of an input [D, ...] as [1, n] or, for a state [D, B, H], as [B, H]."""
    e = m.emit
    row = e.slice(m.input(index), 0, direction, direction + 1)
    return e.squeeze(row, 0) if m.rank(index) == 3 else row


def _masks(m: Match, steps: int) -> Callable[[int], str] | None:
    """t -> bool [B, 1], true where step t lies inside the sequence; None when all are full."""
    if not m.input(4):
        return None
    e = m.emit
    known = m.const(4)
    if known is not None and int(known.min()) >= steps:
        return None
    lengths = e.reshape(m.input(4), (-1, 1))

    @functools.cache
    def mask(t: int) -> str:
        return e.op("Less", e.const(t, "step", np.int32), lengths)

    return mask


def unroll(m: Match, kind: Kind, weights_of: Callable[[Match, int, int], Weights]) -> list[str]:
    """Emit the whole operator; returns Y, Y_h, Y_c ("" where not wanted)."""
    e = m.emit
    layout = m.attr("layout", 0)
    if m.rank(0) != 3:
        raise Refuse(f"X has rank {m.rank(0)}, not 3", "check the input shapes you gave")
    steps = m.dim(0, 1 if layout else 0)
    if steps == 0:
        raise Refuse("the sequence has length 0", "give the input a longer sequence")
    names = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    reversed_ = names[m.attr("direction", "forward")]
    directions = len(reversed_)
    weights = weights_of(m, kind.gates, directions)
    hidden, elem, width = weights.hidden, m.elem(0), kind.gates * weights.hidden

    x = e.transpose(m.input(0), (1, 0, 2)) if layout else m.input(0)
    batch = m.graph.type(m.input(0)).shape[0 if layout else 1]  # type: ignore[union-attr, index]
    proj = weights.project(e.reshape(x, (-1, m.dim(0, 2))))
    lbr = bool(m.attr("linear_before_reset", 0))
    bias_h = ""
    if m.input(3):
        wb, rb = (e.slice(m.input(3), 1, k * width, (k + 1) * width) for k in range(2))
        if lbr:
            bias_h = e.slice(rb, 1, 2 * hidden, 3 * hidden)
            zero = np.zeros((directions, hidden), helper.tensor_dtype_to_np_dtype(elem))
            rb = e.concat([e.slice(rb, 1, 0, 2 * hidden), e.const(zero, "zero")], 1)
        proj = e.add2(proj, e.reshape(e.add2(wb, rb), (1, directions * width)))
    if not isinstance(batch, int):
        proj = e.reshape(proj, (steps, -1, directions * width))

    acts = activations(
        e,
        m.attr("activations", list(kind.acts) * directions),
        m.attr("activation_alpha", []),
        m.attr("activation_beta", []),
        elem,
    )
    mask = _masks(m, steps)
    clip = m.attr("clip")
    zero_scalar = e.like(0.0, elem, "zero") if mask else ""
    ys, hs, cs = [], [], []
    for d, backwards in enumerate(reversed_):
        peephole = []
        if m.input(7):
            p = _direction_row(m, 7, d)
            peephole = [e.slice(p, 1, k * hidden, (k + 1) * hidden) for k in range(3)]
        full = weights.recur(d, 0, kind.gates)
        split = kind.gates == 3 and not lbr
        cell = Cell(
            e,
            hidden,
            elem,
            acts[d * len(kind.acts) : (d + 1) * len(kind.acts)],
            full,
            clip if clip else None,
            weights.recur(d, 0, 2) if split else None,
            weights.recur(d, 2, 3) if split else None,
            e.slice(bias_h, 0, d, d + 1) if bias_h else "",
            lbr,
            peephole,
            bool(m.attr("input_forget", 0)),
        )
        own = proj
        if directions > 1:
            axis = 1 if isinstance(batch, int) else 2
            own = e.slice(proj, axis, d * width, (d + 1) * width)
        state = (_initial(m, 5, d, layout), _initial(m, 6, d, layout))
        outputs = [""] * steps
        for t in reversed(range(steps)) if backwards else range(steps):
            if isinstance(batch, int):
                x_t = own if steps == 1 else e.slice(own, 0, t * batch, (t + 1) * batch)
            else:
                x_t = e.select(own, 0, t)
            new = kind.step(cell, x_t, state)
            outputs[t] = new[0]
            if mask:
                valid = mask(t)
                outputs[t] = e.op("Where", valid, new[0], zero_scalar)
                new = tuple(  # type: ignore[assignment]
                    e.op("Where", valid, n, old or zero_scalar) if n else "" for n, old in zip(new, state)
                )
            state = new
        ys.append(outputs)
        hs.append(state[0])
        cs.append(state[1])
    return [
        _sequence(m, ys, steps, hidden, layout) if m.wants(0) else "",
        _final(m, hs, hidden, layout) if m.wants(1) else "",
        _final(m, cs, hidden, layout) if m.wants(2) else "",
    ]


def _initial(m: Match, index: int, direction: int, layout: int) -> str:
    """The initial state [B, H] of a direction; "" for none and for constant zeros."""
    known = m.const(index)
    if not m.input(index) or (known is not None and not np.asarray(known, np.float32).any()):
        return ""
    if layout:
        return m.emit.select(m.input(index), 1, direction)
    return _direction_row(m, index, direction)


def _sequence(m: Match, ys: list[list[str]], steps: int, hidden: int, layout: int) -> str:
    e = m.emit
    parts = [e.reshape(e.concat(y, 0), (steps, 1, -1, hidden)) for y in ys]
    y = e.concat(parts, 1)
    return e.transpose(y, (2, 0, 1, 3)) if layout else y


def _final(m: Match, states: Sequence[str], hidden: int, layout: int) -> str:
    e = m.emit
    y = e.concat([e.unsqueeze(s, 0) for s in states], 0)
    return e.transpose(y, (1, 0, 2)) if layout else y


def _rule(op: str) -> RewriteRule:
    kind = KINDS[op]
    return RewriteRule(f"unroll_{op.lower()}", (op,), lambda m: unroll(m, kind, float_weights))


RULES = tuple(_rule(op) for op in ("RNN", "GRU", "LSTM"))
