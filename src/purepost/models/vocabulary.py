"""A model of fewer tokens, as a transform: tables of embeddings are often longer than what their
tokenizer makes, and by different amounts in models of one family.
"""

import dataclasses

import jax

from .decoder import Decoder


def restrict(model: Decoder, size: int) -> Decoder:
    """The model of its first `size` tokens, which share all of the probability.

    Errors: more tokens than it has; a head with adapters or in few bits.
    """
    have = model.config.vocab_size
    if not 1 <= size <= have:
        raise ValueError(f"expected from 1 to {have} tokens, the model's, got {size}")
    head = model.head
    if head is not None:
        if not isinstance(head, jax.Array):
            raise ValueError(
                f"expected a head that is an array, got {type(head).__name__}; merge adapters first"
            )
        head = head[:, :size]
    config = dataclasses.replace(model.config, vocab_size=size)
    return dataclasses.replace(model, embed=model.embed[:size], head=head, config=config)
