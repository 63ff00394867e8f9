"""Full fine-tuning against LoRA, QLoRA (NF4) and DoRA: SFT of SmolLM2-135M-Instruct on sums.

    python -m experiments.lora_vs_full

The task is reasoning-gym's chain_sum with two terms of one or two digits, as "12 + 45 =" → " 57".
Problems that are held out are never trained on. For each variant, over three seeds of data order
and adapters: the share of held-out problems that greedy decoding solves, the negative
log-likelihood of their answers, the memory of the compiled step, and its time as a ratio to full
fine-tuning's of the same seed. The table is printed, and kept in docs/lora_vs_full.md.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np

from purepost.algorithms import sft
from purepost.data import Records, hash_of, prompt_tasks, read, sft_rows
from purepost.guards import recipe
from purepost.models import Decoder
from purepost.models.hub import load
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import generate
from purepost.rollout.score import score
from purepost.text import Tokenizer
from purepost.tree import count
from purepost.types import KeyArray
from purepost.weights import add_lora, dequantize, merge, quantize

from .benchmarks.measure import processor
from .benchmarks.program import compile_step
from .common import ROOT, return_compiler_memory, use_compile_cache


@dataclass(frozen=True)
class Config:
    """The run. Sizes in optimizer steps, rows, tokens, problems."""

    model: str = "smollm2-135m"
    steps: int = 120
    rows: int = 2
    width: int = 128
    held_out: int = 128
    seeds: int = 3
    full_rate: float = 1e-4
    adapter_rate: float = 1e-3
    rank: int = 16
    alpha: float = 32.0


@dataclass(frozen=True)
class Result:
    """One run: share of problems solved, nats per token of their answers, seconds per step."""

    solved: float
    nll: float
    seconds: float
    memory: int  # bytes: of everything a step holds
    trained: int  # numbers


Variant = Callable[[KeyArray, Decoder], Decoder]


def variants(config: Config) -> dict[str, Variant]:
    """From the base model to the one that trains."""

    def adapted(key: KeyArray, model: Decoder, *, dora: bool = False) -> Decoder:
        return add_lora(model, key=key, rank=config.rank, alpha=config.alpha, dora=dora)

    return {
        "full": lambda key, model: model,
        "LoRA": adapted,
        "QLoRA (NF4)": lambda key, model: adapted(key, quantize(model)),
        "DoRA": partial(adapted, dora=True),
    }


def problems() -> list[dict[str, str]]:
    """Every different problem that the task's generator comes up with, in a fixed order."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=2, size=6000, seed=0
    )
    found = {str(x["metadata"]["expression"]): str(x["answer"]) for x in dataset}
    return [{"prompt": f"{sum_} =", "completion": f" {found[sum_]}"} for sum_ in sorted(found)]


def split(some: list[dict[str, str]], held_out: int) -> tuple[Records, Records]:
    """(training, held out), the same in every run."""
    order = np.random.default_rng(0).permutation(len(some))
    mixed = [some[i] for i in order]
    return read(mixed[held_out:]), read(mixed[:held_out])


def solved(model: Decoder, tokenizer: Tokenizer, some: Records) -> float:
    """The share of problems whose greedy completion is the answer, by its numbers."""
    tasks = prompt_tasks(some, tokenizer, width=32, prompts=len(some), seed=0)(0)
    sampling = Sampling(max_tokens=6, temperature=0.0, stop_ids=tokenizer.eos_ids)
    out = generate(jr.key(0), dequantize(merge(model)), tasks.prompts, sampling)
    tokens, lengths = np.asarray(out.tokens[:, 0]), np.asarray(out.lengths[:, 0])
    texts = [tokenizer.decode(t[:n]) for t, n in zip(tokens, lengths, strict=True)]
    answers = map(str, tasks.columns["completion"])
    return float(np.mean([t.strip() == a.strip() for t, a in zip(texts, answers, strict=True)]))


