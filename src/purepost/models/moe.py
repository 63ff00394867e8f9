"""A mixture of experts in the place of a layer's MLP, or beside it: every token goes to its
likeliest few.

No token is dropped: an expert computes as many as chose it.
Source: Shazeer et al., Outrageously large neural networks, 1701.06538, §2; Gale et al.,
MegaBlocks, 2211.15841, §4 (none dropped).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, Key

from ..mean import Mean
from ..types import Rows
from ..weights import Weight, grouped_linear, linear
from .layers import Activation, rms_norm, subkey


class MoE(eqx.Module):
    """Σ over the chosen experts e of p_e · down_e(activation(gate_e x) · up_e x)."""

    router: Weight  # [d, e]
    gate: Weight  # [e, d, f]
    up: Weight
    down: Weight  # [e, f, d]
    scale: Float[Array, "*l e"] | None = None  # what every expert gives is multiplied by its own

    def __call__(
        self,
        x: Float[Array, "*s d"],
        activation: Activation,
        chosen: int,
        *,
        normalize: bool,
        key: Key[Array, " b"] | None = None,
        routed: Float[Array, "*s d"] | None = None,
    ) -> tuple[Float[Array, "*s d"], Float[Array, "*s e"]]:
        """The block's output, and the router's probabilities, float32; `chosen` experts a token.

        `normalize` makes the chosen experts' weights add up to 1; `key` (one per row) turns adapter
        dropout on; `routed` is what the router reads, by default x.
        """
        routed = x if routed is None else routed
        logits = linear(routed, self.router, key=subkey(key, 7)).astype(jnp.float32)
        probabilities = jax.nn.softmax(logits)
        weights, experts = jax.lax.top_k(probabilities, chosen)
        if normalize:
            weights /= weights.sum(-1, keepdims=True)
        if self.scale is not None:
            weights *= self.scale.astype(jnp.float32)[experts]
        order, sizes = by_expert(experts.reshape(-1), probabilities.shape[-1])

        def sort(y: Array) -> Array:
            """[*s, ...] → one for every choice, by expert."""
            flat = y.reshape(-1, y.shape[-1])
            repeated = jnp.repeat(
                flat, chosen, 0
            )  # its gradient is a sum, where a gather's adds up
            return repeated.at[order].get(unique_indices=True)

        def keys(name: int) -> Key[Array, " n"] | None:
            return None if key is None else _choice_keys(key, name, experts.size)[order]

        inputs = sort(x)
        gate = grouped_linear(inputs, self.gate, sizes, key=keys(4))
        up = grouped_linear(inputs, self.up, sizes, key=keys(5))
        out = grouped_linear(activation(gate) * up, self.down, sizes, key=keys(6))
        out = out.at[jnp.argsort(order)].get(unique_indices=True).reshape(*experts.shape, -1)
        return (out * weights[..., None].astype(x.dtype)).sum(-2), probabilities


class SideExperts(eqx.Module):
    """A mixture of experts beside a layer's MLP, on the same stream: norm(MLP) + norm(MoE(norm x)).

    The router reads the stream by a norm of its own, divided by √d.
    """

    norm: Float[Array, "*l d"]
    router_norm: Float[Array, "*l d"]
    mlp: MoE
    post_norm: Float[Array, "*l d"]
    mlp_post_norm: Float[Array, "*l d"]  # of what the layer's own MLP gives

    def __call__(
        self,
        x: Float[Array, "*s d"],
        beside: Float[Array, "*s d"],
        activation: Activation,
        chosen: int,
        eps: float,
        *,
        key: Key[Array, " b"] | None = None,
    ) -> tuple[Float[Array, "*s d"], Float[Array, "*s e"]]:
        """The sum of both, `beside` being what the MLP gives, and the router's probabilities."""
        routed = rms_norm(x, self.router_norm, eps) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        out, router = self.mlp(
            rms_norm(x, self.norm, eps),
            activation,
            chosen,
            normalize=True,
            key=subkey(key, 10),
            routed=routed,
        )
        normed = rms_norm(beside, self.mlp_post_norm, eps)
        return normed + rms_norm(out, self.post_norm, eps), router


def by_expert(experts: Int[Array, " n"], count: int) -> tuple[Int[Array, " n"], Int[Array, " e"]]:
    """The order that sorts choices by expert, and how many chose each of `count` experts."""
    sizes = (experts[:, None] == jnp.arange(count, dtype=experts.dtype)).sum(0, dtype=jnp.int32)
    return jnp.argsort(experts), sizes


def _choice_keys(key: Key[Array, " b"], name: int, choices: int) -> Key[Array, " n"]:
    """A key for every choice of every row."""
    indices = jnp.arange(choices // key.shape[0], dtype=jnp.uint32)
    of_row = lambda k: jax.vmap(lambda i: jr.fold_in(jr.fold_in(k, name), i))(indices)  # noqa: E731
    return jax.vmap(of_row)(key).reshape(-1)


def real_tokens(rows: Rows) -> Bool[Array, "b t"]:
    """Which slots of the rows hold a token of more than itself, and no padding."""
    index = jnp.arange(rows.end.shape[1], dtype=rows.end.dtype)
    return (rows.end > index) & ((rows.end > index + 1) | (rows.parent != index))


def expert_shares(
    probabilities: Float[Array, "l b t e"], real: Bool[Array, "b t"], chosen: int
) -> Float[Array, " e"]:
    """f_i, the share of the real tokens of all layers that choose expert i; they add up to
    `chosen`.
    """
    count = probabilities.shape[-1]
    _, experts = jax.lax.top_k(probabilities, chosen)
    picked = (experts[..., None] == jnp.arange(count, dtype=experts.dtype)).any(-2)
    return _mean(picked.astype(jnp.float32), real).value


def load_balance(
    probabilities: Float[Array, "l b t e"], real: Bool[Array, "b t"], shares: Float[Array, " e"]
) -> Mean:
    """e · Σ_i f_i p_i, p_i the mean probability of expert i over the real tokens of all layers;
    with the shares of the same tokens it is `chosen` at an even load.

    Source: Fedus et al., Switch Transformers, 2101.03961, eq. 4-6, for several experts a token.
    """
    mean = _mean(probabilities, real)
    factors = probabilities.shape[-1] * jax.lax.stop_gradient(shares)
    return Mean((factors * mean.total).sum(), mean.weight[0])


def load_balancing_loss(
    probabilities: Float[Array, "l b t e"], real: Bool[Array, "b t"], chosen: int
) -> Float[Array, ""]:
    """`load_balance` by the tokens' own shares. Rows couple: it is of a whole batch."""
    return load_balance(probabilities, real, expert_shares(probabilities, real, chosen)).value


def _mean(x: Float[Array, "l b t e"], real: Bool[Array, "b t"]) -> Mean:
    """Of every expert, over the real tokens of all layers."""
    total = jnp.where(real[None, ..., None], x, 0.0).sum((0, 1, 2))
    return Mean(total, jnp.full(total.shape, x.shape[0] * real.sum(dtype=jnp.float32)))
