import pytest

from tvmx.report.files import atomic_write, write_text


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
