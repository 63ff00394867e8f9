"""Episodes that were played on the host, and how they become the arrays that training reads."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..rollout.collect import Episodes
from ..rollout.environment import MAX_TURNS
from ..rollout.sample import LENGTH, STOP, bucket, pad_prompts
from ..types import Scalar
from .host import Seat


class Part:
    """A text that the policy read and continued, in one piece: ids, which of them it sampled, their
    log-probabilities, and what they earned.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.ids: list[int] = []
        self.mask: list[bool] = []
        self.logps: list[float] = []
        self.rewards: list[float] = []
        self.extend(prompt)

    def extend(self, ids: Sequence[int], logps: Sequence[float] | None = None) -> None:
        """What was sampled, with its log-probabilities, or read."""
        n = len(ids)
        self.ids += ids
        self.mask += [logps is not None] * n
        self.logps += [0.0] * n if logps is None else logps
        self.rewards += [0.0] * n

    @property
    def first(self) -> int:
        """Tokens before the first that was sampled: all, where none was."""
        return self.mask.index(True) if True in self.mask else len(self.mask)

    @property
    def last(self) -> int:
        """Tokens up to the last that was sampled: none, where none was."""
        return len(self.mask) - self.mask[::-1].index(True) if True in self.mask else 0


@dataclass
class Play:
    """An episode that is under way."""

    seat: Seat
    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""  # of the prompt of the turn that is to come
    parts: list[Part] = field(default_factory=list)
    total: float = 0.0
    turns: int = 0
    finish: int | None = None


def gather(plays: Sequence[Play], ids: Sequence[int], temperature: Scalar) -> Episodes:
    """Episodes of plays, those of one task side by side; `ids` are the tasks'.

    A group's prompt is what all of its texts begin with, before anything was sampled. Episodes that
    ended without an answer are unscored. Error: texts of a group that share no beginning.
    """
    group = len(plays) // len(ids)
    groups = [plays[i : i + group] for i in range(0, len(plays), group)]
    prompts = [_shared([part for play in some for part in play.parts]) for some in groups]
    rows = [[part for part in play.parts if part.last] for play in plays]
    trunks = [len(prompts[i // group]) for i in range(len(plays))]
    sizes = [sum(p.last - trunk for p in row) for row, trunk in zip(rows, trunks, strict=True)]
    n, width = len(plays), bucket(max([1, *sizes]))
    empty = {"tokens": np.int32, "mask": bool, "logps": np.float32, "step_rewards": np.float32}
    out = {name: np.zeros((n, width), kind) for name, kind in (empty | {"restarts": bool}).items()}
    for i, (row, trunk) in enumerate(zip(rows, trunks, strict=True)):
        at = 0
        for k, part in enumerate(row):
            here, there = slice(at, at + part.last - trunk), slice(trunk, part.last)
            out["tokens"][i, here] = part.ids[there]
            out["mask"][i, here] = part.mask[there]
            out["logps"][i, here] = part.logps[there]
            out["step_rewards"][i, here] = part.rewards[there]
            out["restarts"][i, at] = k > 0
            at = here.stop
    finish = [LENGTH if play.finish is None else play.finish for play in plays]
    rewards = [
        play.total if end in (STOP, MAX_TURNS, LENGTH) else np.nan
        for play, end in zip(plays, finish, strict=True)
    ]
    # Greedy log-probabilities are taken at temperature 1.
    heat = jnp.asarray(temperature, jnp.float32)
    return Episodes(
        prompts=pad_prompts(prompts, ids=ids),
        group=jnp.repeat(jnp.arange(len(ids), dtype=jnp.int32), group),
        lengths=jnp.asarray(sizes, jnp.int32),
        rewards=jnp.asarray(rewards, jnp.float32),
        finish=jnp.asarray(finish, jnp.int32),
        temperature=jnp.broadcast_to(jnp.where(heat > 0, heat, 1.0), (n,)),
        **{name: jnp.asarray(x) for name, x in out.items()},
    )


def _shared(parts: Sequence[Part]) -> list[int]:
    """What all texts begin with, before anything was sampled; where there is none, one token that
    nothing follows.
    """
    if not parts:
        return [0]
    shared = list(commonprefix([part.ids[: part.first] for part in parts]))
    if not shared:
        raise ValueError(
            "expected prompts of one group that begin alike, got some that share no token; let the "
            "chat template begin with the same one"
        )
    return shared
