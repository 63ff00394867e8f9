"""A restricted model says what the whole one does, given that it is one of fewer tokens."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder, init_decoder
from purepost.models.vocabulary import restrict
from purepost.types import causal_rows
from purepost.weights import add_lora


@pytest.mark.parametrize("tied", [True, False])
def test_probabilities_are_conditional(model: Decoder, tied: bool) -> None:
    if not tied:
        model = init_decoder(jr.key(0), replace(model.config, tie_embeddings=False))
    rows = causal_rows(jnp.asarray([[3, 1, 4, 1, 5]], jnp.int32), jnp.asarray([5], jnp.int32))

    @eqx.filter_jit
    def logits(m: Decoder) -> jax.Array:
        return m.unembed(m(rows)[0])

    small = restrict(model, 11)
    got, whole = jax.nn.log_softmax(logits(small)), logits(model)
    assert got.shape == (1, 5, 11) and small.config.vocab_size == 11
    np.testing.assert_allclose(got, jax.nn.log_softmax(whole[..., :11]), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_restricted_is_an_error(model: Decoder) -> None:
    for size in (0, 20):
        with pytest.raises(ValueError, match=f"from 1 to 19 tokens, the model's, got {size}"):
            restrict(model, size)
    untied = init_decoder(jr.key(0), replace(model.config, tie_embeddings=False))
    adapted = add_lora(untied, where="head", rank=2, alpha=2.0, key=jr.key(1))
    with pytest.raises(ValueError, match="got LowRank; merge adapters first"):
        restrict(adapted, 5)
