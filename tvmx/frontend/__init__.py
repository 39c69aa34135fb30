"""ONNX in, Relax out: load and check, fold shapes, rewrite to plain operators, convert."""

from tvmx.frontend.importer import import_onnx
from tvmx.frontend.model import IndexCheck, Model, TensorInfo

__all__ = ["IndexCheck", "Model", "TensorInfo", "import_onnx"]
