"""Between a model and the tensors of a Hugging Face checkpoint.

On disk a projection is [out, in] and every layer's stands alone; ours are [layer, in, out]. An
expert's stands alone as well; ours are [layer, expert, in, out].
"""

import math
import re
from collections.abc import Callable, Mapping, Set
from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree, Shaped

from ...tree import map_named, named_leaves
from ..decoder import Config, Decoder, init_decoder

T = TypeVar("T")

Tensor = Shaped[np.ndarray, "..."]
# Our leaf → (name on disk, in which the first `{}` is the layer and the second the expert, whether
# the last two axes are swapped there).
Names = Mapping[str, tuple[str, bool]]
Place = Callable[[str, Tensor], Array]  # (a leaf's name, its values) → the leaf on its devices

_BUFFER = ".rotary_emb.inv_freq"  # old checkpoints store what follows from the configuration
_STACK = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_KEYS = re.compile(r"\.(\d+)\.self_attn\.[kv]_(?:proj|norm)\.")
_LISTED = 8  # names of each kind that an error lists
_ALIGNMENT = 64  # bytes: what XLA wants of memory that it uses as it is


def on_default_device(name: str, values: Tensor) -> Array:
    """A leaf where JAX puts arrays by default; on a CPU that is the memory it was read into."""
    return jax.device_put(values)  # jnp.asarray copies


def hf_names(name: str, names: Names, shape: tuple[int, ...]) -> list[str]:
    """The checkpoint's names of one of our leaves of this shape: one, or one for each layer, or
    for each layer and expert.
    """
    pattern, _ = names[name]
    first = _first_layer(name)
    return [
        pattern.format(*(n + first for n in index[:1]), *index[1:])
        for index in np.ndindex(*shape[: pattern.count("{}")])
    ]


def _first_layer(name: str) -> int:
    """The first layer of a leaf's stack, which its name says where there are several."""
    found = _STACK.search(name)
    return int(found[1]) if found else 0


def decoder_from_tensors(
    config: Config,
    tensors: Mapping[str, Tensor],
    names: Names,
    dtype: DTypeLike | None,
    place: Place = on_default_device,
    *,
    made: Callable[[Decoder], Mapping[str, PyTree]] = lambda skeleton: {},
) -> Decoder:
    """The model that a checkpoint's tensors make, in `dtype`, or None: in the dtype on disk.
    `made(skeleton)` are weights that need not be read any more, by path.

    Raises: ValueError that lists missing and unexpected tensors and those of another shape.
    """
    skeleton = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    ignored = _unused_keys(tensors, config)
    if config.tie_embeddings:
        ignored |= _repeated_head(tensors, names)
    ready = made(skeleton)
    shapes = {name: leaf.shape for name, leaf in named_leaves(skeleton)}
    ignored |= {source for name in ready for source in hf_names(name, names, shapes[name])}
    rest = map_named(lambda name, x: None if name in ready else x, skeleton)
    filled = fill(rest, tensors, names, dtype, place, ignored=ignored)
    return map_named(lambda name, x: ready.get(name, x), filled, lambda x: x is None)


