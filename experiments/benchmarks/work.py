"""The pieces of work that are measured: shapes, and the data every library gets. Standard library
only.
"""

import random
from dataclasses import dataclass, replace

SFT_RATE, GRPO_RATE = 1e-4, 1e-6
WEIGHT_DECAY, CLIP = 1e-4, 1.0
LORA_ALPHA = 32.0
BETA, EPSILON = 0.04, 0.2
DISTINCT_PROMPTS, PROMPT_WIDTH, LONG_PROMPT = 16, 64, 256
MODELS = ("smollm2", "tiny")
_TORCH = ("torch==2.13.0", "trl==1.16.0", "peft==0.21.2")
PEERS = {  # the environment of each, and what is installed in it
    "tunix": ("tunix-venv", ("google-tunix==0.1.7",)),
    "trl": ("trl-venv", _TORCH),
    "torch": ("trl-venv", _TORCH),
}


@dataclass(frozen=True)
class Sft:
    """One optimizer step of supervised fine-tuning on full rows of tokens."""

    rows: int
    width: int  # tokens
    rank: int | None = None  # of adapters on every linear layer; None trains the whole model
    warmups: int = 3

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.rows * self.width


@dataclass(frozen=True)
class Score:
    """Log-probabilities of the tokens of full rows, but for the first ones, by frozen weights."""

    rows: int
    width: int  # tokens
    warmups: int = 2

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.rows * self.width


@dataclass(frozen=True)
class Generate:
    """Completions of prompts, `group` of each, all `new` tokens long."""

    prompts: int
    width: int  # tokens of a prompt
    new: int
    group: int = 1
    temperature: float = 1.0  # 0: greedy
    warmups: int = 2

    @property
    def tokens(self) -> int:
        """Tokens generated per step."""
        return self.prompts * self.group * self.new


@dataclass(frozen=True)
class Grpo:
    """One GRPO step: completions, a reward of their text, reference, loss, optimizer step; and its
    metrics written to a file.
    """

    prompts: int
    width: int  # tokens of a prompt
    new: int
    group: int
    fused: bool = False  # ours: the whole step is one program; peers have no such thing
    microbatches: int = 1  # over which the gradient of the one optimizer step is added up
    warmups: int = 2

    @property
    def tokens(self) -> int:
        """Tokens generated, and trained on, per step."""
        return self.prompts * self.group * self.new


Work = Sft | Score | Generate | Grpo

FIGURES: dict[str, Work] = {
    "sft-full": Sft(4, 256),
    "sft-lora": Sft(4, 256, rank=16),
    "generate-greedy": Generate(8, PROMPT_WIDTH, 128, temperature=0.0),
    "generate-sample": Generate(8, PROMPT_WIDTH, 128),
    "score": Score(4, 256),
    "generate-branches": Generate(8, PROMPT_WIDTH, 64, group=8),
    "generate-branches-long": Generate(8, LONG_PROMPT, 64, group=8),
    "grpo": Grpo(4, PROMPT_WIDTH, 64, group=4),
    "grpo-fused": Grpo(4, PROMPT_WIDTH, 64, group=4, fused=True),
    "grpo-long": Grpo(4, LONG_PROMPT, 64, group=8),
}


def does(peer: str, work: Work) -> bool:
    """Whether a peer does such work: the plain torch loop is one of SFT of the whole model."""
    return peer != "torch" or (isinstance(work, Sft) and work.rank is None)


def splits(work: Work) -> list[int]:
    """The numbers of micro-batches that a step may be split into, where memory is short."""
    if not isinstance(work, Grpo):
        return [1]
    return [n for n in range(1, work.prompts + 1) if work.prompts % n == 0]


def split(work: Work, microbatches: int) -> Work:
    """The work, its gradient added up over so many micro-batches."""
    return replace(work, microbatches=microbatches) if isinstance(work, Grpo) else work


def token_rows(work: Sft | Score, vocab_size: int, step: int) -> list[list[int]]:
    """The rows of a step: uniform over the ids from 3, the same in every library."""
    draw = random.Random(step)
    return [[draw.randrange(3, vocab_size) for _ in range(work.width)] for _ in range(work.rows)]


def turn(prompts: int, step: int) -> list[int]:
    """Which of the distinct prompts a step takes."""
    return [(step * prompts + i) % DISTINCT_PROMPTS for i in range(prompts)]


def digits(text: str) -> float:
    """The reward: how many digits a completion has."""
    return float(sum(c in "0123456789" for c in text))


def story() -> str:
    """The text that prompts are cut from: sums in words and figures, never the same twice."""
    draw = random.Random(0)
    names = (
        "Ada Boole Curry Dijkstra Euler Fermat Gauss Hopper Ito Jacobi Kolmogorov Lovelace Markov"
    )
    things = (
        "apples boxes candles diamonds envelopes flowers guitars hammers islands jackets kettles"
    )
    who, what = names.split(), things.split()

    def sentence() -> str:
        had = draw.randrange(3, 99)
        return (
            f"{draw.choice(who)} had {had} {draw.choice(what)} and gave {draw.randrange(2, had)} "
            f"of them to {draw.choice(who)}, who asked how many were left."
        )

    return " ".join(sentence() for _ in range(400))