def run(
    base: Decoder, tokenizer: Tokenizer, data: tuple[Records, Records], config: Config, seed: int,
    variant: Variant, rate: float,
) -> Result:  # fmt: skip
    """One training run, and how good it is on what was held out."""
    training, held_out = data
    encode = partial(sft_rows, tokenizer=tokenizer, width=config.width, rows=config.rows)
    batches = encode(training, seed=seed)
    algorithm = sft(recipe(rate, steps=config.steps))
    state = algorithm.init(jr.key(seed), variant(jr.fold_in(jr.key(seed), 1), base))
    program = compile_step(algorithm, state, batches(0))
    trained, seconds = (state.params, state.opt_state), []
    for step in range(config.steps):
        start = time.perf_counter()
        trained = jax.block_until_ready(program.compiled(trained, state.frozen, batches(step)))
        seconds.append(time.perf_counter() - start)
    model: Any = eqx.combine(trained[0], state.frozen)
    judged = encode(held_out, seed=0)
    total = weight = 0.0
    for step in range(judged.steps_per_epoch):
        rows = judged(step)
        total -= float(eqx.filter_jit(score)(model, rows).logps.sum())
        weight += float(rows.mask.sum())
    return Result(
        solved(model, tokenizer, held_out),
        total / weight,
        statistics.median(seconds[1:]),
        program.peak,
        count(trained[0]),
    )


def line(name: str, results: Sequence[Result], full: Sequence[Result]) -> str:
    """A row of the table: means over seeds, and half of their ranges."""

    def show(values: Sequence[float], form: str) -> str:
        half = (max(values) - min(values)) / 2
        return f"{statistics.mean(values):{form}} ± {half:{form}}"

    pairs = list(zip(results, full, strict=True))
    cells = (
        name,
        show([r.solved for r in results], ".3f"),
        show([r.nll for r in results], ".3f"),
        f"{results[0].memory / 2**20:.0f}",
        f"{results[0].memory / full[0].memory:.2f}",
        show([r.seconds / f.seconds for r, f in pairs], ".2f"),
        f"{results[0].trained / 1e6:.2f}",
    )
    return "| " + " | ".join(cells) + " |"


def table(config: Config, before: float, found: dict[str, list[Result]]) -> str:
    """The page: what was run, and a row for each variant."""
    rows = "\n".join(line(name, results, found["full"]) for name, results in found.items())
    return f"""# Full fine-tuning, LoRA, QLoRA and DoRA

`python -m experiments.lora_vs_full` wrote this page (jax {jax.__version__}, {processor()}): SFT of
{config.model} on sums of two numbers, {config.steps} steps of {config.rows} packed rows of
{config.width} tokens, AdamW at {config.full_rate} (adapters: {config.adapter_rate}, rank
{config.rank}, on every linear layer). Solved: the share of {config.held_out} problems never trained
on whose greedy completion is the answer. Memory: of everything the compiled step holds. Time: the
median step's, by full fine-tuning's of the same seed. Means of {config.seeds} seeds, ± half of
their range.

| | solved | NLL, nats per token | memory, MiB | memory / full | time / full | trained, millions |
|---|---|---|---|---|---|---|
| before | {before:.3f} | | | | | |
{rows}
"""


def main(config: Config) -> None:
    """Run everything and print the table."""
    use_compile_cache()
    return_compiler_memory()
    base, tokenizer = load(config.model)
    data = split(problems(), config.held_out)
    print(f"{len(data[0])} problems to train on ({hash_of(list(data[0]))[:12]}), {config}")
    before = solved(base, tokenizer, data[1])
    print(f"before: {before:.3f} solved", flush=True)
    found: dict[str, list[Result]] = {name: [] for name in variants(config)}
    # The variants of a seed one after another: what else the machine does, it does to all of them.
    for seed in range(config.seeds):
        for name, variant in variants(config).items():
            rate = config.full_rate if name == "full" else config.adapter_rate
            found[name].append(run(base, tokenizer, data, config, seed, variant, rate))
            print(name, seed, found[name][-1], flush=True)
    page = table(config, before, found)
    (ROOT / "docs" / "lora_vs_full.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main(Config())
