"""A tokenizer of whole words, whose ids can be read off the text."""

import pytest

from purepost.text import Tokenizer
from tests.data.shared import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Without a BOS of its own."""
    return make_tokenizer()


@pytest.fixture(scope="session")
def with_bos() -> Tokenizer:
    """One whose model expects BOS."""
    return make_tokenizer(bos=True)
