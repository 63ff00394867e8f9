"""The pieces of work that are measured: shapes, and the data every library gets. Standard library
only.
"""

import random
from dataclasses import dataclass

SFT_RATE, GRPO_RATE = 1e-4, 1e-6
WEIGHT_DECAY, CLIP = 1e-4, 1.0
LORA_ALPHA = 32.0
BETA, EPSILON = 0.04, 0.2
DISTINCT_PROMPTS, PROMPT_WIDTH = 16, 64
MODELS = ("smollm2", "tiny")
PEERS = {  # what is installed for each
    "tunix": ("google-tunix==0.1.7",),
    "trl": ("torch==2.13.0", "trl==1.16.0", "peft==0.21.2"),
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
    """One GRPO step: completions, a reward of their text, reference, loss, optimizer step."""

    prompts: int
    width: int  # tokens of a prompt
    new: int
    group: int
    warmups: int = 2

    @property
    def tokens(self) -> int:
        """Tokens generated, and trained on, per step."""
        return self.prompts * self.group * self.new


Work = Sft | Generate | Grpo

FIGURES: dict[str, Work] = {
    "sft-full": Sft(4, 256),
    "sft-lora": Sft(4, 256, rank=16),
    "generate-greedy": Generate(8, PROMPT_WIDTH, 128, temperature=0.0),
    "generate-sample": Generate(8, PROMPT_WIDTH, 128),
    "generate-branches": Generate(8, PROMPT_WIDTH, 64, group=8),
    "grpo": Grpo(4, PROMPT_WIDTH, 64, group=4),
}


def token_rows(work: Sft, vocab_size: int, step: int) -> list[list[int]]:
    """The rows of a step: uniform over the ids from 3, the same in every library."""
    draw = random.Random(step)
    return [[draw.randrange(3, vocab_size) for _ in range(work.width)] for _ in range(work.rows)]


def turn(prompts: int, step: int) -> list[int]:
    """Which of the distinct prompts a step takes."""
    return [(step * prompts + i) % DISTINCT_PROMPTS for i in range(prompts)]


def digits(text: str) -> float:
    """The reward: how many digits a completion has."""
    return float(sum(c.isdigit() for c in text))


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
