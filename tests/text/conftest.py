"""What the tests of text share."""

import pytest

from purepost.models.hub.fetch import fetch
from purepost.models.hub.gguf import read_gguf
from purepost.text import Tokenizer


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """The default model's tokenizer."""
    return read_gguf(fetch("smollm2-135m")).tokenizer
