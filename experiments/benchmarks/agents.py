"""How busy slow environments leave the engine: a JSON line for each way of collecting, then their
ratio.

    python -m experiments.benchmarks.agents

Both ways play the same episodes, token for token, with one engine of continuous batches: the
asynchronous collector, where whoever is answered speaks on, and the same in step, where nobody is
answered before all have spoken and nobody speaks on before all are answered. How long an answer
takes is drawn from a Pareto distribution. Time is simulated: a step of decoding takes --step
seconds, prompts are read in no time, and an answer is waited for by jumping to its moment, so that
the figures are the same on every machine.

`busy` is the share of the time in which the engine decodes; `slots_busy` the share of its slots'
time in which they had a row to decode.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.random as jr
import numpy as np

from purepost.models import Config as Model
from purepost.models import Decoder, init_decoder
from purepost.rollout.asynchronous import AsyncEnvironment, asynchronous
from purepost.rollout.collect import Episodes, Tasks
from purepost.rollout.draw import Sampling
from purepost.rollout.engine import Engine, Limits
from purepost.rollout.sample import pad_prompts
from purepost.types import KeyArray

from .measure import versions
from .simulated import simulated

STOP, HEARD = 1, (2, 3)  # ids: what ends a turn, and what it is answered
PROMPT = 8  # tokens
MODEL = Model(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
)


@dataclass(frozen=True)
class Work:
    """What is collected. Times in seconds."""

    tasks: int = 8
    group: int = 8
    turns: int = 24
    tokens: int = 16  # of a turn, at most
    slots: int = 8
    step: float = 0.03  # of decoding
    shortest: float = 0.3  # answer
    longest: float = 15.0
    shape: float = 1.5  # of the distribution: its variance is infinite up to 2
    seed: int = 0

    @property
    def episodes(self) -> int:
        """All of them."""
        return self.tasks * self.group

    @property
    def room(self) -> int:
        """Tokens of an episode, at most."""
        return self.turns * (self.tokens + len(HEARD))


@dataclass(frozen=True)
class Found:
    """A collection: how busy the engine was, how long it all took, how long each answer did."""

    episodes: Episodes
    busy: float
    slots_busy: float
    seconds: float
    answers: list[float]


def slow(work: Work, answers: list[float]) -> AsyncEnvironment:
    """An environment that always says the same, after a time that its key decides on."""

    async def reset(key: KeyArray, task: dict[str, Any]) -> tuple[None, list[int]]:
        return None, []

    async def step(
        key: KeyArray, state: None, action: list[int]
    ) -> tuple[None, list[int], float, bool]:
        rng = np.random.default_rng(np.asarray(jr.key_data(key)).tolist())
        seconds = min(work.shortest * (1 + rng.pareto(work.shape)), work.longest)
        answers.append(seconds)
        await asyncio.sleep(seconds)
        return None, list(HEARD), 0.0, False

    return AsyncEnvironment(reset, step)


def in_step(env: AsyncEnvironment, players: int) -> AsyncEnvironment:
    """The environment of so many episodes that all wait for one another, before an answer and after
    it: for episodes of as many turns.
    """
    spoken, answered = asyncio.Barrier(players), asyncio.Barrier(players)

    async def step(key: KeyArray, state: Any, action: list[int]) -> Any:
        await spoken.wait()
        answer = await env.step(key, state, action)
        await answered.wait()
        return answer

    return AsyncEnvironment(env.reset, step)


def measure(model: Decoder, work: Work, *, together: bool) -> Found:
    """A collection by the asynchronous collector; `together`: in step."""
    engine = Engine(model, Limits(slots=work.slots, room=PROMPT + work.room, chunk=16))
    answers: list[float] = []
    env = slow(work, answers)
    collect = asynchronous(
        engine,
        in_step(env, work.episodes) if together else env,
        Sampling(work.tokens, stop_ids=(STOP,)),
        group=work.group,
        max_turns=work.turns,
        max_tokens=work.room,
    )
    tasks = Tasks(pad_prompts([[4 + i % 8] * PROMPT for i in range(work.tasks)]))
    stats = engine.stats
    with simulated(lambda: stats.steps * work.step) as clock:
        episodes, _ = collect(jr.key(work.seed), model, tasks)
    share = work.step / clock.now
    return Found(episodes, stats.steps * share, stats.busy * share / work.slots, clock.now, answers)


def line(way: str, found: Found, work: Work) -> dict[str, Any]:
    """What a collection came to."""
    quantiles = np.quantile(found.answers, [0.5, 0.9, 0.99])
    return {
        "figure": "agents",
        "way": way,
        "busy": round(found.busy, 4),
        "slots_busy": round(found.slots_busy, 4),
        "simulated_seconds": round(found.seconds, 2),
        "episodes": work.episodes,
        "turns": work.turns,
        "tokens": int(found.episodes.mask.sum()),
        "slots": work.slots,
        "step_seconds": work.step,
        "answers": {
            "distribution": f"Pareto, shape {work.shape}, {work.shortest} to {work.longest} s",
            "mean": round(float(np.mean(found.answers)), 3),
            **{f"q{q}": round(float(x), 3) for q, x in zip((50, 90, 99), quantiles, strict=True)},
            "max": round(max(found.answers), 2),
        },
        "seed": work.seed,
        "dtype": "float32",
        "device": jax.default_backend(),
        "versions": versions(("purepost", "jax", "jaxlib", "equinox")),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in vars(Work()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    work = Work(**vars(parser.parse_args(arguments)))
    model = init_decoder(jr.key(0), MODEL)
    found = {}
    for way, together in (("asynchronous", False), ("in step", True)):
        found[way] = measure(model, work, together=together)
        print(json.dumps(line(way, found[way], work)), flush=True)
    ours, theirs = found.values()
    ratio = round(theirs.seconds / ours.seconds, 3)
    print(json.dumps({"figure": "agents", "speed": "asynchronous/in step", "ratio": ratio}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
