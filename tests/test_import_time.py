"""`import tvmx` and `tvmx --help` stay quick: TVM, ONNX and even numpy load when they are needed."""

import subprocess
import sys

_HEAVY = ("tvm", "tvm_ffi", "onnx", "onnxscript", "numpy", "rich", "xgboost")


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_tvmx_loads_nothing_heavy():
    loaded = _run(f"import sys, tvmx; print([m for m in {_HEAVY} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom tvmx.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [m for m in {_HEAVY} if m in sys.modules])"
    )
    assert "LOADED []" in _run(code)


def test_unknown_attribute_is_an_attribute_error():
    assert "no attribute 'nonsense'" in _run(
        "import tvmx\ntry:\n    tvmx.nonsense\nexcept AttributeError as e:\n    print(e)"
    )
