"""Episodes that were played on the host, as plain data, and how they become the arrays that
training reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

import jax.numpy as jnp
import numpy as np

from ..types import Scalar
from .async_environment import Anew, Ids, Seen
from .collect import Episodes
from .environment import MAX_TURNS
from .sample import LENGTH, STOP, bucket, pad_prompts

FIELDS = {
    "tokens": np.int32,
    "mask": bool,
    "logps": np.float32,
    "versions": np.int32,
    "step_rewards": np.float32,
    "restarts": bool,
}


@dataclass(frozen=True)
class Answer:
    """What an environment said: ids that go on with the text or, `anew`, are all of it."""

    ids: Ids
    anew: bool = False
    reward: float = 0.0
    done: bool = False


@dataclass
class Turn:
    """What the policy said, and what it was answered."""

    tokens: Ids = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the policy that drew each token
    over: bool = False
    answer: Answer | None = None


@dataclass
class Part:
    """A text that the policy read and continued, in one piece, and which of it was sampled."""

    ids: Ids
    mask: list[bool]
    logps: list[float]
    versions: list[int]
    rewards: list[float]

    def extend(self, ids: Sequence[int], turn: Turn | None = None) -> None:
        """What was read or, of a turn, sampled."""
        n = len(ids)
        self.ids += ids
        self.mask += [turn is not None] * n
        self.logps += [0.0] * n if turn is None else turn.logps
        self.versions += [0] * n if turn is None else turn.versions
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
class Transcript:
    """An episode, over or under way."""

    opening: Answer | None = None  # None: it has not begun
    prompt: Ids = field(default_factory=list)  # as the policy first read it
    turns: list[Turn] = field(default_factory=list)
    total: float = 0.0
    finish: int | None = None

    def begin(self, prompt: Sequence[int], opening: Answer) -> None:
        """The first observation, behind the task's prompt or in its place."""
        self.opening = opening
        self.prompt = list(opening.ids) if opening.anew else [*prompt, *opening.ids]

    def say(self, tokens: Ids, logps: Sequence[float], version: int = 0) -> Turn:
        """More of the turn that is under way, or of a new one."""
        if not self.turns or self.turns[-1].over:
            self.turns.append(Turn())
        turn = self.turns[-1]
        turn.tokens += tokens
        turn.logps += logps
        turn.versions += [version] * len(tokens)
        return turn

    def hear(self, turn: Turn, answer: Answer, discount: float | int) -> None:
        """The answer to the last turn."""
        turn.answer = answer
        self.total += discount ** (len(self.turns) - 1) * answer.reward

    @property
    def spoken(self) -> int:
        """Tokens of the turn that is under way."""
        return len(self.turns[-1].tokens) if self.turns and not self.turns[-1].over else 0

    @property
    def drawn(self) -> int:
        """Tokens that were sampled."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def count(self) -> int:
        """Tokens that were sampled and read since the prompt."""
        return self.drawn + sum(len(turn.answer.ids) for turn in self.turns if turn.answer)

    @property
    def text(self) -> Ids:
        """What the policy goes on with."""
        text = list(self.prompt)
        for turn in self.turns:
            text += turn.tokens
            if turn.answer is not None:
                if turn.answer.anew:
                    text = []
                text += turn.answer.ids
        return text

    @property
    def parts(self) -> list[Part]:
        """The texts, several where they were rewritten."""
        parts = [Part([], [], [], [], [])]
        parts[0].extend(self.prompt)
        for turn in self.turns:
            parts[-1].extend(turn.tokens, turn)
            if turn.answer is not None:
                parts[-1].rewards[-1] = turn.answer.reward
                if turn.answer.anew:
                    parts.append(Part([], [], [], [], []))
                parts[-1].extend(turn.answer.ids)
        return parts


def answer_of(
    seen: Seen, reward: float | int = 0.0, done: bool = False, *, most: int | None = None
) -> Answer:
    """What an environment gave, as plain data: the first `most` ids. Error: what are no ids."""
    anew = isinstance(seen, Anew)
    given = seen.ids if isinstance(seen, Anew) else seen
    ids = [int(t) for t in given[:most]]
    if min(ids, default=0) < 0:
        raise ValueError(f"expected token ids, got {min(ids)}")
    return Answer(ids, anew, float(reward), bool(done))


def gather(
    played: Sequence[Transcript],
    ids: Sequence[int],
    temperature: Scalar,
    *,
    width: int = 32,
    now: int | None = None,
) -> Episodes:
    """Episodes of transcripts, those of one task side by side; `ids` are the tasks'.

    A group's prompt is what all of its texts begin with, before anything was sampled. Episodes that
    ended without an answer are unscored. They are `width` tokens wide, or one of few sizes above
    it. `now`: the policy's version, from which staleness is counted. Error: texts of a group that
    share no beginning.
    """
    group = len(played) // len(ids)
    rows = [[part for part in play.parts if part.last] for play in played]
    prompts = [
        _shared([part for row in rows[i : i + group] for part in row])
        for i in range(0, len(played), group)
    ]
    trunks = [len(prompts[i // group]) for i in range(len(played))]
    sizes = [sum(p.last - trunk for p in row) for row, trunk in zip(rows, trunks, strict=True)]
    n = len(played)
    out = {
        name: np.zeros((n, bucket(max([1, *sizes]), width)), kind) for name, kind in FIELDS.items()
    }
    for i, (row, trunk) in enumerate(zip(rows, trunks, strict=True)):
        at = 0
        for k, part in enumerate(row):
            here, there = slice(at, at + part.last - trunk), slice(trunk, part.last)
            out["tokens"][i, here] = part.ids[there]
            out["mask"][i, here] = part.mask[there]
            out["logps"][i, here] = part.logps[there]
            out["versions"][i, here] = part.versions[there]
            out["step_rewards"][i, here] = part.rewards[there]
            out["restarts"][i, at] = k > 0
            at = here.stop
    oldest = np.where(out["mask"], out["versions"], np.iinfo(np.int32).max).min(1)
    if now is None:
        del out["versions"]
    finish = [LENGTH if play.finish is None else play.finish for play in played]
    rewards = [
        play.total if end in (STOP, MAX_TURNS, LENGTH) else np.nan
        for play, end in zip(played, finish, strict=True)
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
        staleness=None if now is None else jnp.asarray(np.maximum(now - oldest, 0), jnp.int32),
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
