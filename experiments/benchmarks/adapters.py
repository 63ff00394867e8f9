"""What a training step costs when the whole model trains, and by adapters of every kind.

    python -m experiments.benchmarks.adapters [smollm2|tiny] [repeats]

A JSON line for each variant. FLOPs and memory are those of the compiled program; times are
medians, and their ratios to the first variant's are of steps taken in turn in one process.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import PyTree

from purepost.algorithms import sft
from purepost.models import Decoder
from purepost.tree import count
from purepost.types import Rows, causal_rows
from purepost.weights import Quantized, add_lora, fp8, int4, int8, is_kind, nf4, quantize

from ..common import use_compile_cache
from .models import load_model
from .program import Program, compile_step
from .work import CLIP, LORA_ALPHA, SFT_RATE, WEIGHT_DECAY, Sft, token_rows

WORK = Sft(4, 256, rank=16)
_lora = partial(add_lora, rank=16, alpha=LORA_ALPHA, key=jr.key(2))

VARIANTS: dict[str, Callable[[Decoder], Decoder]] = {
    "full": lambda model: model,
    "lora": _lora,
    "dora": partial(_lora, dora=True),
    "qlora-nf4": lambda model: _lora(quantize(model, kind=nf4)),
    "qlora-int4": lambda model: _lora(quantize(model, kind=int4)),
    "qlora-int8": lambda model: _lora(quantize(model, kind=int8)),
    "qlora-fp8": lambda model: _lora(quantize(model, kind=fp8)),
}


def weight_shares(model: PyTree) -> tuple[float, float]:
    """Bytes of the weights over bfloat16's: of the quantised ones (1 if there are none), and of all
    but adapters.
    """
    quantized = numbers = other = 0
    for w in jax.tree.leaves(model, is_leaf=is_kind):
        base: Any = w if isinstance(w, jax.Array | Quantized) else w.base
        if isinstance(base, Quantized):
            quantized += sum(x.nbytes for x in jax.tree.leaves(base))
            numbers += math.prod(base.shape)
        else:
            other += base.size
    total = 2 * (numbers + other)
    return quantized / (2 * numbers) if numbers else 1.0, (quantized + 2 * other) / total


def rows(vocab_size: int) -> Rows:
    """A step's rows, full of tokens."""
    tokens = jnp.asarray(token_rows(WORK, vocab_size, 0), jnp.int32)
    return causal_rows(tokens, jnp.full((WORK.rows,), WORK.width, jnp.int32))


def figures(model: Decoder, batch: Rows, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of every variant."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(SFT_RATE, weight_decay=WEIGHT_DECAY)
    )
    algorithm = sft(optimizer)
    programs: dict[str, Program] = {}
    trained: dict[str, Any] = {}
    frozen: dict[str, Any] = {}
    shares: dict[str, tuple[float, float]] = {}
    for name, make in VARIANTS.items():
        state = algorithm.init(jr.key(1), make(model))
        programs[name] = compile_step(algorithm, state, batch)
        trained[name], frozen[name] = (state.params, state.opt_state), state.frozen
        shares[name] = weight_shares(state.models)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            trained[name] = program.compiled(trained[name], frozen[name], batch)
            jax.block_until_ready(trained[name])
            seconds[name].append(time.perf_counter() - start)
    times = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    first = next(iter(VARIANTS))
    return {
        name: {
            "gflops": round(program.flops / 1e9, 3),
            "flops_ratio": round(program.flops / programs[first].flops, 3),
            "peak_mib": round(program.peak / 2**20, 1),
            "temporary_mib": round(program.temporary / 2**20, 1),
            "quantized_share_of_bf16": round(shares[name][0], 4),
            "weights_share_of_bf16": round(shares[name][1], 4),
            "trained_numbers": count(trained[name][0]),
            "optimizer_numbers": count(trained[name][1].inner),
            "seconds": round(times[name], 4),
            "seconds_ratio": round(times[name] / times[first], 3),
        }
        for name, program in programs.items()
    }


def main(name: str = "smollm2", repeats: str = "5") -> None:
    """Print every variant's JSON line."""
    use_compile_cache()
    model = load_model(name).model
    found = figures(model, rows(model.config.vocab_size), int(repeats))
    for variant, line in found.items():
        print(json.dumps({"variant": variant, "model": name, **line}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
