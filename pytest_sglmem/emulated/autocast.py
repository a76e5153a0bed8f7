"""`torch.autocast("cuda")`: matrix operators in the region's dtype, sensitive ones in float32, as CUDA's lists have it.

Autocast goes by what C++ takes a tensor for, so inside such a region the CPU's autocast is on with the same dtype: it
casts what CUDA's would (matmul, linear, convolution, attention), weights cached. CUDA has more operators that run in
float32 than the CPU; those are wrapped at their Python names while a region is open. What C++ calls among them from
inside another operator is not seen, and CPU tensors that are computed with inside such a region are cast too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .patches import Patches

if TYPE_CHECKING:
    from . import Emulation

IN_FLOAT32 = (
    *(
        "acos",
        "asin",
        "cosh",
        "cosine_embedding_loss",
        "cosine_similarity",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
    ),
    *("expm1", "group_norm", "hinge_embedding_loss", "kl_div", "layer_norm", "log", "log10", "log1p", "log2"),
    *(
        "log_softmax",
        "logsumexp",
        "mse_loss",
        "l1_loss",
        "norm",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
    ),
    *(
        "renorm",
        "rms_norm",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
    ),
    *(
        "tan",
        "triplet_margin_loss",
        "nll_loss",
        "nll_loss_nd",
        "cross_entropy_loss",
        "huber_loss",
        "__pow__",
        "__rpow__",
    ),
)


class Regions:
    """The open regions of all threads: the wrappers stand while there is one."""

    def __init__(self, emulation: Emulation) -> None:
        self._find = emulation.memory.find
        self._open = 0
        self._patches = Patches()

    def enter(self) -> None:
        """A region begins."""
        self._open += 1
        if self._open > 1:
            return
        for owner in (torch, torch.Tensor, torch._C._nn, torch.nn.functional):
            for name in IN_FLOAT32:
                real = getattr(owner, name, None)
                if real is not None and not isinstance(real, _PYTHON_FUNCTION):
                    self._patches.set(owner, name, self._wrap(real))

    def leave(self) -> None:
        """A region ends."""
        self._open -= 1
        if not self._open:
            self._patches.undo()

    def _wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def in_float32(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_autocast_enabled("cuda"):
                return real(*args, **kwargs)
            with torch.autocast("cuda", enabled=False):
                return real(*map(self._widened, args), **{name: self._widened(kwargs[name]) for name in kwargs})

        return in_float32

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16) and self._find(value):
            return value.float()
        return value


def install(patches: Patches, emulation: Emulation) -> None:
    """Let `torch.autocast("cuda")` work on emulated tensors until `patches` are undone."""
    regions = Regions(emulation)
    cls = torch.amp.autocast_mode.autocast
    enter, leave = cls.__enter__, cls.__exit__
    before: dict[int, list[tuple[bool, torch.dtype]]] = {}

    def __enter__(self: Any) -> Any:
        entered = enter(self)
        if self.device == "cuda":
            before.setdefault(id(self), []).append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            torch.set_autocast_enabled("cpu", self._enabled)
            torch.set_autocast_dtype("cpu", self.fast_dtype)
            regions.enter()
        return entered

    def __exit__(self: Any, *error: Any) -> Any:
        if self.device == "cuda" and before.get(id(self)):
            enabled, dtype = before[id(self)].pop()
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
            regions.leave()
        return leave(self, *error)

    patches.set(cls, "__enter__", __enter__)
    patches.set(cls, "__exit__", __exit__)


_PYTHON_FUNCTION = type(install)
