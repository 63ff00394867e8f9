"""What the backward pass keeps of a layer's forward pass, and what it computes again.

A policy is a function from a layer to that layer as it is differentiated: a
`jax.checkpoint` with any policy of JAX's will do.

    model = with_remat(model, block)

Source: Chen et al., Training deep nets with sublinear memory cost, 1604.06174, §4.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Model = TypeVar("Model")
ATTENTION = "attention"  # the name of what attention gave, for policies that keep it

# (stream, (weights and what else differs between layers)) → (stream, what is kept of the layer)
Layer = Callable[[Any, Any], tuple[Any, Any]]
Remat = Callable[[Layer], Layer]


def none(layer: Layer) -> Layer:
    """Everything is kept: nothing but attention is computed twice, at the most memory."""
    return layer


def dots(layer: Layer) -> Layer:
    """What attention and the products with weights gave is kept, the rest computed again: cheaper
    than writing it to memory and reading it back.
    """
    policies = jax.checkpoint_policies
    saved = policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION)
    )
    return jax.checkpoint(layer, policy=saved, prevent_cse=False)


def block(layer: Layer) -> Layer:
    """Only what enters the layer is kept: the least memory, for one more forward pass."""
    return jax.checkpoint(layer, prevent_cse=False)
