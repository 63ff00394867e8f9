"""SentencePiece vocabularies, from whatever file, rebuilt for the `tokenizers` library.

The library has SentencePiece's two models under other definitions. BPE: the neighbours whose piece
scores highest are merged first, so all ways to make each piece, sorted by its score, are the
merges. Unigram: the cut of a text whose scores sum highest, the same here.

Source: Kudo and Richardson, SentencePiece, 1808.06226; Kudo, Subword Regularization, 1804.10959.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_NEVER = -1e6  # the score of what no text is cut into


@dataclass(frozen=True)
class Pieces:
    """A vocabulary: for each id its text, its score and its type.

    Raises: ValueError when the three differ in length, or a piece is empty or there twice.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]

    def __post_init__(self) -> None:
        if not len(self.texts) == len(self.scores) == len(self.types):
            raise ValueError(
                f"expected a score and a type for each of {len(self.texts)} tokens, got "
                f"{len(self.scores)} and {len(self.types)}; the file is incomplete: make it again"
            )
        check_distinct(self.texts)

    def of(self, *types: int) -> list[str]:
        """The texts of some types."""
        return [text for text, t in zip(self.texts, self.types, strict=True) if t in types]


def check_distinct(tokens: Sequence[str]) -> None:
    """Raises: ValueError when a token is empty or there twice."""
    first: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if not token or token in first:
            other = "nothing" if not token else f"{token!r}, as token {first[token]}"
            raise ValueError(f"expected token {i} to be one of its own, got {other}; mend the file")
        first[token] = i


def bpe_model(pieces: Pieces, *, byte_fallback: bool, whole_words: bool = False) -> models.BPE:
    """SentencePiece's BPE; with `whole_words` a word that is a piece is not cut at all."""
    vocab = {text: i for i, text in enumerate(pieces.texts)}
    mergeable = set(pieces.of(NORMAL))
    merges: list[tuple[str, str]] = []
    for text in sorted(mergeable, key=lambda text: (-pieces.scores[vocab[text]], vocab[text])):
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        whole = [(a, b) for a, b in cuts if a in mergeable and b in mergeable]
        merges += sorted(whole, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return models.BPE(
        vocab=vocab,
        merges=merges,
        unk_token=_unknown(pieces),
        fuse_unk=True,
        byte_fallback=byte_fallback,
        ignore_merges=whole_words,
    )


def unigram_model(pieces: Pieces, *, byte_fallback: bool) -> models.Unigram:
    """SentencePiece's unigram model.

    One difference stays: a text that spells a byte token, as "<0x0A>", whose characters are not all
    pieces, becomes that byte.
    """
    usable = (NORMAL, USER_DEFINED)
    rows = zip(pieces.texts, pieces.scores, pieces.types, strict=True)
    vocab = [(text, score if kind in usable else _NEVER) for text, score, kind in rows]
    unknown = _unknown(pieces)
    if unknown is None:
        raise ValueError("expected a token for what is unknown, got none; make the file again")
    return models.Unigram(vocab, pieces.texts.index(unknown), byte_fallback)


def _unknown(pieces: Pieces) -> str | None:
    return next(iter(pieces.of(UNKNOWN)), None)


def isolated(texts: Sequence[str]) -> pre_tokenizers.Split:
    """Cut the texts out of their surroundings, the longest first."""
    longest = sorted(texts, key=len, reverse=True)
    return pre_tokenizers.Split(Regex("|".join(map(re.escape, longest))), behavior="isolated")


def space_decoder(*, leading: int) -> decoders.Decoder:
    """Text from pieces, without so many spaces at its beginning."""
    tail = [decoders.Strip(" ", leading, 0)] if leading else []
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    )


def space_normalizers(*, prefix: bool) -> list[normalizers.Normalizer]:
    """Write spaces as "▁", and one before every stretch of text between special tokens."""
    return [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]


def add_special(backend: Backend, pieces: Pieces) -> None:
    """Mark control tokens: they are found in text before it is cut into words."""
    special = pieces.of(CONTROL, UNKNOWN)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])


def add_ends(backend: Backend, *, bos: int | None, eos: int | None) -> None:
    """Let `encode(add_special_tokens=True)` put BOS before and EOS after a text, where given."""
    names = {i: backend.id_to_token(i) or "" for i in (bos, eos) if i is not None}
    before = [] if bos is None else [names[bos]]
    after = [] if eos is None else [names[eos]]
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(name, i) for i, name in names.items()],
    )
