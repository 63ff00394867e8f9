"""Checkpoints' tensors under other names, or in other parts, than they are stored in; each is made
when it is asked for.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np
from jaxtyping import Shaped

Tensor = Shaped[np.ndarray, "..."]
Makers = dict[str, Callable[[], Tensor]]

_BOTH = re.compile(r"(.+\.experts\.)gate_up_proj")
_GATE = re.compile(r"(.+\.experts\.)gate_proj")


class View(Mapping[str, Tensor]):
    """Tensors by name, each made by a function of its own."""

    def __init__(self, makers: Makers) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def split_experts(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors with gate_proj and up_proj [e, f, d] of a layer's experts in the place of the
    gate_up_proj [e, 2f, d] that some checkpoints have.
    """
    makers: Makers = {}
    for name in tensors:
        if found := _BOTH.fullmatch(name):
            for i, side in enumerate(("gate_proj", "up_proj")):
                makers[found[1] + side] = partial(_half, tensors, name, i)
        else:
            makers[name] = partial(tensors.__getitem__, name)
    return View(makers)


def join_experts(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What `split_experts` was given."""
    makers: Makers = {name: partial(tensors.__getitem__, name) for name in tensors}
    for name in tensors:
        if found := _GATE.fullmatch(name):
            pair = name, found[1] + "up_proj"
            makers[found[1] + "gate_up_proj"] = partial(_joined, tensors, *pair)
            for half in pair:
                del makers[half]
    return View(makers)


def _half(tensors: Mapping[str, Tensor], name: str, i: int) -> Tensor:
    """One of two halves along the axis before the last; a tensor of other axes as it is."""
    both = tensors[name]
    return both if both.ndim != 3 else np.split(both, (both.shape[1] // 2,), axis=1)[i]


def _joined(tensors: Mapping[str, Tensor], *names: str) -> Tensor:
    return np.concatenate([tensors[name] for name in names], axis=1)
