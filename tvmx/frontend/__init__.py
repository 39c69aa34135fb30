"""ONNX in, Relax out: load and check, fold shapes, rewrite to plain operators, convert."""

from tvmx.frontend.importer import import_onnx
from tvmx.frontend.model import IndexCheck, Model, TensorInfo
from tvmx.frontend.programs import Branch, import_programs

__all__ = ["Branch", "IndexCheck", "Model", "TensorInfo", "import_onnx", "import_programs"]
