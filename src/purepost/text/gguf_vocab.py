"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

Two kinds of vocabulary are common: byte-level BPE with merges ("gpt2"), cut into words first by a
pattern that the file names, and SentencePiece BPE ("llama"), which has scores in place of merges:
the piece with the highest score is merged first, so sorting all merges by score does the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

CONTROL, USER_DEFINED = 3, 4  # token types of the format; 1 normal, 2 unknown, 5 unused, 6 byte

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


def backend_from_gguf(fields: Mapping[str, Any]) -> Backend:
    """The tokenizer described by a GGUF file's `tokenizer.ggml.*` fields.

    Raises: ValueError for a kind of vocabulary or a pre-tokenizer this file does not know.
    """
    kind = fields.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in fields:
        raise ValueError(
            "expected tokenizer.ggml.tokens in the GGUF file, got none; use a file with a tokenizer"
        )
    tokens = list(fields["tokenizer.ggml.tokens"])
    types = [int(t) for t in fields.get("tokenizer.ggml.token_type", [1] * len(tokens))]
    if kind == "gpt2":
        backend = _byte_level(fields, tokens)
    elif kind == "llama":
        backend = _sentencepiece(fields, tokens, types)
    else:
        raise ValueError(
            f"expected tokenizer.ggml.model 'gpt2' or 'llama', got {kind!r}; "
            "load the model in Hugging Face layout"
        )
    _add_special(backend, tokens, types)
    _add_bos(backend, fields, tokens, default=kind == "llama")
    return backend


def _byte_level(fields: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    """Byte-level BPE: words by regular expression, bytes written as printable characters."""
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ValueError(
            f"expected tokenizer.ggml.pre to be one of {sorted(PATTERNS)}, got {pre!r}; "
            "load the model in Hugging Face layout, whose tokenizer.json holds the rule itself"
        )
    merges = [_pair(merge) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    whole_words = PATTERNS[pre] is _LLAMA3  # a word that is a token as it stands is not merged
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    if PATTERNS[pre] is _QWEN2:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ", 1)
    return left, right


def _sentencepiece(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]
) -> Backend:
    """SentencePiece BPE: merges recovered from the scores, unknown characters as byte tokens."""
    scores = [float(s) for s in fields.get("tokenizer.ggml.scores", ())]
    if len(scores) != len(tokens):
        raise ValueError(
            f"expected {len(tokens)} tokenizer.ggml.scores, got {len(scores)}; "
            "the file is incomplete: make it again"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    mergeable = {token for token, kind in zip(tokens, types, strict=True) if kind == 1}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in mergeable:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[vocab[token]], vocab[left], vocab[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    unknown = tokens[int(fields.get("tokenizer.ggml.unknown_token_id", 0))]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    space = normalizers.Replace(" ", "▁")
    head = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*head, space])
    tail = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )
    return backend


def _add_special(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Mark control and user-defined tokens: they are found in text before it is cut into words."""
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _add_bos(
    backend: Backend, fields: Mapping[str, Any], tokens: Sequence[str], *, default: bool
) -> None:
    """Let `encode(add_special=True)` begin with BOS where the file says so."""
    bos = fields.get("tokenizer.ggml.bos_token_id")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", default):
        name = tokens[int(bos)]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A {name} $B", special_tokens=[(name, int(bos))]
        )
