# pyright: basic, reportMissingImports=false
"""TRL 1.16 on a figure's work, in its own environment: `python -m
experiments.benchmarks.peers.trl_run sft-full DIRECTORY 5` prints the JSON line.

Its trainers run in float32 without gradient checkpointing, which are not their defaults.
Generation and scoring are transformers', which TRL's trainers call too.
"""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from ..measure import Clock, describe, processor, threads
from ..work import (
    BETA,
    CLIP,
    EPSILON,
    FIGURES,
    GRPO_RATE,
    LORA_ALPHA,
    SFT_RATE,
    WEIGHT_DECAY,
    Generate,
    Grpo,
    Score,
    Sft,
    digits,
    split,
    token_rows,
    turn,
)

PACKAGES = ("trl", "torch", "transformers", "peft", "accelerate")
Result = tuple[Any, dict[str, list[float]]]


def load_model(directory: Path) -> Any:
    """The exported model as transformers' Llama."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def prompts_of(directory: Path, width: int) -> list[dict[str, Any]]:
    """The prompts of so many tokens: text without BOS, ids with it."""
    return json.loads((directory / "prompts.json").read_text())[str(width)]


class Marks(TrainerCallback):
    """Marks where a step begins and where training ends; keeps what was logged, and writes it to a
    file.
    """

    def __init__(self, clock: Clock, scratch: str) -> None:
        self.clock = clock
        self.logs: list[dict[str, float]] = []
        self.file = Path(scratch, "metrics.jsonl").open("w", buffering=1)

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock.mark()

    def on_train_end(self, args, state, control, **kwargs):
        self.clock.mark()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs or {}))
        self.file.write(json.dumps(self.logs[-1], default=float) + "\n")


def common(rate: float, steps: int, scratch: str) -> dict[str, Any]:
    """Arguments that both trainers get."""
    return dict(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=steps,
        learning_rate=rate,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )


def measure_sft(work: Sft, directory: Path, clock: Clock, steps: int, scratch: str) -> Result:
    """SFTTrainer.train."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    model, marks = load_model(directory), Marks(clock, scratch)
    vocab_size = model.config.vocab_size
    rows = [row for step in range(steps) for row in token_rows(work, vocab_size, step)]
    adapters = None
    if work.rank is not None:
        adapters = LoraConfig(
            r=work.rank,
            lora_alpha=LORA_ALPHA,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            per_device_train_batch_size=work.rows,
            max_length=work.width,
            shuffle_dataset=False,
            **common(SFT_RATE, steps, scratch),
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=AutoTokenizer.from_pretrained(directory),
        peft_config=adapters,
        callbacks=[marks],
    )
    # The data are the same step by step: no shuffling, whatever the Trainer's default sampler.
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(
        trainer.train_dataset
    )
    trainer.train()
    return {"loss": round(float(marks.logs[0]["loss"]), 4)}, {}


def measure_score(work: Score, directory: Path, clock: Clock, steps: int) -> Result:
    """transformers' logits and TRL's log-probabilities of them."""
    from trl.trainer.utils import selective_log_softmax

    model = load_model(directory).eval()
    rows = [torch.tensor(token_rows(work, model.config.vocab_size, step)) for step in range(steps)]
    means = []
    clock.mark()
    with torch.inference_mode():
        for x in rows:
            logits = model(x, use_cache=False).logits[:, :-1]
            logps = selective_log_softmax(logits, x[:, 1:])
            clock.mark()
            means.append(float(logps.mean()))
    return {"logp": round(means[0], 4)}, {}


def measure_generate(work: Generate, directory: Path, clock: Clock, steps: int) -> Result:
    """`model.generate`; a group's completions are rows of their own."""
    model = load_model(directory).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompts = prompts_of(directory, work.width)[: work.prompts]
    ids = [p["ids"] for p in prompts for _ in range(work.group)]
    tokens = torch.tensor(ids)
    options: dict[str, Any] = dict(
        attention_mask=torch.ones_like(tokens), do_sample=work.temperature > 0
    )
    if work.temperature:
        options |= dict(temperature=work.temperature, top_k=0, top_p=1.0)
    clock.mark()
    out: Any = None
    with torch.inference_mode():
        for _ in range(steps):
            out = model.generate(tokens, max_new_tokens=work.new, **options)
            clock.mark()
    assert out.shape == (len(ids), work.width + work.new)
    check = {"tokens": out[0, work.width : work.width + 16].tolist()}
    return None if work.temperature else check, {}


def measure_grpo(work: Grpo, directory: Path, clock: Clock, steps: int, scratch: str) -> Result:
    """GRPOTrainer.train."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer, marks = AutoTokenizer.from_pretrained(directory), Marks(clock, scratch)
    texts = [tokenizer.bos_token + p["text"] for p in prompts_of(directory, work.width)]
    prompts = [texts[i] for step in range(steps + 1) for i in turn(work.prompts, step)]

    def reward(completions, **columns):
        return [digits(text) for text in completions]

    trainer = GRPOTrainer(
        model=load_model(directory),
        reward_funcs=reward,
        args=GRPOConfig(
            per_device_train_batch_size=work.prompts * work.group // work.microbatches,
            num_generations=work.group,
            gradient_accumulation_steps=work.microbatches,
            max_completion_length=work.new,
            generation_kwargs={"min_new_tokens": work.new},
            beta=BETA,
            epsilon=EPSILON,
            loss_type="grpo",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            **common(GRPO_RATE, steps, scratch),
        ),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[marks],
    )
    rollout: list[float] = []
    scored: list[float] = []

    def timed(seconds, method):
        def call(*args, **kwargs):
            start = time.perf_counter()
            out = method(*args, **kwargs)
            seconds.append(time.perf_counter() - start)
            return out

        return call

    trainer._generate = timed(rollout, trainer._generate)
    trainer._generate_and_score_completions = timed(scored, trainer._generate_and_score_completions)
    trainer.train()
    totals = [seconds for seconds, _ in clock.steps()]
    parts = {
        "rollout_seconds": rollout,
        "reference_seconds": [s - r for s, r in zip(scored, rollout, strict=True)],
        "train_seconds": [t - s for t, s in zip(totals, scored, strict=True)],
    }
    return {"length": marks.logs[0]["completions/mean_length"]}, parts


def main(figure: str, directory: str, repeats: str, microbatches: str = "1") -> None:
    """Print one figure's JSON line."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    torch.set_num_threads(threads())
    work, path = split(FIGURES[figure], int(microbatches)), Path(directory)
    clock, steps = Clock(), work.warmups + int(repeats)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        match work:
            case Sft():
                check, parts = measure_sft(work, path, clock, steps, scratch)
            case Score():
                check, parts = measure_score(work, path, clock, steps)
            case Generate():
                check, parts = measure_generate(work, path, clock, steps)
            case Grpo():
                check, parts = measure_grpo(work, path, clock, steps, scratch)
    line = describe(
        clock,
        warmups=work.warmups,
        tokens=work.tokens,
        parts=parts,
        load_seconds=clock.marks[0].at - start,
        packages=PACKAGES,
        check=check,
    )
    print(json.dumps({"dtype": "float32", "device": processor(), **line}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
