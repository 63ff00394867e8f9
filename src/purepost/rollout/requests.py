"""What an engine is asked for and what it answers, and how these are `generate`'s arrays."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Float, Int, UInt32

from ..types import KeyArray
from .draw import Sampling
from .sample import Completions, Prompts

CANCELLED = -1  # beside LENGTH and STOP: why a completion ended


@dataclass(frozen=True)
class Request:
    """One completion of one prompt."""

    id: Hashable  # unique among those that have not ended
    prompt: Sequence[int]
    key: UInt32[np.ndarray, " w"]  # data of the row's key: token t is drawn with fold_in(key, t)
    sampling: Sampling
    strings: Sequence[int] | None = None  # which of the engine's stop strings count; None: all
    first: int = 0  # the number of its first token: what goes on with a completion goes on counting
    remember: bool = False  # prompt and completion are the beginning of another prompt


@dataclass(frozen=True)
class Result:
    """A completion. A stop id is part of it."""

    id: Hashable
    tokens: Int[np.ndarray, " t"]
    logps: Float[np.ndarray, " t"]  # as in `Completions`
    versions: Int[np.ndarray, " t"]  # of the weights that each token was drawn by
    finish: int  # LENGTH, STOP or CANCELLED


@dataclass
class Row:
    """A request that is being answered."""

    request: Request
    tokens: list[int]  # prompt and completion
    version: int | None = None  # of the weights of its keys and values; None: of several
    cached: int = 0  # tokens whose keys and values are in its slot
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        """Whether all but the last token are in the slot: that one is fed to draw the next."""
        return self.cached == len(self.tokens) - 1

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return len(self.request.prompt) + self.request.sampling.max_tokens

    def result(self, finish: int) -> Result:
        """What it has come to."""
        return Result(
            self.request.id,
            np.asarray(self.tokens[len(self.request.prompt) :], np.int32),
            np.asarray(self.logps, np.float32),
            np.asarray(self.versions, np.int32),
            finish,
        )


def key_data(key: KeyArray) -> UInt32[np.ndarray, " w"]:
    """What a request holds of its key."""
    return np.asarray(jr.key_data(key))


def requests_for(
    key: KeyArray,
    prompts: Prompts,
    sampling: Sampling,
    *,
    group: int = 1,
    strings: Sequence[int] | None = None,
    remember: bool = False,
) -> list[Request]:
    """`group` requests for every prompt, with the random numbers that `generate` has for the same
    arguments. Their ids are (number of the prompt, number of the branch).
    """
    ids = np.asarray(prompts.ids)[:, None] * group + np.arange(group, dtype=np.int32)
    keys = jax.vmap(lambda i: jr.key_data(jr.fold_in(key, i)))(jnp.asarray(ids.reshape(-1)))
    keys = np.asarray(keys).reshape(*ids.shape, -1)
    tokens, lengths = np.asarray(prompts.tokens), np.asarray(prompts.lengths)
    return [
        Request(
            (p, g),
            tokens[p, : lengths[p]].tolist(),
            keys[p, g],
            sampling,
            strings=strings,
            remember=remember,
        )
        for p, g in np.ndindex(ids.shape)
    ]


def as_completions(results: Sequence[Result], *, group: int, max_tokens: int) -> Completions:
    """The results of `requests_for`, in its order, as `generate` gives them."""
    n = len(results)
    tokens = np.zeros((n, max_tokens), np.int32)
    logps = np.zeros((n, max_tokens), np.float32)
    for i, result in enumerate(results):
        tokens[i, : len(result.tokens)] = result.tokens
        logps[i, : len(result.tokens)] = result.logps
    fold = lambda x: jnp.asarray(x).reshape(n // group, group, *x.shape[1:])  # noqa: E731
    return Completions(
        fold(tokens),
        fold(logps),
        fold(np.asarray([len(r.tokens) for r in results], np.int32)),
        fold(np.asarray([r.finish for r in results], np.int32)),
    )
