"""Episodes of dialogues with environments in Python, turn by turn for all at once.

Ids are what was sampled: a turn's prompt is the prompt before, the ids that were drawn, and what
the chat template puts behind them. Where the template rewrites what came before (it drops
reasoning, say), the new text begins anew behind the prompt that the group shares: the episode is
then several continuations of it, and still one episode.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer

from ..mean import Metrics
from ..models.decoder import Decoder
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
from ..text.chat import Tools, encode_prompt, render
from ..text.tokenizer import Tokenizer
from ..types import KeyArray
from .host import Failure, Pool
from .plays import Part, Play, gather
from .workers import Message, Reply


def plain_message(said: str) -> Message:
    """The policy's turn as it said it, calls of tools and reasoning included."""
    return {"role": "assistant", "content": said}


@dataclass(frozen=True)
class _Rules:
    """How dialogues are written, and how long they may be."""

    tokenizer: Tokenizer
    sampling: Sampling
    sample: Sample
    group: int
    max_turns: int
    max_context: int
    discount: float | int
    message: Callable[[str], Message]
    tools: Tools | None
    variables: dict[str, Any]

    def ids(self, messages: Sequence[Message]) -> list[int]:
        """A dialogue up to where the policy goes on."""
        return encode_prompt(self.tokenizer, messages, tools=self.tools, variables=self.variables)

    def text(self, messages: Sequence[Message]) -> str:
        """The same as a text."""
        t = self.tokenizer
        tokens = {"bos_token": t.bos_id, "eos_token": t.eos_ids[0], "pad_token": t.pad_id}
        return render(
            t.chat_template,
            messages,
            add_generation_prompt=True,
            tools=self.tools,
            **{name: t.token(i) for name, i in tokens.items()},
            **self.variables,
        )


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
    budgets = (group, max_turns, max_context, discount)
    rules = _Rules(tokenizer, sampling, draw, *budgets, message, tools, dict(variables or {}))

    def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        if isinstance(key, Tracer):
            raise TypeError("environments in Python cannot be fused; use train(..., fused=False)")
        plays = [Play(pool.seat()) for _ in range(tasks.prompts.ids.shape[0] * group)]
        try:
            _play(key, model, plays, tasks, rules)
        finally:
            for play in plays:
                play.seat.close()
        episodes = gather(plays, tasks.prompts.ids.tolist(), sampling.temperature)
        turns = jnp.asarray([play.turns for play in plays], jnp.int32)
        return settle(episodes, outcome), finish_metrics(episodes.finish, turns)

    return collect


def _play(
    key: KeyArray, model: Decoder, plays: Sequence[Play], tasks: Tasks, rules: _Rules
) -> None:
    """All turns of all episodes, those of one task side by side."""
    k_seed, k_sample = jr.split(key)
    _open(k_seed, plays, tasks, rules)
    names, group = tasks.prompts.ids.tolist(), rules.group
    for turn in range(rules.max_turns):
        live = [i for i, play in enumerate(plays) if play.finish is None]
        if live:
            ids = [names[i // group] * group + i % group for i in live]
            _turn(jr.fold_in(k_sample, turn), model, [plays[i] for i in live], ids, rules)


def _open(key: KeyArray, plays: Sequence[Play], tasks: Tasks, rules: _Rules) -> None:
    """The episodes' first prompts. Those of a group begin with one seed."""
    first: list[Future[Reply | Failure]] = []
    for i, play in enumerate(plays):
        task = i // rules.group
        columns = {name: values[task] for name, values in tasks.columns.items()}
        seed = int(jr.bits(jr.fold_in(key, tasks.prompts.ids[task]), dtype=jnp.uint32))
        first.append(play.seat.call("reset", columns, seed))
    for play, reply in zip(plays, first, strict=True):
        _listen(play, reply.result(), [], rules)


def _turn(
    key: KeyArray, model: Decoder, plays: Sequence[Play], ids: Sequence[int], rules: _Rules
) -> None:
    """A turn of every episode that goes on, and its environment's answer."""
    # Few sizes of a batch, so that few programs are compiled; what is added is sampled in vain.
    more = bucket(len(plays), 4) - len(plays)
    texts = [play.parts[-1].ids for play in plays] + [[0]] * more
    width = min(bucket(max(map(len, texts))), rules.max_context - rules.sampling.max_tokens)
    prompts = pad_prompts(texts, ids=[*ids, *[0] * more], width=width)
    drawn = rules.sample(key, model, prompts)
    tokens, logps, lengths = (
        np.asarray(x)[:, 0].tolist() for x in (drawn.tokens, drawn.logps, drawn.lengths)
    )
    said = [row[:n] for row, n in zip(tokens, lengths, strict=True)][: len(plays)]
    answers = []
    for play, new, values in zip(plays, said, logps, strict=False):
        play.parts[-1].extend(new, values[: len(new)])
        answers.append(play.seat.call("step", _text(new, rules)))
    for play, new, answer in zip(plays, said, answers, strict=True):
        reply = answer.result()
        if isinstance(reply, Reply):
            play.parts[-1].rewards[-1] = reply.reward
            play.total += rules.discount**play.turns * reply.reward
        play.turns += 1
        _listen(play, reply, new, rules)


def _text(new: Sequence[int], rules: _Rules) -> str:
    """What a turn says, without the token that ends it."""
    ended = bool(new) and new[-1] in rules.sampling.stop_ids
    return rules.tokenizer.decode(new[:-1] if ended else new, skip_special=False)


def _listen(play: Play, reply: Reply | Failure, new: Sequence[int], rules: _Rules) -> None:
    """Take an answer in: it makes the next prompt, or ends the episode."""
    if isinstance(reply, Failure):
        play.finish = reply.finish
    elif reply.done or play.turns >= rules.max_turns:
        play.finish = STOP if reply.done else MAX_TURNS
    else:
        try:
            _go_on(play, reply, new, rules)
        except ValueError:  # the template does not take what was said
            play.finish = ERROR
            return
        if len(play.parts[-1].ids) + rules.sampling.max_tokens > rules.max_context:
            play.finish = LENGTH


def _go_on(play: Play, reply: Reply, new: Sequence[int], rules: _Rules) -> None:
    """The next turn's prompt: the ids before with what the template adds, or all anew."""
    before, said, suffix = play.text, _text(new, rules), None
    play.messages += [*([rules.message(said)] if play.turns else []), *reply.messages]
    play.text = rules.text(play.messages)
    if play.turns:
        suffix = _behind(play.text, before, said)
    if suffix is None:
        play.parts.append(Part(rules.ids(play.messages)))
        return
    added = rules.tokenizer.encode(suffix)
    # The template ends the turn, where the policy has not.
    play.parts[-1].extend(added[1:] if added[:1] == list(new[-1:]) else added)


def _behind(text: str, before: str, said: str) -> str | None:
    """What the template puts behind a turn, or None where it rewrites what came before. White space
    around a turn is the template's own affair.
    """
    rest, said = text[len(before) :].lstrip(), said.strip()
    return rest[len(said) :] if text.startswith(before) and rest.startswith(said) else None
