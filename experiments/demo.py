"""A real pretrained model learns to answer by reinforcement learning: GRPO with LoRA on
SmolLM2-135M-Instruct.

    make demo        or        python -m experiments.demo [steps]

The task is reasoning-gym's chain_sum with two one-digit terms; a completion is right when the
last number in it is the answer. Some problems are held out: none of them is ever trained on.
Before and after, pass@1 on these is measured, by sampling and greedily. What it leaves in
runs/demo: adapter/ (PEFT's layout), metrics.jsonl, TensorBoard's events, picture.png,
checkpoints, summary.json. A run that was stopped goes on where it stopped.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.random as jr
import numpy as np
import optax

from purepost import Algorithm, train
from purepost.algorithms import grpo
from purepost.algorithms.grpo import Models, PolicyBatch
from purepost.checkpoint import Checkpoints, make_manifest, stop_on_sigterm
from purepost.data import hash_of, shuffled
from purepost.evaluate import Interval, bootstrap, mcnemar, paired_difference, pass_at_k
from purepost.models import Decoder, with_reference
from purepost.models.hub import load, save_adapter
from purepost.rewards import combine_rewards, text_reward
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Prompts, generate, pad_prompts
from purepost.text import Tokenizer, encode_prompt
from purepost.track import Jsonl, Progress, TensorBoard, Tracker, picture
from purepost.weights import add_lora

from .common import ROOT, fresh_directory, return_compiler_memory, use_compile_cache


@dataclass(frozen=True)
class Config:
    """The run. Sizes in prompts, completions, tokens, steps."""

    model: str = "smollm2-135m"
    steps: int = 16
    prompts: int = 8
    group: int = 8
    max_tokens: int = 24
    rank: int = 16
    alpha: float = 32.0
    learning_rate: float = 1e-3
    held_out: int = 64
    samples: int = 4  # of each held-out problem
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    """A question and its answer."""

    question: str
    answer: str


def problems(seed: int) -> list[Problem]:
    """Every different question that the task's generator comes up with, in a fixed order."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=2000, seed=seed
    )
    found = {str(item["question"]): str(item["answer"]) for item in dataset}
    return [Problem(q, found[q]) for q in sorted(found)]


def right(completion: str, answer: str) -> bool:
    """Whether the last number of the completion is the answer."""
    numbers = re.findall(r"-?\d+", completion)
    return bool(numbers) and int(numbers[-1]) == int(answer)


def correctness(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str]
) -> list[float]:
    """1 for a right completion, 0 for a wrong one: a reward function of the field's signature."""
    return [float(right(c, a)) for c, a in zip(completions, answer, strict=True)]


def encode(tokenizer: Tokenizer, some: Sequence[Problem], width: int | None = None) -> Prompts:
    """Questions as the chat prompts that the model was made for."""
    chats = [[{"role": "user", "content": p.question}] for p in some]
    return pad_prompts([encode_prompt(tokenizer, chat) for chat in chats], width=width)


def answers(
    model: Decoder, tokenizer: Tokenizer, some: Sequence[Problem], sampling: Sampling, group: int
) -> list[list[str]]:
    """`group` completions of each problem, as texts."""
    out = generate(jr.key(1), model, encode(tokenizer, some), sampling, group=group)
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
    return [
        [tokenizer.decode(t[:n]) for t, n in zip(row, counts, strict=True)]
        for row, counts in zip(tokens, lengths, strict=True)
    ]


@dataclass(frozen=True)
class Evaluation:
    """Right completions of each held-out problem: sampled at temperature 1, and greedy."""

    sampled: np.ndarray  # [n], of `samples`
    greedy: np.ndarray  # [n], bool
    texts: list[str]  # the greedy ones


def evaluate(
    model: Decoder, tokenizer: Tokenizer, some: Sequence[Problem], config: Config
) -> Evaluation:
    """Answer the held-out problems."""

    def judge(temperature: float, group: int) -> tuple[np.ndarray, list[list[str]]]:
        sampling = Sampling(
            max_tokens=config.max_tokens, temperature=temperature, stop_ids=tokenizer.eos_ids
        )
        texts = answers(model, tokenizer, some, sampling, group)
        counts = [sum(right(t, p.answer) for t in row) for row, p in zip(texts, some, strict=True)]
        return np.asarray(counts), texts

    sampled, _ = judge(1.0, config.samples)
    greedy, texts = judge(0.0, 1)
    return Evaluation(sampled, greedy.astype(bool), [row[0] for row in texts])


def tasks(tokenizer: Tokenizer, some: Sequence[Problem], config: Config) -> Callable[[int], Tasks]:
    """step → the problems it trains on."""
    draw = shuffled(len(some), config.prompts, seed=config.seed)
    width = encode(tokenizer, some).tokens.shape[1]

    def data(step: int) -> Tasks:
        batch = [some[i] for i in draw(step).rows]
        columns = {"prompt": [p.question for p in batch], "answer": [p.answer for p in batch]}
        return Tasks(encode(tokenizer, batch, width), columns)

    return data


def pass_at_1(evaluation: Evaluation, config: Config) -> np.ndarray:
    """The estimate for each problem."""
    return pass_at_k(np.full(len(evaluation.sampled), config.samples), evaluation.sampled, 1)


