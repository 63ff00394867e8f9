"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Kinds of vocabulary: byte-level BPE with merges ("gpt2"), cut into words first by a pattern that the
file names; SentencePiece BPE ("llama"), which has scores in place of merges; and the same pieces
with merges ("gemma4").
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from .pieces import (
    NORMAL,
    USER_DEFINED,
    Pieces,
    add_ends,
    add_special,
    bpe_model,
    space_decoder,
    space_normalizers,
)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# What a word is, by the file's `tokenizer.ggml.pre`: each pattern cuts what the one before left.
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_LLAMA3 = (_CONTRACTIONS + r"|\p{N}{1,3}|" + _REST,)
_QWEN2 = (_CONTRACTIONS + r"|\p{N}|" + _REST,)
PATTERNS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>")


def backend_from_gguf(fields: Mapping[str, Any]) -> Backend:
    """The tokenizer described by a GGUF file's `tokenizer.ggml.*` fields.

    Raises: ValueError for a kind of vocabulary or a pre-tokenizer this file does not know, and for
    fields of other types or lengths than the format's.
    """
    kind = fields.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ValueError(
            f"expected tokenizer.ggml.model 'gpt2', 'llama' or 'gemma4', got {kind!r}; "
            "load the model in Hugging Face layout"
        )
    # llama.cpp gives tokens that are empty a name, too
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(_texts(fields, "tokens"))]
    types = [int(t) for t in _numbers(fields, "token_type", [NORMAL] * len(tokens))]
    if kind == "llama":
        backend, pieces = _sentencepiece(fields, tokens, types)
    else:
        pieces = Pieces(tokens, [0.0] * len(tokens), types)
        backend = (_byte_level if kind == "gpt2" else _merged)(fields, tokens)
    add_special(backend, pieces)
    texts = pieces.of(USER_DEFINED)
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in texts])
    bos, eos = token_id(fields, "bos"), token_id(fields, "eos")
    begins = bool(fields.get("tokenizer.ggml.add_bos_token", kind != "gpt2"))
    ends = bool(fields.get("tokenizer.ggml.add_eos_token", False))
    add_ends(backend, bos=bos if begins else None, eos=eos if ends else None)
    return backend


def token_id(fields: Mapping[str, Any], name: str) -> int | None:
    """The id of a special token, None where the file names none. Raises: ValueError for no id."""
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    size = len(fields["tokenizer.ggml.tokens"])
    if not isinstance(value, int | np.integer) or not 0 <= value < size:
        if name == "padding":  # some files name one beyond the vocabulary; llama.cpp leaves it out
            return None
        raise ValueError(
            f"expected tokenizer.ggml.{name}_token_id below {size}, got {value!r}; mend the file"
        )
    return int(value)


def turn_end_ids(backend: Backend) -> list[int]:
    """The control tokens that end a turn by their name: files that name none mean these."""
    added = backend.get_added_tokens_decoder()
    return [i for i, token in added.items() if token.special and token.content in _TURN_ENDS]


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    return [_checked(name, value, str) for value in _array(fields, name)]


def _numbers(fields: Mapping[str, Any], name: str, default: Sequence[int]) -> list[float]:
    if f"tokenizer.ggml.{name}" not in fields:
        return [float(i) for i in default]
    kinds = int | float | np.integer | np.floating
    numbers = [float(_checked(name, value, kinds)) for value in _array(fields, name)]
    if not np.isfinite(numbers).all():
        raise ValueError(f"expected finite tokenizer.ggml.{name}, got others; mend the file")
    return numbers


def _array(fields: Mapping[str, Any], name: str) -> Sequence[Any] | np.ndarray:
    value = fields.get(f"tokenizer.ggml.{name}")
    if value is None:
        raise ValueError(
            f"expected tokenizer.ggml.{name} in the GGUF file, got none; "
            "use a file with a tokenizer"
        )
    return _checked(name, value, list | tuple | np.ndarray)


def _checked(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(
            f"expected tokenizer.ggml.{name} of the format's type, got {type(value).__name__}; "
            "mend the file"
        )
    return value


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    """Byte-level BPE: words by regular expression, bytes written as printable characters."""
    pre = fields.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PATTERNS:
        raise ValueError(
            f"expected tokenizer.ggml.pre to be one of {sorted(PATTERNS)}, got {pre!r}; "
            "load the model in Hugging Face layout, whose tokenizer.json holds the rule itself"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [_pair(merge, vocab) for merge in _texts(fields, "merges")]
    whole_words = PATTERNS[pre] is _LLAMA3  # a word that is a token as it stands is not merged
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    if PATTERNS[pre] is _QWEN2:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merged(fields: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    """Merges of characters, spaces written as ▁; what no piece has falls into byte tokens."""
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [_pair(merge, vocab) for merge in _texts(fields, "merges")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(space_normalizers(prefix=False))
    backend.decoder = space_decoder(leading=0)
    return backend


def _pair(merge: str, vocab: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not (left in vocab and right in vocab and left + right in vocab):
        raise ValueError(
            f"expected merges of two tokens into a third, got {merge!r}; the file is broken"
        )
    return left, right


def _sentencepiece(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> tuple[Backend, Pieces]:
    """SentencePiece BPE: merges recovered from the scores, unknown characters as byte tokens."""
    pieces = Pieces(tokens, _numbers(fields, "scores", []), types)
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    backend = Backend(bpe_model(pieces, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(space_normalizers(prefix=prefix))
    backend.decoder = space_decoder(leading=int(prefix))
    return backend, pieces
