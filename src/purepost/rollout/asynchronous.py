"""Episodes of several turns with environments on the host, all under way at once: while some think,
the engine's slots are others'.

A row's random numbers belong to it and to the number of the token, not to the time at which it is
drawn: however long environments take, the same seed gives the same episodes (but for rounding), in
the same order.
"""

import asyncio
from collections.abc import Sequence

import jax.numpy as jnp

from ..mean import Metrics, mean_of
from ..models.decoder import Decoder
from ..types import KeyArray, Scalar
from .async_environment import Anew as Anew
from .async_environment import AsyncEnvironment as AsyncEnvironment
from .async_environment import Late as Late
from .async_environment import hosted as hosted
from .collect import Collect, Episodes, Grouped, Tasks
from .draw import Sampling
from .engine import Engine
from .environment import ERROR, Outcome, as_earned, finish_metrics, settle
from .playing import Episode, Rules, Table, play_all, tickets
from .shared_engine import SharedEngine as SharedEngine
from .transcript import Transcript, gather


def asynchronous(
    engine: Engine,
    env: AsyncEnvironment,
    sampling: Sampling,
    *,
    group: int,
    max_turns: int,
    max_tokens: int,
    discount: Scalar = 1.0,
    outcome: Outcome = as_earned,
    turn_seconds: float | int | None = None,
    seconds: float | int | None = None,
    retries: int = 0,
) -> Collect:
    """`group` episodes of every task, as `multi_turn` has them, with an environment on the host.

    `max_tokens` counts what stands behind an episode's first prompt, observations included; where a
    text begins anew, what it has in place of that. A group's episodes are reset with one key: they
    must begin alike. An environment that takes longer than `turn_seconds` for an answer, or than
    `seconds` for all answers of an episode, ends it with TIMEOUT; one that raises, or answers with
    what are no tokens or no finite reward, with ERROR. Such an episode is played again, up to
    `retries` times, with the same keys in its own place, and else unscored. Every episode comes
    back, so groups are whole. Errors: numbers out of range; groups that do not begin alike.
    """
    limits = (max_turns, max_tokens, float(discount), turn_seconds, seconds, retries)
    rules = Rules(env, sampling, group, *limits)
    rules.check(engine.limits.room)

    def collect(key: KeyArray, model: Decoder, tasks: Tasks) -> tuple[Episodes, Metrics]:
        engine.follow(model)
        done = [Episode(ticket) for ticket in tickets(key, tasks, group)]
        asyncio.run(play_all(done, Table(SharedEngine(engine), rules)))
        return episodes_of(done, tasks.prompts.ids.tolist(), rules, outcome)

    return Grouped(collect, group)


def episodes_of(
    done: Sequence[Episode],
    ids: Sequence[int],
    rules: Rules,
    outcome: Outcome,
    *,
    groups: int | None = None,
    now: int | None = None,
) -> tuple[Episodes, Metrics]:
    """Episodes that are over as arrays, those of one task side by side, and their metrics. Up to
    `groups` groups are filled up with empty episodes without a reward.
    """
    scripts, group = [episode.script for episode in done], rules.group
    for i, task in enumerate(ids):
        prompts = [s.prompt for s in scripts[i * group : (i + 1) * group] if s.opening is not None]
        if any(prompt != prompts[0] for prompt in prompts):
            raise ValueError(
                "expected the episodes of a group to begin alike, got other first observations in "
                f"those of task {task}; draw what differs from the key of `reset`"
            )
    missing = 0 if groups is None else groups - len(ids)
    episodes = gather(
        scripts + [Transcript(finish=ERROR)] * (missing * group),
        [*ids, *[0] * missing],
        rules.sampling.temperature,
        width=rules.max_tokens,
        now=now,
    )
    turns = jnp.asarray([len(script.turns) for script in scripts], jnp.int32)
    attempts = mean_of(jnp.asarray([episode.attempts for episode in done], jnp.float32))
    metrics = finish_metrics(episodes.finish[: len(done)], turns) | {"attempts": attempts}
    return settle(episodes, outcome), metrics
