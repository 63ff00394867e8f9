"""The trained tokens of rows, brought together in chunks of a fixed number and put back."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..types import Rows

CHUNK = 256  # tokens at a time, where several arrays of a chunk's size are held
LOGITS = 2**26  # that exist at a time, where they are one array: 256 MiB of float32


def tokens_at_once(unembed: Any, hidden: Float[Array, "b t d"]) -> int:
    """Of how many tokens there may be logits at a time: a power of 2, LOGITS at most."""
    vocabulary = eqx.filter_eval_shape(unembed, hidden).shape[-1]
    return 1 << max(0, (LOGITS // vocabulary).bit_length() - 1)


class Trained(eqx.Module):
    """Where the trained tokens of rows stand, in order, filled up to whole chunks."""

    index: Int[Array, "b n"]  # of the token in its row; t where there is none
    parent: Int[Array, "b n"]  # of the token before it
    targets: Int[Array, "b n"]  # the token
    mask: Bool[Array, "b t"]
    size: int = eqx.field(static=True)  # tokens of a row in one chunk

    @staticmethod
    def of(rows: Rows, chunk: int, capacity: int | None = None) -> "Trained":
        """The trained tokens of rows, at most `chunk` at a time over all rows, in chunks of like
        size; room for `capacity` of each row, by default the most that it may hold.
        """
        b, t = rows.tokens.shape
        room = min(rows.most_trained, t) if capacity is None else capacity
        most = max(1, min(chunk // b, room))
        size = -(-room // max(1, -(-room // most))) or 1
        index = jax.vmap(lambda m: jnp.nonzero(m, size=room, fill_value=t)[0])(rows.mask)
        index = jnp.pad(index.astype(jnp.int32), [(0, 0), (0, -room % size)], constant_values=t)
        place = jnp.minimum(index, t - 1)
        parent, targets = (jnp.take_along_axis(x, place, 1) for x in (rows.parent, rows.tokens))
        return Trained(index, parent, targets, rows.mask, size)

    @property
    def capacity(self) -> int:
        """Room for tokens of a row, the filling included."""
        return self.index.shape[1]

    def gather(self, hidden: Float[Array, "b t d"]) -> Float[Array, "b n d"]:
        """The hidden states that the trained tokens are predicted from."""
        return jnp.take_along_axis(hidden, self.parent[..., None], 1)

    def chunks(self, x: Array) -> Array:
        """[b, n, ...] → [chunks, b, size, ...]."""
        b, n, *rest = x.shape
        return x.reshape(b, n // self.size, self.size, *rest).swapaxes(0, 1)

    def back(self, x: Float[Array, "c b s"]) -> Float[Array, "b t"]:
        """Numbers of chunks at their tokens' places, 0 elsewhere."""
        t = self.mask.shape[1]
        flat = x.swapaxes(0, 1).reshape(self.index.shape)
        filled = jax.vmap(lambda i, y: jnp.zeros(t).at[i].set(y, mode="drop"))(self.index, flat)
        return jnp.where(self.mask, filled, 0.0)
