"""Episodes of dialogues with environments in Python, turn by turn for all at once.

Where the chat template rewrites what came before, the new text begins anew behind the prompt that
the group shares: the episode is then several continuations of it, and still one episode.
`asynchronous` with `spoken(pool, ...)` plays the same, each episode at its own pace.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer

from ..mean import Metrics
from ..models.decoder import Decoder
from ..rollout.async_environment import Seen
from ..rollout.collect import Collect, Episodes, Tasks
from ..rollout.draw import Sampling
from ..rollout.environment import (
    ERROR,
    MAX_TURNS,
    Outcome,
    Sample,
    as_earned,
    finish_metrics,
    settle,
)
from ..rollout.sample import LENGTH, STOP, bucket, generate, pad_prompts
from ..rollout.transcript import Transcript, answer_of, gather
from ..text.chat import Tools
from ..text.tokenizer import Tokenizer
from ..types import KeyArray
from .conversation import Conversation, Style, plain_message
from .host import Failure, Pool, Seat
from .workers import Message, Reply


@dataclass(frozen=True)
class _Rules:
    """How long dialogues may be, and how they are written."""

    style: Style
    sampling: Sampling
    sample: Sample
    group: int
    max_turns: int
    max_context: int
    discount: float | int


@dataclass
class _Play:
    """An episode that is under way."""

    seat: Seat
    talk: Conversation
    script: Transcript = field(default_factory=Transcript)


def dialogues(
    pool: Pool,
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    group: int,
    max_turns: int,
    max_context: int,
    discount: float | int = 1.0,
    outcome: Outcome = as_earned,
    message: Callable[[str], Message] = plain_message,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
    sample: Sample | None = None,
) -> Collect:
    """`group` episodes of every task with the pool's environments. It runs on the host.

    `tasks.columns` holds a list for each name, of which an episode's `reset` gets an entry each;
    environments write the prompts, and of `tasks.prompts` the ids alone are read. A turn ends with
    one of `sampling.stop_ids` or after `sampling.max_tokens`, and is said as `message` writes it.
    An episode ends when its environment says so (STOP), after `max_turns` turns, when a prompt
    leaves no room for a turn within `max_context` tokens (LENGTH), or when its environment gives no
    answer (TIMEOUT, ERROR), which leaves it unscored. Groups are whole, and nothing depends on how
    long anything took. `tools` and `variables` are for the chat template; `sample` draws the turns
    (by default `generate`). Errors: no stop ids, a fused step.
    """
    sizes = dict(group=group, max_turns=max_turns, max_context=max_context - sampling.max_tokens)
    for name, n in sizes.items():
        if n < 1:
            raise ValueError(f"expected {name} of at least one turn, got {n}")
    if not sampling.stop_ids:
        raise ValueError("expected stop_ids that end a turn, got none; pass tokenizer.eos_ids")
    draw = partial(generate, sampling=sampling) if sample is None else sample
    style = Style(tokenizer, sampling.stop_ids, message, tools, dict(variables or {}))
    rules = _Rules(style, sampling, draw, group, max_turns, max_context, discount)

    def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        if isinstance(key, Tracer):
            raise TypeError("environments in Python cannot be fused; use train(..., fused=False)")
        n = tasks.prompts.ids.shape[0] * group
        plays = [_Play(pool.seat(), Conversation(style)) for _ in range(n)]
        try:
            _play(key, model, plays, tasks, rules)
        finally:
            for play in plays:
                play.seat.close()
        scripts = [play.script for play in plays]
        episodes = gather(scripts, tasks.prompts.ids.tolist(), sampling.temperature)
        turns = jnp.asarray([len(script.turns) for script in scripts], jnp.int32)
        return settle(episodes, outcome), finish_metrics(episodes.finish, turns)

    return collect


def _play(
    key: KeyArray, model: Decoder, plays: Sequence[_Play], tasks: Tasks, rules: _Rules
) -> None:
    """All turns of all episodes, those of one task side by side."""
    k_seed, k_sample = jr.split(key)
    _open(k_seed, plays, tasks, rules)
    names, group = tasks.prompts.ids.tolist(), rules.group
    for turn in range(rules.max_turns):
        live = [i for i, play in enumerate(plays) if play.script.finish is None]
        if live:
            ids = [names[i // group] * group + i % group for i in live]
            _turn(jr.fold_in(k_sample, turn), model, [plays[i] for i in live], ids, rules)


def _open(key: KeyArray, plays: Sequence[_Play], tasks: Tasks, rules: _Rules) -> None:
    """The episodes' first prompts. Those of a group begin with one seed."""
    first: list[Future[Reply | Failure]] = []
    for i, play in enumerate(plays):
        task = i // rules.group
        columns = {name: values[task] for name, values in tasks.columns.items()}
        seed = int(jr.bits(jr.fold_in(key, tasks.prompts.ids[task]), dtype=jnp.uint32))
        first.append(play.seat.call("reset", columns, seed))
    for play, reply in zip(plays, first, strict=True):
        _listen(play, reply.result(), rules)


def _turn(
    key: KeyArray, model: Decoder, plays: Sequence[_Play], ids: Sequence[int], rules: _Rules
) -> None:
    """A turn of every episode that goes on, and its environment's answer."""
    # Few sizes of a batch, so that few programs are compiled; what is added is sampled in vain.
    more = bucket(len(plays), 4) - len(plays)
    texts = [play.script.text for play in plays] + [[0]] * more
    width = min(bucket(max(map(len, texts))), rules.max_context - rules.sampling.max_tokens)
    prompts = pad_prompts(texts, ids=[*ids, *[0] * more], width=width)
    drawn = rules.sample(key, model, prompts)
    tokens, logps, lengths = (
        np.asarray(x)[:, 0].tolist() for x in (drawn.tokens, drawn.logps, drawn.lengths)
    )
    answers = []
    for play, row, values, n in zip(plays, tokens, logps, lengths, strict=False):
        play.script.say(row[:n], values[:n]).over = True
        answers.append(play.seat.call("step", rules.style.said(row[:n])))
    for play, answer in zip(plays, answers, strict=True):
        _listen(play, answer.result(), rules)


def _listen(play: _Play, reply: Reply | Failure, rules: _Rules) -> None:
    """Take an answer in: it makes the next prompt, or ends the episode."""
    script = play.script
    if isinstance(reply, Failure):
        script.finish = reply.finish
        return
    seen: Seen = []
    if reply.done or len(script.turns) >= rules.max_turns:
        script.finish = STOP if reply.done else MAX_TURNS
    else:
        try:
            new = script.turns[-1].tokens if script.turns else None
            said = reply.messages
            seen = play.talk.begin(said) if new is None else play.talk.go_on(new, said)
        except ValueError:  # the template does not take what was said
            script.finish = ERROR
    answer = answer_of(seen, reply.reward, reply.done)
    if not script.turns:
        script.begin([], answer)
    else:
        script.hear(script.turns[-1], answer, rules.discount)
    if script.finish is None and len(script.text) + rules.sampling.max_tokens > rules.max_context:
        script.finish = LENGTH
