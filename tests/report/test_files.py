import pytest

from tvmx.cli import main
from tvmx.errors import ConfigError
from tvmx.report.files import atomic_write, check_writable, write_text


def test_an_error_in_the_block_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def write_half():
        with atomic_write(path) as file:
            file.write(b"half of the new")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made(tmp_path):
    write_text(tmp_path / "x" / "y.txt", "new")
    assert (tmp_path / "x" / "y.txt").read_text() == "new"


def test_what_cannot_be_written_is_refused_before_any_work(tmp_path, capsys):
    (tmp_path / "plain").write_text("")
    check_writable(tmp_path / "new" / "deep" / "m.so")
    for path, why in ((tmp_path, "it is a folder"), (tmp_path / "plain" / "m.so", "is no folder")):
        with pytest.raises(ConfigError, match=why):
            check_writable(path)
        for command in (
            ["compile", "missing.onnx", "-o", str(path)],
            ["calibrate", "missing.onnx", "--calib", "missing", "-o", str(path)],
            ["bench", "missing.so", "--trace", str(path)],
            ["inspect", "missing.so", "--memory", str(path)],
        ):
            assert main(command) == 1
            assert why in capsys.readouterr().err
    assert main(["export", "missing.so", "--bundle", str(tmp_path / "plain")]) == 1
    assert "is no folder" in capsys.readouterr().err
