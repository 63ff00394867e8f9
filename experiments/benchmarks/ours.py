"""purepost's own figures, one a process: `python -m experiments.benchmarks.ours sft-full tiny 5`
prints its JSON line.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float

from purepost import Algorithm, train
from purepost.algorithms import grpo, sft
from purepost.mean import Metrics
from purepost.models import with_reference
from purepost.models.hub import Loaded
from purepost.rollout.collect import Collect, Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, Prompts, generate, pad_prompts
from purepost.rollout.score import score
from purepost.text.tokenizer import Tokenizer
from purepost.track import Jsonl, Record, Tracker
from purepost.types import Rows, causal_rows
from purepost.weights import add_lora

from ..common import return_compiler_memory
from .compiled import Programs
from .measure import Clock, describe, processor
from .models import load_model, prompts_for
from .work import (
    BETA,
    CLIP,
    DISTINCT_PROMPTS,
    FIGURES,
    GRPO_RATE,
    LORA_ALPHA,
    SFT_RATE,
    WEIGHT_DECAY,
    Generate,
    Grpo,
    Score,
    Sft,
    Work,
    digits,
    split,
    token_rows,
    turn,
)

PACKAGES = ("purepost", "jax", "jaxlib", "equinox", "optax")
Parts = dict[str, list[float]]


def rounded(x: Any) -> float:
    """A check, as it is printed."""
    return round(float(x), 4)


def optimizer(rate: float) -> optax.GradientTransformation:
    """What every library steps with."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(rate, weight_decay=WEIGHT_DECAY)
    )


