"""A report as one self-contained page: no network, no script needed to read it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from .document import Document

NEEDED = ("jinja2", "pygal")


def check_installed(path: str | Path) -> None:
    """Raise ValueError, naming the extra to install, where the page for `path` could not be made."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{path} needs {' and '.join(missing)}: pip install 'pytest-sglmem[html]'")


def page(document: Document) -> str:
    """The page."""
    raise NotImplementedError