def fill(
    skeleton: T,
    tensors: Mapping[str, Tensor],
    names: Names,
    dtype: DTypeLike | None,
    place: Place,
    *,
    ignored: Set[str] = frozenset(),
) -> T:
    """The skeleton with the arrays that the tensors make in place of its shapes.

    A leaf is read tensor by tensor into the memory it will have, then placed: beside the model,
    the host holds one tensor (and one leaf, where `place` moves it elsewhere). Raises: ValueError.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(skeleton)}
    _check_names(shapes, set(tensors) - ignored, names)
    arrays: dict[str, Array] = {}
    for name, shape in shapes.items():
        arrays[name] = place(name, _read_leaf(name, shape, tensors, names, dtype))
    return map_named(lambda name, _: arrays[name], skeleton)


def tensors_from(model: PyTree, names: Names) -> dict[str, Tensor]:
    """The checkpoint's tensors of a model without adapters; tied embeddings are one tensor.

    Raises: ValueError for a leaf that has no name on disk.
    """
    out: dict[str, Tensor] = {}
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)):
        if name not in names:
            raise ValueError(
                f"expected only plain weights, got {name}; merge and dequantize the model first"
            )
        pattern, transposed = names[name]
        array = np.asarray(leaf)
        each = array.reshape(-1, *array.shape[pattern.count("{}") :])
        for target, tensor in zip(hf_names(name, names, array.shape), each, strict=True):
            out[target] = tensor.swapaxes(-2, -1) if transposed else tensor
    return out


def _check_names(shapes: Mapping[str, tuple[int, ...]], found: set[str], names: Names) -> None:
    """Raise unless the checkpoint has the tensors of these leaves and no others."""
    found = {name for name in found if not name.endswith(_BUFFER)}
    counts = [math.prod(shapes[name][: names[name][0].count("{}")]) for name in shapes]
    if sum(counts) > 2 * len(found) + 1000:  # too many to be named one by one
        raise ValueError(_report(sum(counts) - len(found), [f"{len(found)} are there"]))
    wanted = {n for name, shape in shapes.items() for n in hf_names(name, names, shape)}
    problems = [f"missing {name}" for name in sorted(wanted - found)[:_LISTED]]
    problems += [f"unexpected {name}" for name in sorted(found - wanted)[:_LISTED]]
    if problems:
        raise ValueError(_report(len(wanted ^ found), problems))


def _read_leaf(
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    names: Names,
    dtype: DTypeLike | None,
) -> Tensor:
    """One of our leaves, read tensor by tensor."""
    pattern, transposed = names[name]
    one = shape[pattern.count("{}") :]
    expected = (*one[:-2], one[-1], one[-2]) if transposed else one
    sources = hf_names(name, names, shape)
    out: Tensor | None = None
    kind = None
    problems: list[str] = []
    for i, source in enumerate(sources):
        tensor = tensors[source]
        kind = tensor.dtype if kind is None else kind
        if tensor.shape != expected:
            problems.append(f"{source} of shape {tensor.shape}, not {expected}")
        elif tensor.dtype != kind or not jnp.issubdtype(kind, jnp.floating):
            wanted = kind if jnp.issubdtype(kind, jnp.floating) else "a float"
            problems.append(f"{source} of dtype {tensor.dtype}, not {wanted}")
        else:
            if out is None:
                out = _empty((len(sources), *one), kind if dtype is None else jnp.dtype(dtype))
            out[i] = tensor.swapaxes(-2, -1) if transposed else tensor
        del tensor  # before the next is read
    if problems or out is None:
        raise ValueError(_report(len(problems), problems[:_LISTED]))
    return out.reshape(shape)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> Tensor:
    """Memory that starts where XLA's CPU arrays may."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _repeated_head(tensors: Mapping[str, Tensor], names: Names) -> set[str]:
    """The output head's name, where a tied checkpoint repeats the embeddings under it."""
    head, embed = names["head"][0], names["embed"][0]
    both = head in tensors and embed in tensors
    return {head} if both and np.array_equal(tensors[head], tensors[embed]) else set()


def _unused_keys(tensors: Mapping[str, Tensor], config: Config) -> set[str]:
    """The keys and values that a checkpoint has of layers that attend to those of others."""
    shared = {str(i) for i, kind in enumerate(config.kinds) if kind.source is not None}
    found = ((name, _KEYS.search(name)) for name in tensors) if shared else ()
    return {name for name, match in found if match is not None and match[1] in shared}


def _report(count: int, problems: list[str]) -> str:
    more = f" and {count - len(problems)} more" if count > len(problems) else ""
    return (
        f"expected the tensors that config.json describes, got {count} that differ: "
        f"{'; '.join(problems)}{more}; the files belong to another model, or are incomplete"
    )
