"""A tokenizer of whole words, and what hypothesis draws from in several files."""

from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from purepost.text import Tokenizer

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text() | st.integers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)

TEMPLATE = (
    "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<e>"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


def make_tokenizer(*, bos: bool = False) -> Tokenizer:
    """<s> 0, <u> 1 (a user's turn), <a> 2 (an assistant's), <e> 3 (the end), "w4" 4 … "w18" 18."""
    names = ("<s>", "<u>", "<a>", "<e>")
    vocab = {name: i for i, name in enumerate(names)} | {f"w{i}": i for i in range(4, 19)}
    backend = Backend(models.WordLevel(vocab, unk_token="w4"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 0)]
        )
    return Tokenizer(backend, 0, (3,), 0, TEMPLATE)
