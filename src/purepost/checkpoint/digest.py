"""Digests of arrays, computed where they lie."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped, UInt32

from ..tree import named_leaves

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16}  # by bytes; wider ones become several uint32


def digests(tree: PyTree) -> dict[str, str]:
    """Name → digest of every array of a tree: equal bits, shapes and types, equal digests.

    64 bits, the same for every sharding, found in one read of the memory. They tell two models
    apart; they do not resist someone who wants to deceive.
    """
    named = {name: leaf for name, leaf in named_leaves(tree) if eqx.is_array(leaf)}
    hashes = jax.device_get(_hash_all(tuple(named.values())))
    return {
        name: f"{leaf.dtype}{list(leaf.shape)} {int(pair[0]):08x}{int(pair[1]):08x}"
        for (name, leaf), pair in zip(named.items(), hashes, strict=True)
    }


@jax.jit
def _hash_all(leaves: tuple[Shaped[Array, "..."], ...]) -> list[UInt32[Array, "2"]]:
    return [_hash(leaf) for leaf in leaves]


def _hash(x: Shaped[Array, "..."]) -> UInt32[Array, "2"]:
    """Σ_i mix(bits_i, i) modulo 2³², for two mixings: a sum does not mind the order.

    mix is the finalizer of MurmurHash3, which is in the public domain.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    small = x.dtype.name in ("bool", "int2", "uint2", "int4", "uint4")
    x = x.astype(jnp.int8) if small else x
    words = jax.lax.bitcast_convert_type(x, _UNSIGNED.get(x.dtype.itemsize, jnp.uint32))
    bits = words.astype(jnp.uint32)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        step = jnp.asarray(size, jnp.uint32)
        place = place * step + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)

    def mixed(seed: int) -> UInt32[Array, ""]:
        h = bits ^ (place * jnp.uint32(0x9E3779B9) + jnp.uint32(seed))
        h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
        h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
        return (h ^ (h >> 16)).sum(dtype=jnp.uint32)

    return jnp.stack([mixed(0), mixed(0x5BD1E995)])
