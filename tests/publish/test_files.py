"""Files written whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from mla_codegen.publish.files import replace_file


def test_text_and_bytes_as_they_are(tmp_path: Path) -> None:
    replace_file(tmp_path / "new" / "a.txt", "ä\r\n")
    assert (tmp_path / "new" / "a.txt").read_bytes() == "ä\r\n".encode()
    replace_file(tmp_path / "new" / "a.txt", b"\xff")
    assert (tmp_path / "new" / "a.txt").read_bytes() == b"\xff"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]


def test_permissions_stay(tmp_path: Path) -> None:
    path = tmp_path / "a"
    replace_file(path, "1")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o750)
    replace_file(path, "2")
    assert path.stat().st_mode & 0o777 == 0o750


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("chmod", "replace"):
        with monkeypatch.context() as change:
            change.setattr(os, name, full)
            with pytest.raises(OSError, match="No space left"):
                replace_file(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(path.read_text()))
    reader.start()
    replace_file(path, "through")
    reader.join(30)
    assert found == ["through"] and path.is_fifo()
