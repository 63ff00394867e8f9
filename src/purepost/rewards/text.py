"""Python rewards of texts, as the rewards of token ids that a collector asks for."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from ..mean import Metrics
from ..rollout.collect import Reward, Tasks
from ..rollout.sample import Completions
from ..text.tokenizer import Tokenizer
from .host import HostReward


def text_reward(functions: HostReward, tokenizer: Tokenizer, *, apart: bool = False) -> Reward:
    """The reward that decodes completions, less special tokens, and has the functions judge them.

    With `apart` each function is a reward by itself, weighted, as `gdpo` takes them; a sample that
    one of them failed on has none.

    `tasks.columns` holds lists with an entry for each prompt; the functions get the column
    "prompt" as `prompts`, and the others by their names. It runs on the host, so a step with it
    cannot be fused.
    """

    def reward(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g *k"], Metrics]:
        if isinstance(completions.tokens, Tracer):
            raise TypeError("a reward in Python cannot be fused; use train(..., fused=False)")
        if "prompt" not in tasks.columns:
            raise ValueError(
                f"expected a column 'prompt' in the tasks, got {sorted(tasks.columns)}; "
                "put the prompts' texts or messages there"
            )
        tokens, lengths = np.asarray(completions.tokens), np.asarray(completions.lengths)
        p, g = lengths.shape
        texts = [
            tokenizer.decode(tokens[i, j, : lengths[i, j]]) for i in range(p) for j in range(g)
        ]
        columns: dict[str, list[Any]] = {
            name: [x for x in values for _ in range(g)] for name, values in tasks.columns.items()
        }
        scores = functions(columns.pop("prompt"), texts, columns)
        groups = np.repeat(np.arange(p), g)
        parts = {k: m for k, m in scores.metrics(groups).items() if k.startswith("rewards/")}
        if not apart:
            return jnp.asarray(scores.rewards.reshape(p, g)), parts
        weighted = scores.per_function * np.asarray(functions.weights, np.float32)
        each = np.where(scores.scored[:, None], weighted, np.nan)
        return jnp.asarray(each.reshape(p, g, -1)), parts

    return reward
