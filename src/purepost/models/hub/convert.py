"""Between a Decoder and the tensors of a Hugging Face checkpoint.

On disk a projection is [out, in] and every layer's stands alone; ours are [layer, in, out].
"""

from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from ...tree import map_named, named_leaves
from ..decoder import Config, Decoder, init_decoder
from .families import Family

Tensor = Shaped[np.ndarray, "..."]

_BUFFER = ".rotary_emb.inv_freq"  # old checkpoints store what follows from the configuration
_LISTED = 8  # names of each kind that an error lists


def hf_names(name: str, family: Family, num_layers: int) -> list[str]:
    """The checkpoint's names of one of our leaves: one, or one per layer."""
    pattern, _ = family.names[name]
    return [pattern.format(i) for i in range(num_layers)] if "{}" in pattern else [pattern]


def decoder_from_tensors(
    config: Config, tensors: Mapping[str, Tensor], family: Family, dtype: DTypeLike | None
) -> Decoder:
    """The model that a checkpoint's tensors make, in `dtype`, or None: in the dtype on disk.

    Raises: ValueError that lists missing and unexpected tensors and those of another shape.
    """
    skeleton = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    leaves = dict(named_leaves(skeleton))
    wanted = {n for name in leaves for n in hf_names(name, family, config.num_layers)}
    found = {name for name in tensors if not name.endswith(_BUFFER)}
    if config.tie_embeddings:
        found -= _repeated_head(tensors, family)
    problems = [f"missing {name}" for name in sorted(wanted - found)[:_LISTED]]
    problems += [f"unexpected {name}" for name in sorted(found - wanted)[:_LISTED]]
    if problems:
        raise ValueError(_report(len(wanted ^ found), problems))
    arrays: dict[str, Array] = {}
    for name, leaf in leaves.items():
        stacked = _stack(name, leaf.shape, tensors, family, config, problems)
        arrays[name] = jnp.array(stacked, dtype=stacked.dtype if dtype is None else dtype)
    if problems:
        raise ValueError(_report(len(problems), problems[:_LISTED]))
    return map_named(lambda name, _: arrays[name], skeleton)


def tensors_from_decoder(model: Decoder, family: Family) -> dict[str, Tensor]:
    """The checkpoint's tensors of a model without adapters; tied embeddings are one tensor.

    Raises: ValueError for a leaf that has no name on disk.
    """
    out: dict[str, Tensor] = {}
    for name, leaf in named_leaves(eqx.filter(model, eqx.is_array)):
        if name not in family.names:
            raise ValueError(f"expected only plain weights, got {name}; merge the model first")
        array = np.asarray(leaf)
        layers = array if _is_stacked(name, family) else [array]
        for target, layer in zip(hf_names(name, family, len(layers)), layers, strict=True):
            out[target] = layer.T if family.names[name][1] else layer
    return out


def _is_stacked(name: str, family: Family) -> bool:
    return "{}" in family.names[name][0]


def _stack(
    name: str,
    shape: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    family: Family,
    config: Config,
    problems: list[str],
) -> Tensor:
    """One of our leaves from its tensors; what does not fit becomes a line in `problems`."""
    transposed = family.names[name][1]
    sources = hf_names(name, family, config.num_layers)
    one = shape[1:] if _is_stacked(name, family) else shape
    expected = one[::-1] if transposed else one
    out = np.empty((len(sources), *one), tensors[sources[0]].dtype)
    for i, source in enumerate(sources):
        tensor = tensors[source]
        if tensor.shape != expected:
            problems.append(f"{source} of shape {tensor.shape}, not {expected}")
        elif tensor.dtype != out.dtype:
            problems.append(f"{source} of dtype {tensor.dtype}, not {out.dtype}")
        else:
            out[i] = tensor.T if transposed else tensor
    return out.reshape(shape)


def _repeated_head(tensors: Mapping[str, Tensor], family: Family) -> set[str]:
    """The output head's name, where a tied checkpoint repeats the embeddings under it."""
    head, embed = family.names["head"][0], family.names["embed"][0]
    if head in tensors and embed in tensors and np.array_equal(tensors[head], tensors[embed]):
        return {head}
    return set()


def _report(count: int, problems: list[str]) -> str:
    more = f" and {count - len(problems)} more" if count > len(problems) else ""
    return (
        f"expected the tensors that config.json describes, got {count} that differ: "
        f"{'; '.join(problems)}{more}; the files belong to another model, or are incomplete"
    )
