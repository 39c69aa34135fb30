"""The activation functions of RNN, GRU and LSTM, as standard operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvmx.frontend.rewrite.context import Refuse
from tvmx.frontend.rewrite.emit import Emitter

Activation = Callable[[str], str]


@dataclass(frozen=True)
class ActivationKind:
    """`alpha` and `beta` are the defaults; None means the function has no such parameter."""

    emit: Callable[[Emitter, str, float, float, int], str]
    alpha: float | None = None
    beta: float | None = None


def _plain(op_type: str) -> ActivationKind:
    return ActivationKind(lambda e, x, a, b, t: e.op(op_type, x))


def _affine(e: Emitter, x: str, alpha: float, beta: float, elem: int) -> str:
    return e.add2(e.mul(x, e.like(alpha, elem, "alpha")), e.like(beta, elem, "beta"))


def _scaled_tanh(e: Emitter, x: str, alpha: float, beta: float, elem: int) -> str:
    return e.mul(e.op("Tanh", e.mul(x, e.like(beta, elem, "beta"))), e.like(alpha, elem, "alpha"))


KINDS: dict[str, ActivationKind] = {
    "relu": _plain("Relu"),
    "tanh": _plain("Tanh"),
    "sigmoid": _plain("Sigmoid"),
    "softsign": _plain("Softsign"),
    "softplus": _plain("Softplus"),
    "affine": ActivationKind(_affine, 1.0, 0.0),
    "scaledtanh": ActivationKind(_scaled_tanh, 1.0, 1.0),
    "leakyrelu": ActivationKind(lambda e, x, a, b, t: e.op("LeakyRelu", x, alpha=a), 0.01),
    "thresholdedrelu": ActivationKind(lambda e, x, a, b, t: e.op("ThresholdedRelu", x, alpha=a), 1.0),
    "elu": ActivationKind(lambda e, x, a, b, t: e.op("Elu", x, alpha=a), 1.0),
    "hardsigmoid": ActivationKind(lambda e, x, a, b, t: e.op("HardSigmoid", x, alpha=a, beta=b), 0.2, 0.5),
}


def activations(
    e: Emitter,
    names: Sequence[str],
    alphas: Sequence[float],
    betas: Sequence[float],
    elem: int,
) -> list[Activation]:
    """One function per name; `alphas` and `betas` go in order to those that take one."""
    alpha_values, beta_values = iter(alphas), iter(betas)

    def bind(kind: ActivationKind, alpha: float, beta: float) -> Activation:
        return lambda x: kind.emit(e, x, alpha, beta, elem)

    made: list[Activation] = []
    for name in names:
        kind = KINDS.get(name.lower())
        if kind is None:
            raise Refuse(f"activation {name!r} is unknown", f"use one of {', '.join(sorted(KINDS))}")
        alpha = 0.0 if kind.alpha is None else next(alpha_values, kind.alpha)
        beta = 0.0 if kind.beta is None else next(beta_values, kind.beta)
        made.append(bind(kind, alpha, beta))
    return made
