"""Files written whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a reader sees the old one or the new one, and so does who comes after a crash.

    Text becomes UTF-8, its line ends as they are. A file that is replaced hands on its permissions; a new one is for
    all to read. Folders above are made. Raises OSError; no temporary file stays. What is no file, such as a pipe, is
    written to as it stands.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        mode = 0o644
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