def timed(seconds: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, appending to `seconds` how long each call took until its result was there."""

    def call(*args: Any) -> Any:
        start = time.perf_counter()
        out = jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - start)
        return out

    return call


def run_steps(
    algorithm: Algorithm[Any, Any, Any],
    models: list[Any],
    data: Sequence[Any],
    clock: Clock,
    *,
    fused: bool = False,
) -> list[Record]:
    """The metrics of every step, which are also written to a file. `models` is emptied, so that
    nothing but the state holds them.
    """
    start = algorithm.init(jr.key(1), models.pop())
    out = []
    with TemporaryDirectory() as scratch, Tracker(Jsonl(Path(scratch) / "jsonl")) as tracker:
        clock.mark()
        for done, state, metrics in train(
            algorithm,
            start,
            lambda step: data[step],
            key=jr.key(0),
            steps=len(data),
            fused=fused,
        ):
            jax.block_until_ready((state, metrics))
            out.append(tracker.write(done, metrics))
            clock.mark()
    return out


def rows_of(work: Sft | Score, vocab_size: int, steps: int) -> list[Rows]:
    """The rows of every step."""
    lengths = jnp.full((work.rows,), work.width, jnp.int32)
    return [
        causal_rows(jnp.asarray(token_rows(work, vocab_size, step), jnp.int32), lengths)
        for step in range(steps)
    ]


def measure_sft(work: Sft, loaded: list[Loaded], clock: Clock, steps: int) -> tuple[Any, Parts]:
    """(loss of the first step, no parts)."""
    model = loaded.pop().model
    data = rows_of(work, model.config.vocab_size, steps)
    if work.rank is not None:
        model = add_lora(model, rank=work.rank, alpha=LORA_ALPHA, key=jr.key(2))
    models = [model]
    del model
    first = run_steps(sft(optimizer(SFT_RATE)), models, data, clock)[0]
    return {"loss": rounded(first["loss"])}, {}


def measure_score(work: Score, loaded: list[Loaded], clock: Clock, steps: int) -> tuple[Any, Parts]:
    """(the mean log-probability of the first rows, no parts)."""
    model = loaded.pop().model
    data = rows_of(work, model.config.vocab_size, steps)
    logps_of = eqx.filter_jit(lambda model, rows: score(model, rows).logps)
    means = []
    clock.mark()
    for rows in data:
        logps = jax.block_until_ready(logps_of(model, rows))
        clock.mark()
        means.append(float(logps.sum()) / (work.rows * (work.width - 1)))
    return {"logp": rounded(means[0])}, {}


def prompts_of(tokenizer: Tokenizer, work: Generate | Grpo, steps: int) -> list[Prompts]:
    """The prompts of every step, taken in turn."""
    prompts = prompts_for(tokenizer, count=DISTINCT_PROMPTS, width=work.width)
    return [
        pad_prompts([prompts[i].ids for i in turn(work.prompts, step)], width=work.width)
        for step in range(steps)
    ]


def measure_generate(
    work: Generate, loaded: list[Loaded], clock: Clock, steps: int
) -> tuple[Any, Parts]:
    """(the first completion's first tokens when greedy, no parts)."""
    model, tokenizer = loaded.pop()
    prompts = prompts_of(tokenizer, work, 1)[0]
    sampling = Sampling(work.new, temperature=work.temperature)
    firsts = []
    clock.mark()
    for step in range(steps):
        out = generate(jr.key(step), model, prompts, sampling, group=work.group)
        out = jax.block_until_ready(out)
        clock.mark()
        if not bool((out.lengths == work.new).all()):
            raise ValueError(f"expected completions of {work.new} tokens, got {out.lengths}")
        firsts.append(out.tokens[0, 0, :16].tolist())
    return {"tokens": firsts[0]} if work.temperature == 0 else None, {}


def grpo_of(work: Grpo, collect: Collect) -> Algorithm[Any, Tasks, Any]:
    """GRPO with a reference, as every library does it."""
    return grpo(optimizer(GRPO_RATE), collect, beta=BETA, microbatches=work.microbatches)


def measure_grpo(work: Grpo, loaded: list[Loaded], clock: Clock, steps: int) -> tuple[Any, Parts]:
    """(the mean length of the first step's completions, seconds of rollout, reference, train)."""
    model, tokenizer = loaded.pop()

    def reward(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
        texts = [[tokenizer.decode(ids) for ids in g] for g in np.asarray(completions.tokens)]
        return jnp.asarray([[digits(text) for text in g] for g in texts], jnp.float32), {}

    rollout, whole = [], []
    collect = timed(rollout, single_turn(reward, Sampling(work.new), group=work.group))
    algorithm = grpo_of(work, collect)
    algorithm = replace(algorithm, rollout=timed(whole, algorithm.rollout))
    models = [with_reference(model)]
    del model
    data = [Tasks(prompts) for prompts in prompts_of(tokenizer, work, steps)]
    first = run_steps(algorithm, models, data, clock)[0]
    totals = [seconds for seconds, _ in clock.steps()]
    parts = {
        "rollout_seconds": rollout,
        "reference_seconds": [w - r for w, r in zip(whole, rollout, strict=True)],
        "train_seconds": [t - w for t, w in zip(totals, whole, strict=True)],
    }
    return {"length": first["completions/mean_length"]}, parts


def measure_fused(work: Grpo, loaded: list[Loaded], clock: Clock, steps: int) -> tuple[Any, Parts]:
    """(the mean length of the first step's completions, no parts) of a step that is one program."""
    model, tokenizer = loaded.pop()
    # A digit is a byte, so that a text has those of its tokens: the same reward, in JAX.
    counts = [digits(tokenizer.decode([i])) for i in range(model.config.vocab_size)]
    columns = {"digits": jnp.asarray(counts, jnp.float32)}

    def reward(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
        found = tasks.columns["digits"][completions.tokens]
        return jnp.where(completions.mask, found, 0.0).sum(-1), {}

    collect = single_turn(reward, Sampling(work.new), group=work.group)
    models = [with_reference(model)]
    del model
    data = [Tasks(prompts, columns) for prompts in prompts_of(tokenizer, work, steps)]
    first = run_steps(grpo_of(work, collect), models, data, clock, fused=True)[0]
    return {"length": first["completions/mean_length"]}, {}


def measure(work: Work, model: str, repeats: int) -> dict[str, Any]:
    """Do the work `repeats` times after its warm-up; the fields of its JSON line.

    `model` is a name ("smollm2", "tiny") or a directory.
    """
    start = time.perf_counter()
    loaded = [load_model(model)]
    jax.block_until_ready(loaded[0].model)
    load_seconds = time.perf_counter() - start
    dtype = loaded[0].model.embed.dtype.name
    clock, steps = Clock(), work.warmups + repeats
    match work:
        case Sft():
            check, parts = measure_sft(work, loaded, clock, steps)
        case Score():
            check, parts = measure_score(work, loaded, clock, steps)
        case Generate():
            check, parts = measure_generate(work, loaded, clock, steps)
        case Grpo(fused=True):
            check, parts = measure_fused(work, loaded, clock, steps)
        case Grpo():
            check, parts = measure_grpo(work, loaded, clock, steps)
    device = jax.devices()[0]
    return {
        "dtype": dtype,
        "device": processor() if device.platform == "cpu" else device.device_kind,
        **describe(
            clock,
            warmups=work.warmups,
            tokens=work.tokens,
            parts=parts,
            load_seconds=load_seconds,
            packages=PACKAGES,
            check=check,
        ),
    }


def main(figure: str, model: str, repeats: str, microbatches: str = "1") -> None:
    """Print one figure's JSON line."""
    return_compiler_memory()
    programs = Programs()
    line = measure(split(FIGURES[figure], int(microbatches)), model, int(repeats))
    print(json.dumps(line | {"programs": programs.fields()}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
