"""Environments in Python behind the asynchronous collectors: texts outside, ids inside."""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax.numpy as jnp
import jax.random as jr

from ..rollout.async_environment import Anew, AsyncEnvironment, Late, Seen
from ..rollout.environment import TIMEOUT
from ..text.chat import Tools
from ..text.tokenizer import Tokenizer
from ..types import KeyArray
from .conversation import Conversation, Style, plain_message
from .host import Failure, Pool, Seat
from .workers import Message, Reply

Place = tuple[Seat, Conversation]


def spoken(
    pool: Pool,
    tokenizer: Tokenizer,
    *,
    message: Callable[[str], Message] = plain_message,
    tools: Tools | None = None,
    variables: Mapping[str, Any] | None = None,
) -> AsyncEnvironment:
    """The pool's environments for `asynchronous` and `PartialRollouts`, by the rules of
    `dialogues`: the chat template writes the whole prompt, and of `tasks.prompts` the ids alone are
    read; an episode's `reset` gets an entry of each of the tasks' columns and its group's seed;
    where the template rewrites history the text begins anew. Let turns end with
    `tokenizer.eos_ids`. The pool's time-outs end an episode as TIMEOUT.
    """
    style = Style(tokenizer, tokenizer.eos_ids, message, tools, dict(variables or {}))

    async def reset(key: KeyArray, task: dict[str, Any]) -> tuple[Place, Anew]:
        seat, talk = pool.seat(), Conversation(style)
        try:
            seed = int(jr.bits(key, dtype=jnp.uint32))
            reply = await _reply(seat.call("reset", task, seed))
            return (seat, talk), talk.begin(reply.messages)
        except BaseException:
            seat.close()
            raise

    async def step(
        key: KeyArray, place: Place, action: list[int]
    ) -> tuple[Place, Seen, float, bool]:
        seat, talk = place
        reply = await _reply(seat.call("step", style.said(action)))
        seen = [] if reply.done else talk.go_on(action, reply.messages)
        return place, seen, reply.reward, reply.done

    return AsyncEnvironment(reset, step, lambda place: place[0].close())


async def _reply(call: Future[Reply | Failure]) -> Reply:
    """The environment's answer. Errors: Late; RuntimeError for whatever else went wrong."""
    reply = await asyncio.wrap_future(call)
    if isinstance(reply, Reply):
        return reply
    raise Late(reply.why) if reply.finish == TIMEOUT else RuntimeError(reply.why)
