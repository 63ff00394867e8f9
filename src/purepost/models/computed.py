"""A model that was run already, for losses that run it."""

from collections.abc import Callable

import equinox as eqx
from jaxtyping import Array, Float

from ..types import KeyArray, Rows


class Computed(eqx.Module):
    """A language model that has its hidden states at hand: of `rows`, or of rows that only its
    maker knows.
    """

    hidden: Float[Array, "b t d"]
    unembed: Callable[[Float[Array, "*s d"]], Float[Array, "*s v"]]
    rows: Rows | None = None

    def __call__(
        self, rows: Rows, *, key: KeyArray | None = None
    ) -> tuple[Float[Array, "b t d"], None]:
        """The hidden states. Error: other rows than those that it knows."""
        mine = rows if self.rows is None else self.rows
        pairs = ((rows.tokens, mine.tokens), (rows.end, mine.end), (rows.positions, mine.positions))
        if any(one is not other for one, other in pairs):
            raise ValueError(
                "expected a loss that runs its model on the batch's own rows, got others; its "
                "router cannot be read from outside"
            )
        return self.hidden, None