def report(
    before: Evaluation, after: Evaluation, held_out: Sequence[Problem], config: Config
) -> dict[str, object]:
    """Print what was gained, and give it as a record."""
    first, last = pass_at_1(before, config), pass_at_1(after, config)
    gain = paired_difference(first, last)
    change = mcnemar(before.greedy, after.greedy)
    rows: dict[str, tuple[Interval, Interval]] = {
        "pass@1, temperature 1": (bootstrap(first), bootstrap(last)),
        "pass@1, greedy": (
            bootstrap(before.greedy.astype(np.float64)),
            bootstrap(after.greedy.astype(np.float64)),
        ),
    }
    print(f"\n{len(held_out)} held-out problems, 95% intervals over problems")
    for name, (a, b) in rows.items():
        print(f"  {name:<24} before {a}   after {b}")
    print(f"  gain in sampled pass@1   {gain}")
    print(f"  greedy: {change.gained} gained, {change.lost} lost, p = {change.p_value:.2g}\n")
    for i in range(3):
        print(held_out[i].question, f"({held_out[i].answer})")
        print("  before:", before.texts[i].replace("\n", " "))
        print("  after: ", after.texts[i].replace("\n", " "))
    return {
        "before": asdict(rows["pass@1, temperature 1"][0]),
        "after": asdict(rows["pass@1, temperature 1"][1]),
        "greedy_before": asdict(rows["pass@1, greedy"][0]),
        "greedy_after": asdict(rows["pass@1, greedy"][1]),
        "gain": asdict(gain),
        "mcnemar": asdict(change),
    }


def split(config: Config) -> tuple[list[Problem], list[Problem]]:
    """(held-out problems, problems to train on)."""
    everything = problems(config.seed)
    order = shuffled(len(everything), len(everything), seed=config.seed)(0).rows
    mixed = [everything[i] for i in order]
    return mixed[: config.held_out], mixed[config.held_out :]


def algorithm_of(config: Config, tokenizer: Tokenizer) -> Algorithm[Models, Tasks, PolicyBatch]:
    """GRPO, a step for each batch of completions."""
    sampling = Sampling(max_tokens=config.max_tokens, stop_ids=tokenizer.eos_ids)
    reward = text_reward(combine_rewards([correctness]), tokenizer)
    # Falling to 0: a step late in the run keeps what it has rather than wander.
    rate = optax.linear_schedule(config.learning_rate, 0.0, config.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.0))
    return grpo(optimizer, single_turn(reward, sampling, group=config.group))


def fit(
    base: Decoder, tokenizer: Tokenizer, training: list[Problem], config: Config, directory: Path
) -> Decoder | None:
    """The trained policy; None if the run was asked to stop before its end."""
    k_lora, k_init, k_train = jr.split(jr.key(config.seed), 3)
    policy = add_lora(base, rank=config.rank, alpha=config.alpha, key=k_lora)
    algorithm = algorithm_of(config, tokenizer)
    data_hash = hash_of([asdict(p) for p in training])
    manifest = make_manifest(config, seed=config.seed, data_hash=data_hash, source=__file__)
    with Checkpoints(
        directory / "checkpoints", every=10, manifest=manifest, allow=["config.steps"]
    ) as checkpoints:
        state = checkpoints.restore(algorithm.init(k_init, with_reference(policy)))
        done = int(state.step)
        writers = (
            Jsonl(directory / "metrics.jsonl", step=done),
            TensorBoard(directory / "tensorboard", step=done),
            Progress(config.steps, step=done),
        )
        data = tasks(tokenizer, training, config)
        run = train(algorithm, state, data, key=k_train, steps=config.steps)
        with Tracker(*writers) as tracker, stop_on_sigterm() as stop:
            for step, newest, metrics in checkpoints.saving(run, stop):
                tracker.write(step, metrics)
                state = newest
    return None if stop.requested else state.models.policy


def main(config: Config) -> None:
    """Measure, train, measure again."""
    use_compile_cache()
    return_compiler_memory()
    directory = fresh_directory(ROOT / "runs", "demo", "summary.json")
    print(f"{config.model} on {jax.devices()[0].device_kind}; the run is kept in {directory}")
    base, tokenizer = load(config.model)
    held_out, training = split(config)
    print(f"{len(training)} problems to train on; answering the {len(held_out)} held out first")
    before = evaluate(base, tokenizer, held_out, config)
    trained = fit(base, tokenizer, training, config, directory)
    if trained is None:
        print("stopped as asked; run it again to go on")
        return
    print("answering the held-out problems again")
    summary = report(before, evaluate(trained, tokenizer, held_out, config), held_out, config)
    save_adapter(trained, directory / "adapter", base="HuggingFaceTB/SmolLM2-135M-Instruct")
    picture(directory / "metrics.jsonl", directory / "picture.png", title="GRPO on chain_sum")
    Path(directory / "summary.json").write_text(json.dumps(summary, indent=2))
    print(f"\nadapter, metrics.jsonl, picture.png and summary.json are in {directory}")


if __name__ == "__main__":
    main(replace(Config(), steps=int(sys.argv[1])) if len(sys.argv) > 1 else Config())
