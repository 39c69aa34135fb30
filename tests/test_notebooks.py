"""Every notebook runs from its first cell to its last, and is stored without outputs."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_without_outputs(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    cells = nbformat.read(path, as_version=4).cells
    assert all(not c.get("outputs") and c.get("execution_count") is None for c in cells if c.cell_type == "code")


@pytest.mark.slow
@pytest.mark.models
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path):
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebook extra")
    from benchmarks.models import ModelUnavailable, model_path

    try:
        model_path("orient")
    except ModelUnavailable as reason:
        pytest.skip(str(reason))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
