"""How near a training step, or one token's step of decoding, comes to what its matrix products take
by themselves: a JSON line for every step.

    python -m experiments.benchmarks.limits                       SmolLM2-135M: some minutes
    python -m experiments.benchmarks.limits --model tiny --only sft-full grpo
    python -m experiments.benchmarks.limits --peers torch         and what torch takes for them

Every product of the compiled step is run alone, and its time counted as often as the step runs it:
`products_seconds`, at the best rate that XLA's kernels have at these shapes, with operands that lie
in the cache where they fit. `optimizer_seconds` is the clipping and the AdamW step alone,
`read_seconds` what reading the products' operands from memory takes. `of_limit` is the sum of the
first two over the step's own time. `torch_products_seconds` are those of the same products by
torch, in the environment of experiments.benchmarks.step, and `slowest` the five products that take
longest: their sides, runs, and GFLOP/s.
"""

import argparse
import json
import math
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax

from purepost import Algorithm, TrainState
from purepost.algorithms import grpo, sft
from purepost.models import Config, WithReference, init_decoder
from purepost.models.cache import decode, prefill, unstack
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling, draw
from purepost.rollout.sample import Prompts, generate
from purepost.types import causal_rows
from purepost.weights import add_lora

from ..common import ROOT, use_compile_cache
from .measure import processor, versions
from .memory import MODELS, count_fives
from .ours import optimizer
from .program import Product, compile_step, products
from .step import environment, pin, prepared
from .work import BETA, FIGURES, GRPO_RATE, LORA_ALPHA, SFT_RATE, Generate, Grpo, Sft

STEPS = [name for name, work in FIGURES.items() if isinstance(work, Sft | Grpo | Generate)]
ENOUGH = 0.2  # seconds to time a product for
MEMORY = 2**29  # bytes that are read to see how fast memory is


def made(work: Sft | Grpo, config: Config) -> tuple[Algorithm[Any, Any, Any], TrainState, Any]:
    """(algorithm, state, batch) of a figure, with random weights and tokens."""
    model = init_decoder(jr.key(0), config)
    match work:
        case Sft():
            if work.rank is not None:
                model = add_lora(model, rank=work.rank, alpha=LORA_ALPHA, key=jr.key(1))
            algorithm = sft(optimizer(SFT_RATE))
            shape = (work.rows, work.width)
            tokens = jr.randint(jr.key(2), shape, 3, config.vocab_size)
            batch = causal_rows(tokens, jnp.full((work.rows,), work.width, jnp.int32))
            return algorithm, algorithm.init(jr.key(3), model), batch
        case Grpo():
            collect = single_turn(count_fives, Sampling(work.new), group=work.group)
            algorithm = grpo(optimizer(GRPO_RATE), collect, beta=BETA)
            state = algorithm.init(jr.key(3), WithReference(model, jax.tree.map(jnp.copy, model)))
            tasks = Tasks(prompts_of(work, config))
            return algorithm, state, algorithm.rollout(jr.key(4), state, tasks)[0]


def prompts_of(work: Grpo | Generate, config: Config) -> Prompts:
    """Prompts of random tokens."""
    tokens = jr.randint(jr.key(2), (work.prompts, work.width), 3, config.vocab_size)
    lengths = jnp.full((work.prompts,), work.width, jnp.int32)
    return Prompts(tokens, lengths, jnp.arange(work.prompts, dtype=jnp.int32))


def seconds_of(call: Callable[[], Any]) -> float:
    """The median of a few calls after the first."""
    jax.block_until_ready(call())
    found: list[float] = []
    while sum(found) < ENOUGH or len(found) < 3:
        start = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def alone(product: Product) -> float:
    """Seconds of a product by itself, less what starting a program takes."""
    lhs, rhs = (jr.normal(jr.key(i), side) for i, side in enumerate(product[:2]))
    contracting, batch = product[2:4], product[4:]
    multiply = jax.jit(lambda a, b: jax.lax.dot_general(a, b, (contracting, batch)))
    begin = jax.jit(lambda a, b: a.ravel()[0] * b.ravel()[0])
    return max(1e-7, seconds_of(lambda: multiply(lhs, rhs)) - seconds_of(lambda: begin(lhs, rhs)))


def torch_seconds(python: str, some: Sequence[Product], environ: Any) -> list[float]:
    """Seconds of each product by torch."""
    command = [python, "-m", f"{__package__}.peers.torch_products"]
    given = json.dumps([(p.equation, p.lhs, p.rhs) for p in some])
    run = subprocess.run(
        command, input=given, capture_output=True, text=True, cwd=ROOT, env=environ, check=True
    )
    return json.loads(run.stdout)


def again(call: Callable[[Any], Any], start: Any) -> float:
    """Seconds of a call that is given what it returned, and may use its memory."""
    held = [start]

    def step() -> Any:
        held.append(call(held.pop()))
        return held[0]

    return seconds_of(step)


