"""What the peers and purepost are given, in NumPy: the same logits, masks, rewards and numbers.

Eight completions of two prompts in rows of [prompt | completion, padded with 0]; rows 2i and 2i + 1
are also a pair, the chosen one first. logits[row, t] is of the token at t + 1.
"""

from dataclasses import dataclass

import numpy as np

PROMPT, WIDTH, VOCAB, GROUP, EOS = 2, 6, 7, 4, 6
LENGTHS = np.array([6, 4, 2, 6, 1, 5, 3, 6])
ROWS, COLUMNS = len(LENGTHS), PROMPT + WIDTH
MARGINS = np.array([0.0, 0.5, 1.0, 0.2], np.float32)
GOOD = np.arange(ROWS) % 3 > 0  # KTO's labels
UNSCORED = 5  # the row that has no reward in the case about it

# Without jaxtyping, which the peers' environments need not have: float32 [8, 8, 7].
Logits = np.ndarray


@dataclass(frozen=True)
class Inputs:
    """Everything that a loss may read."""

    tokens: np.ndarray  # [8, 8]
    mask: np.ndarray  # [8, 8], trained tokens
    logits: Logits  # the policy's, which gradients are taken of
    old: Logits  # the policy's at the rollout
    sampler: Logits
    ref: Logits
    teacher: Logits
    kl_tokens: np.ndarray  # [8, 8]; KTO's mismatched rows: the next row's completion
    kl_mask: np.ndarray  # [8, 8]
    kl_logits: Logits
    kl_ref: Logits
    rewards: np.ndarray  # [8, 2]
    scores: np.ndarray  # [8], a reward model's
    values: np.ndarray  # [8, 6], a critic's, of the completions
    old_values: np.ndarray  # [8, 6]
    advantages: np.ndarray  # [8, 6]


def inputs() -> Inputs:
    """The same numbers everywhere."""
    rng = np.random.default_rng(0)

    def noise(scale: float) -> Logits:
        """Of one prompt the same; completions each with their own."""
        x = scale * rng.normal(size=(ROWS, COLUMNS, VOCAB))
        x[:, :PROMPT] = x[::GROUP, :PROMPT].repeat(GROUP, 0)
        return x.astype(np.float32)

    place = np.arange(COLUMNS)
    mask = (place >= PROMPT) & (place < PROMPT + LENGTHS[:, None])
    tokens = rng.integers(1, EOS, (ROWS, COLUMNS))
    tokens[:, :PROMPT] = tokens[::GROUP, :PROMPT].repeat(GROUP, 0)
    ends = (place == PROMPT + LENGTHS[:, None] - 1) & (LENGTHS[:, None] < WIDTH)
    tokens = np.where(ends, EOS, np.where(mask | (place < PROMPT), tokens, 0)).astype(np.int32)
    after = np.roll(np.arange(ROWS), -1)
    kl_tokens = np.concatenate([tokens[:, :PROMPT], tokens[after, PROMPT:]], 1)
    logits = noise(1.5)
    old = logits + noise(0.3)
    return Inputs(
        tokens=tokens,
        mask=mask,
        logits=logits,
        old=old,
        sampler=old + noise(0.3),
        ref=logits + noise(0.5),
        teacher=logits + noise(1.0),
        kl_tokens=kl_tokens,
        kl_mask=mask[after],
        kl_logits=noise(1.5),
        kl_ref=noise(1.5),
        rewards=rng.normal(size=(ROWS, 2)).astype(np.float32),
        scores=rng.normal(size=ROWS).astype(np.float32),
        values=rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        old_values=rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        advantages=rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
    )


def logps_of(logits: Logits, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """log π of every token given those before it; 0 at the first."""
    x = logits[:, :-1].astype(np.float64) / temperature
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    found = np.take_along_axis(x, tokens[:, 1:, None], -1)[..., 0]
    return np.pad(found, [(0, 0), (1, 0)]).astype(np.float32)


def sums(logits: Logits, x: Inputs) -> np.ndarray:
    """log π of every completion."""
    return np.where(x.mask, logps_of(logits, x.tokens), 0.0).sum(1)


def fold(gradient: np.ndarray) -> np.ndarray:
    """A gradient of the logits as one vector, summed over the two copies of a pair's prompt:
    purepost computes it once.
    """
    prompts = gradient[:, :PROMPT].reshape(ROWS // 2, 2, PROMPT, VOCAB).sum(1)
    return np.concatenate([prompts.ravel(), gradient[:, PROMPT:].ravel()]).astype(np.float32)
