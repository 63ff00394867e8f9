"""The overlong penalty, in tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from purepost.rewards import overlong, overlong_penalty
from purepost.rollout.collect import Tasks
from purepost.rollout.sample import Completions, pad_prompts


def test_values():
    """L 10, C 4: 0 up to 6 tokens, then a quarter each, −1 from 10 on and never less."""
    lengths = jnp.asarray([0, 6, 7, 9, 10, 40000], jnp.int32)
    got = overlong_penalty(lengths, 10, 4)
    np.testing.assert_allclose(got, [0, 0, -0.25, -0.75, -1, -1])


@pytest.mark.parametrize("buffer", [0, 11])
def test_the_buffer_lies_within_the_limit(buffer):
    with pytest.raises(ValueError, match=f"0 < buffer ≤ max_tokens, got {buffer} and 10"):
        overlong(lambda tasks, completions: (jnp.zeros((1, 1)), {}), 10, buffer)


def test_it_is_added_to_a_reward_and_stands_beside_several():
    lengths = jnp.asarray([[2, 4]], jnp.int32)
    zeros = jnp.zeros((1, 2, 4))
    completions = Completions(zeros.astype(jnp.int32), zeros, lengths, lengths)
    tasks = Tasks(pad_prompts([[1]]))
    one = overlong(lambda t, c: (jnp.ones((1, 2)), {}), 4, 2)
    rewards, metrics = one(tasks, completions)
    np.testing.assert_allclose(rewards, [[1, 0]])
    np.testing.assert_allclose(metrics["rewards/overlong/mean"].value, -0.5)
    two = overlong(lambda t, c: (jnp.ones((1, 2, 2)), {}), 4, 2)
    np.testing.assert_allclose(two(tasks, completions)[0], [[[1, 1, 0], [1, 1, -1]]])