def update_alone(params: Any) -> float:
    """Seconds of clipping and an AdamW step."""
    steps = optimizer(SFT_RATE)

    def update(trained: Any, grad: Any) -> Any:
        params, opt_state = trained
        with jax.numpy_dtype_promotion("standard"):  # optax counts in integers
            change, opt_state = steps.update(grad, opt_state, params)
        return optax.apply_updates(params, change), opt_state

    grad = jax.tree.map(jnp.copy, params)
    compiled = jax.jit(update, donate_argnums=0)
    return again(lambda trained: compiled(trained, grad), (params, steps.init(params)))


def training(work: Sft | Grpo, config: Config) -> tuple[Counter[Product], dict[str, float]]:
    """The products of a training step, and the seconds of the step and of its optimizer."""
    algorithm, state, batch = made(work, config)
    program = compile_step(algorithm, state, batch)
    params = jax.tree.map(jnp.copy, state.params)
    start, frozen = (state.params, state.opt_state), state.frozen
    del state
    seconds = again(lambda trained: program.compiled(trained, frozen, batch), start)
    del start
    took = {"seconds": seconds, "optimizer_seconds": update_alone(params)}
    return products(program.compiled.as_text() or ""), took


def decoding(work: Generate, config: Config) -> tuple[Counter[Product], dict[str, float]]:
    """The products of decoding one more token of every row with the caches at their longest, and
    the seconds that one takes in `generate`: of all tokens but the first, the mean.
    """
    model, prompts = init_decoder(jr.key(0), config), prompts_of(work, config)
    sampling = Sampling(work.new, temperature=work.temperature)

    def whole(new: int) -> float:
        some = Sampling(new, temperature=work.temperature)
        return seconds_of(lambda: generate(jr.key(1), model, prompts, some, group=work.group))

    def token(model: Any, blocks: Any, cache: Any, tokens: Any, keys: Any) -> Any:
        hidden, cache = decode(model, blocks, cache, tokens, jnp.asarray(work.new - 2, jnp.int32))
        return draw(keys, model.unembed(hidden.reshape(tokens.size, -1)), sampling), cache

    begin = eqx.filter_jit(
        lambda m: (unstack(m), prefill(m, prompts.tokens, prompts.lengths, work.group, work.new)[1])
    )
    blocks, cache = begin(model)
    tokens = jnp.zeros((work.prompts, work.group), jnp.int32)
    lowered = jax.jit(token).lower(model, blocks, cache, tokens, jr.split(jr.key(0), tokens.size))
    seconds = (whole(work.new) - whole(1)) / (work.new - 1)
    return products(lowered.compile().as_text() or ""), {"seconds": seconds}


def measure(
    work: Sft | Grpo | Generate, config: Config, python: str | None, environ: Any
) -> dict[str, Any]:
    """The fields of a step's line."""
    match work:
        case Generate():
            runs, took = decoding(work, config)
        case _:
            runs, took = training(work, config)
    each = {product: alone(product) for product in runs}
    total = sum(runs[p] * seconds for p, seconds in each.items())
    numbers = sum(n * (math.prod(p.lhs) + math.prod(p.rhs)) for p, n in runs.items())
    memory = jnp.ones(MEMORY // 4)
    read_seconds = 4 * numbers / MEMORY * seconds_of(lambda: memory.sum())
    slowest = sorted(runs, key=lambda p: runs[p] * each[p], reverse=True)[:5]
    theirs: dict[str, float] = {}
    if python:
        found = zip(runs, torch_seconds(python, list(runs), environ), strict=True)
        theirs["torch_products_seconds"] = sum(runs[p] * seconds for p, seconds in found)
    return {
        "shapes": asdict(work),
        "dtype": "float32",
        "device": processor() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        **took,
        "products_seconds": total,
        "read_seconds": read_seconds,
        "of_limit": round((total + took.get("optimizer_seconds", 0)) / took["seconds"], 3),
        **theirs,
        "gflops": round(sum(n * p.flops for p, n in runs.items()) / 1e9, 1),
        "slowest": [[p.lhs, p.rhs, runs[p], round(p.flops / each[p] / 1e9, 1)] for p in slowest],
        "versions": versions(("jax", "jaxlib", "optax")),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="smollm2")
    parser.add_argument("--only", choices=STEPS, nargs="+", default=["sft-full", "sft-lora"])
    parser.add_argument("--threads", type=int, default=2, help="CPUs")
    parser.add_argument("--peers", choices=["torch"], nargs="*", default=[])
    options = parser.parse_args(arguments)
    pin(options.threads)
    use_compile_cache()
    environ = environment(cpu=True, threads=options.threads)
    place = prepared(options.model, options.peers, environ)
    if place is None:
        raise SystemExit("torch's environment could not be made")
    for figure in options.only:
        work: Any = FIGURES[figure]
        found = measure(work, MODELS[options.model], place["python"].get("torch"), environ)
        print(json.dumps({"figure": figure, "model": options.model, **found}), flush=True)


if __name__ == "__main__":
    main()
