"""Reading models: external data, what is too large for protobuf, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.onnx_models import assert_close, model, reference
from tests.run_model import run_model
from tvmx.errors import ModelError
from tvmx.frontend import import_onnx, load

RNG = np.random.default_rng(0)


def saved(folder, opset=17):
    """An embedding, a product and a bias, all in one external file; returns (path, proto)."""
    table = RNG.standard_normal((50, 24)).astype(np.float32)
    weight = RNG.standard_normal((24, 16)).astype(np.float32)
    proto = model(
        [
            helper.make_node("Gather", ["table", "ids"], ["e"]),
            helper.make_node("MatMul", ["e", "w"], ["m"]),
            helper.make_node("Add", ["m", "b"], ["y"]),
        ],
        {"ids": ((7,), TensorProto.INT64)},
        {"y": (7, 16)},
        {"table": table, "w": weight, "b": weight[0]},
        opset,
    )
    path = folder / "m.onnx"
    external = onnx.ModelProto()
    external.CopyFrom(proto)
    onnx.save(external, path, save_as_external_data=True, location="m.data", size_threshold=0)
    return path, proto


@pytest.mark.parametrize("limit", [0, 2000, 2**30])
def test_large_tensors_stay_in_their_file(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(load, "DETACHED_BYTES", limit)
    path, proto = saved(tmp_path)
    loaded = load.load_model(path)
    assert set(loaded.large) == {0: {"table", "w", "b"}, 2000: {"table"}, 2**30: set()}[limit]
    assert not {i.name for i in loaded.proto.graph.initializer} & set(loaded.large)
    ids = RNG.integers(0, 50, 7)
    assert [i.name for i in import_onnx(path).inputs] == ["ids"]
    assert_close(run_model(path, {"ids": ids}, tmp_path), reference(proto, {"ids": ids}))


def test_a_large_tensor_that_its_file_does_not_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "DETACHED_BYTES", 0)
    path, _ = saved(tmp_path)
    data = tmp_path / "m.data"
    data.write_bytes(data.read_bytes()[:-300])
    with pytest.raises(ModelError, match="truncated or foreign"):
        load.load_model(path)


@pytest.mark.parametrize("location", ["../m.data", "/etc/hostname", "sub/../../m.data"])
def test_external_data_outside_the_folder_is_refused(tmp_path, location):
    (tmp_path / "in").mkdir()
    path, _ = saved(tmp_path / "in")
    proto = onnx.load(path, load_external_data=False)
    for tensor in proto.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="outside the model's folder"):
        load.load_model(path)


def test_outputs_and_inputs_without_a_shape(tmp_path):
    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": (2, 3)}, {"y": (2, 3)})
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    x = RNG.standard_normal((2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run_model(proto, {"x": x}, tmp_path)["y"], np.maximum(x, 0))
    proto.graph.input[0].type.tensor_type.ClearField("shape")
    assert not proto.graph.input[0].type.tensor_type.HasField("shape")
    with pytest.raises(ModelError, match=r"has no shape in the model; give one: --shape x=1,3,224,224"):
        import_onnx(proto)
    np.testing.assert_array_equal(run_model(proto, {"x": x}, tmp_path, shapes={"x": (2, 3)})["y"], np.maximum(x, 0))
