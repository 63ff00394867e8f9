"""Which attention a model uses: the reference, which runs anywhere, or a kernel for an accelerator.

A kernel has the signature of `layers.attention`. It is chosen by a function from model to model,
and is part of the model as its config is:

    policy = with_attention(policy, FlashAttention())

`FlashAttention` takes any forest, `cudnn_attention` rows of one plain sequence each. On a mesh:
`sharding.PerDevice`.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..types import Rows
from .decoder import in_decoders
from .flash import FlashAttention as FlashAttention
from .layers import AttentionFn

Models = TypeVar("Models")


def with_attention(models: Models, attention: AttentionFn) -> Models:
    """The same models (one, or a pytree of several), every decoder's layers attending by
    `attention`. Error: no decoder is among them.
    """
    return in_decoders(models, attend=attention)


def cudnn_attention(
    q: Float[Array, "b t h k"],
    k: Float[Array, "b t n k"],
    v: Float[Array, "b t n k"],
    rows: Rows,
    window: int | Int[Array, ""] | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[Array, "b t h k"]:
    """cuDNN's attention, as `layers.attention` for rows of one plain sequence each, padded on the
    right (`causal_rows`), on an NVIDIA GPU, in bfloat16 or float16.

    A row of any other kind comes out as NaN. Errors: another dtype, a soft-cap, or layers whose
    windows differ, none of which cuDNN takes.
    """
    if isinstance(window, jax.Array):
        raise ValueError("expected one window for all layers, got several; use FlashAttention")
    if softcap is not None:
        raise ValueError(f"expected no soft-cap, got {softcap}; use FlashAttention")
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"expected bfloat16 or float16, got {q.dtype}; use FlashAttention")
    local = None if window is None else (window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):
        out = jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=local, implementation="cudnn"
        )
    index = jnp.arange(q.shape[1], dtype=jnp.int32)
    length = rows.end[:, :1]
    plain = jnp.where(index < length, rows.end == length, rows.end <= index + 1).all(1)
    return jnp.where(plain[:, None, None, None], out, jnp.asarray(jnp.nan, out.dtype))
