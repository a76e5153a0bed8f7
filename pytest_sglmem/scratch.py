"""Temporary folders of a process. One that was killed cannot remove its own: the next process that wants one does.

Each holds a file that its process keeps locked for as long as it lives, which the kernel ends however it dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "sglmem-"
OWNER = "owner"


class Scratch:
    """A new temporary folder at `path`, and none left of those whose processes were killed. Raises OSError."""

    def __init__(self, kind: str = "") -> None:
        remove_orphans()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX + kind))
        # Locked before it has its name: under that name a lock that is free means that nobody lives there.
        self._owner: int | None = os.open(self.path / f".{OWNER}", os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: then nobody takes it for an orphan either
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(self.path / f".{OWNER}", self.path / OWNER)

    def remove(self) -> None:
        """Remove it with everything in it; nothing the second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owner is not None:
            os.close(self._owner)
            self._owner = None

    def __enter__(self) -> str:
        return str(self.path)

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_orphans() -> None:
    """Remove this user's folders whose process is gone."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):  # another user's, one still in use, one that its own process removes now
            if path.parent.lstat().st_uid != os.getuid():
                continue
            owner = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(owner)
