"""An operator as precision assignment sees it. Made from the Relax program by `tvmx.passes.precision`."""

from __future__ import annotations

from dataclasses import dataclass

from tvmx.precision.kinds import Role, role_of


@dataclass(frozen=True)
class Operator:
    """One operator with floating-point operands or results, in program order.

    `nodes` are the ONNX nodes it came from, `types` their ONNX operators. `producers` are positions, in the list of
    operators, of those that make its floating-point operands. `dtype` is that of its first floating-point operand.
    """

    name: str
    kind: str
    nodes: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    producers: tuple[int, ...] = ()
    dtype: str = "float32"
    macs: int = 0
    weights: int = 0  # elements of constant operands that would be stored in the operator's precision
    elements: int = 0  # elements of the results
    winograd: bool = False  # a 3×3 convolution that the faster float32 kernel may take
    dots: bool = False  # a product that kernels of pairs of 16-bit values can compute: dense, of static shapes
    largest: float = 0.0  # largest magnitude of a constant operand or attribute, infinities left out
    smallest: float = 1.0  # smallest magnitude above zero of a constant that an addition or a logarithm may need
    finite: bool = True  # no constant operand holds an infinity or a NaN
    quantized: bool = False  # every operand comes out of a DequantizeLinear
    mixed: bool = False  # the program holds 16-bit values of its own, so float32 is the model's choice here
    result: bool = False  # the program returns its value

    @property
    def role(self) -> Role:
        return role_of(self.kind)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.nodes)
