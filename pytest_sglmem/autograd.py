"""What an autograd graph keeps alive: saved tensors, contexts of functions, leaves, gradients, and who leads to it.

A graph lives in C++ and has Python objects only as far as somebody asks for them (up to torch 2.11 the object of a node
lasts as long as it is held: a node is recognised by its `id` only while the walk holds it). So the walk goes forward,
from each tensor that Python knows, through `grad_fn` and `next_functions`, and compares what the nodes keep with what
is looked for. A saved tensor is read as it is kept where this torch shows that, else unpacked, which runs hooks of the
user's and refuses where the tensor was changed in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def kept_by(
    tensor: torch.Tensor, wanted: Callable[[object], bool], seen: Mapping[int, object], mine: dict[int, object]
) -> Iterator[tuple[str, object]]:
    """What of `wanted` this tensor keeps by its gradient or its graph, each with how, as in
    ".grad_fn -> MulBackward0._saved_other".

    `seen`: the nodes that earlier walks have been at, by `id`, which are passed over; those of this one go to `mine`.
    """
    try:
        node = tensor.grad_fn
        grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
    except Exception:  # a half-made or functional tensor: not ours to mend
        return
    if grad is not None and wanted(grad):
        yield ".grad", grad
    nodes = deque([node] if node is not None else [])
    while nodes:
        node = nodes.popleft()
        if id(node) in seen or id(node) in mine:
            continue
        mine[id(node)] = node
        for name, value in _of_node(node):
            if wanted(value):
                yield f".grad_fn -> {type(node).__name__}{name}", value
        nodes.extend(following for following, _ in getattr(node, "next_functions", ()) if following is not None)


def _of_node(node: Any) -> Iterator[tuple[str, object]]:
    """What the node keeps, each with the name of the attribute."""
    yield "", node
    for name in dir(type(node)):
        if name.startswith("_saved_") or name == "saved_tensors":
            yield from ((f".{name}", value) for value in _saved(node, name))
    leaf = getattr(node, "variable", None)
    if leaf is not None:
        yield ".variable", leaf
        yield ".variable.grad", getattr(leaf, "grad", None)


def _saved(node: object, name: str) -> list[object]:
    try:
        raw = getattr(node, f"_raw_{name.lstrip('_')}", None)
        if raw is not None:
            return [one.data for one in _several(raw) if one is not None]
    except AttributeError:  # this torch does not show what it saved: unpack it
        pass
    except Exception:  # gone since the graph was walked backwards
        return []
    try:
        return _several(getattr(node, name))
    except Exception:  # gone, or changed in place
        return []


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]
