"""The shapes of a request history that `CrashDumpHistory` replaced, to be measured beside it.

`LiveHistory` keeps the finished requests themselves: every full collection walks them. `TupleHistory` keeps their token
ids as tuples, which the collector stops tracking: fewer objects, still objects. Both are right, and both stall servers.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Mapping


class LiveHistory:
    """Finished requests as they are, for `max_age` seconds by the wall clock."""

    def __init__(self, *, max_age: float = 300.0) -> None:
        self.max_age = max_age
        self._kept: deque[tuple[object, object, float, float]] = deque()

    def __len__(self) -> int:
        return len(self._kept)

    def record(self, request: object, output: object, created: float) -> None:
        """Keep the request and the output, both alive."""
        finished = time.time()
        self._kept.append((self._shape(request), self._shape(output), created, finished))
        while finished - self._kept[0][3] >= self.max_age:
            self._kept.popleft()

    def dump(self, path: str | os.PathLike[str], extra: Mapping[str, object] | None = None) -> None:
        """Pickle all of it at once, under the path."""
        with open(path, "wb") as file:
            pickle.dump({"requests": list(self._kept), **(extra or {})}, file)

    def _shape(self, value: object) -> object:
        return value


class TupleHistory(LiveHistory):
    """The same with every list of plain values, in attributes and dictionaries, replaced by a tuple, in place."""

    def _shape(self, value: object) -> object:
        parts = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for name, part in parts.items():
            if isinstance(part, list) and not any(isinstance(item, (list, dict)) for item in part):
                parts[name] = tuple(part)
        return value
