# pyright: basic, reportMissingImports=false
"""Tunix 0.1.7 on a figure's work, in its own environment: `python -m
experiments.benchmarks.peers.tunix_run sft-full DIRECTORY 5` prints the JSON line.

Tunix's llama3 rotates by θ = 10⁶ whatever its configuration says; the right θ is passed here. Its
sampler puts BOS before every prompt, so it gets the prompts' text without.
"""

import functools
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params

from ..compiled import Programs
from ..measure import Clock, describe, processor
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

PACKAGES = ("google-tunix", "jax", "jaxlib", "flax", "qwix", "optax")
LINEAR = ".*(q|k|v|o|gate|up|down)_proj"
NEVER = 10**9
rotate = llama.apply_rope


def load_model(directory: Path, mesh: Any = None) -> Any:
    """The exported model as Tunix's Llama."""
    c = json.loads((directory / "config.json").read_text())
    llama.apply_rope = functools.partial(rotate, rope_theta=c["rope_theta"])
    config = llama.ModelConfig(
        num_layers=c["num_hidden_layers"],
        vocab_size=c["vocab_size"],
        embed_dim=c["hidden_size"],
        hidden_dim=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rope_theta=c["rope_theta"],
        norm_eps=c["rms_norm_eps"],
        weight_tying=c["tie_word_embeddings"],
    )
    return llama_params.create_model_from_safe_tensors(
        str(directory), config, mesh=mesh, dtype=jnp.float32
    )


def texts_of(directory: Path, width: int) -> list[str]:
    """The texts of the prompts of so many tokens."""
    return [p["text"] for p in json.loads((directory / "prompts.json").read_text())[str(width)]]


class Lines:
    """Tunix's metrics in a file, a JSON line each."""

    def __init__(self, scratch: str) -> None:
        self.file = Path(scratch, "metrics.jsonl").open("w", buffering=1)

    def log_scalar(self, event, value, **kwargs):
        line = {"name": event, "value": float(value), "step": int(kwargs.get("step") or 0)}
        self.file.write(json.dumps(line) + "\n")

    def close(self):
        self.file.close()


def logged(scratch: str) -> Any:
    """Options that write the metrics of every step."""
    from tunix.sft.metrics_logger import MetricsLoggerOptions

    backends = {"custom_backend": [lambda: Lines(scratch)]}
    return MetricsLoggerOptions(scratch, flush_every_n_steps=1, backend_kwargs=backends)


def optimizer(rate: float) -> optax.GradientTransformation:
    """The common optimizer."""
    return optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(rate, weight_decay=WEIGHT_DECAY)
    )


def measure_sft(
    work: Sft, directory: Path, clock: Clock, steps: int, scratch: str
) -> tuple[Any, dict]:
    """PeftTrainer.train."""
    from tunix.sft import hooks, peft_trainer, utils

    model = load_model(directory)
    vocab_size = model.config.vocab_size
    if work.rank is not None:
        import qwix

        provider = qwix.LoraProvider(module_path=LINEAR, rank=work.rank, alpha=LORA_ALPHA)
        model = qwix.apply_lora_to_model(
            model, provider, **model.get_model_input(), rngs=nnx.Rngs(0)
        )
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=NEVER, max_steps=steps, metrics_logging_options=logged(scratch)
    )
    trainer = peft_trainer.PeftTrainer(model, optimizer(SFT_RATE), config)
    trainer = trainer.with_gen_model_input_fn(
        lambda x: dict(
            input_tokens=x.input_tokens,
            input_mask=x.input_mask,
            positions=utils.build_positions_from_mask(x.input_mask),
            attention_mask=utils.make_causal_attn_mask(x.input_mask),
        )
    )
    losses = []

    class Marks(hooks.TrainingHooks):
        def on_train_start(self, train_ctx): ...
        def on_eval_step_start(self, train_ctx): ...
        def on_eval_step_end(self, train_ctx, eval_loss): ...

        def on_train_step_start(self, train_ctx):
            jax.block_until_ready(nnx.state(train_ctx.optimizer))
            clock.mark()

        def on_train_step_end(self, train_ctx, train_step, train_loss):
            losses.append(float(train_loss))

        def on_train_end(self, train_ctx):
            jax.block_until_ready(nnx.state(train_ctx.optimizer))
            clock.mark()

    trainer.with_training_hooks(Marks())
    full = np.ones((work.rows, work.width), bool)
    rows = [np.asarray(token_rows(work, vocab_size, i), np.int32) for i in range(steps)]
    trainer.train([peft_trainer.TrainingInput(input_tokens=x, input_mask=full) for x in rows])
    return {"loss": round(losses[0], 4)}, {}


def measure_score(work: Score, directory: Path, clock: Clock, steps: int) -> tuple[Any, dict]:
    """The log-probabilities that a reference gives."""
    from tunix.rl.common import compute_per_token_logps

    model = load_model(directory)
    graph, state = nnx.split(model)
    rows = [jnp.asarray(token_rows(work, model.config.vocab_size, i)) for i in range(steps)]
    means = []
    clock.mark()
    for x in rows:
        logps = compute_per_token_logps(graph, state, x[:, :1], x[:, 1:], pad_id=-1, eos_id=-1)
        jax.block_until_ready(logps)
        clock.mark()
        means.append(float(logps.mean()))
    return {"logp": round(means[0], 4)}, {}


def measure_generate(work: Generate, directory: Path, clock: Clock, steps: int) -> tuple[Any, dict]:
    """The vanilla Sampler; a group's completions are rows of their own."""
    from tunix.generate import sampler

    model, tokenizer = load_model(directory), AutoTokenizer.from_pretrained(directory)
    c = model.config
    cache = sampler.CacheConfig(work.width + work.new, c.num_layers, c.num_kv_heads, c.head_dim)
    generate = sampler.Sampler(model, tokenizer, cache)
    texts = texts_of(directory, work.width)[: work.prompts]
    prompts = [text for text in texts for _ in range(work.group)]
    options: dict[str, Any] = dict(
        max_generation_steps=work.new, max_prompt_length=work.width, eos_tokens=[-1]
    )
    if work.temperature:
        options |= dict(temperature=work.temperature, top_p=1.0, top_k=None)
    clock.mark()
    out: Any = None
    for step in range(steps):
        out = generate(prompts, seed=step, **options)
        clock.mark()
    assert all(len(tokens) == work.new for tokens in out.tokens)
    check = {"tokens": [int(t) for t in out.tokens[0][:16]]}
    return None if work.temperature else check, {}


def cluster(work: Grpo, directory: Path, steps: int, scratch: str) -> tuple[Any, Any]:
    """(RLCluster, mesh): policy, reference and sampler on one device."""
    from tunix.rl import rl_cluster
    from tunix.rl.rollout.base_rollout import RolloutConfig

    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    roles = rl_cluster.Role
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optimizer(GRPO_RATE),
            eval_every_n_steps=NEVER,
            max_steps=steps,
            mini_batch_size=work.prompts,
            train_micro_batch_size=work.prompts // work.microbatches,
            rollout_micro_batch_size=work.prompts,
            compute_logps_micro_batch_size=work.prompts // work.microbatches,
            metrics_logging_options=logged(scratch),
        ),
        rollout_config=RolloutConfig(
            max_tokens_to_generate=work.new,
            max_prompt_length=work.width,
            kv_cache_size=work.width + work.new,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[-1],
        ),
    )
    made = rl_cluster.RLCluster(
        actor=load_model(directory, mesh),
        reference=load_model(directory, mesh),
        tokenizer=AutoTokenizer.from_pretrained(directory),
        cluster_config=config,
    )
    return made, mesh


def measure_grpo(
    work: Grpo, directory: Path, clock: Clock, steps: int, scratch: str
) -> tuple[Any, dict]:
    """GRPOLearner.train; a step ends when the actor's update does."""
    from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner

    made, mesh = cluster(work, directory, steps, scratch)
    parts: dict[str, list[float]] = {}
    lengths = []

    def timed(part, method):
        parts[part] = []

        def call(*args, **kwargs):
            start = time.perf_counter()
            out = method(*args, **kwargs)
            jax.block_until_ready([x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)])
            jax.block_until_ready(nnx.state(made.actor_trainer.optimizer))
            parts[part].append(time.perf_counter() - start)
            if part == "train_seconds" and len(parts[part]) % work.microbatches == 0:
                clock.mark()
            elif part == "rollout_seconds":
                lengths.append(float(np.mean([len(tokens) for tokens in out.tokens])))
            return out

        return call

    made.generate = timed("rollout_seconds", made.generate)
    made.get_ref_per_token_logps = timed("reference_seconds", made.get_ref_per_token_logps)
    made.update_actor = timed("train_seconds", made.update_actor)
    algorithm = GRPOConfig(num_generations=work.group, num_iterations=1, beta=BETA, epsilon=EPSILON)

    def reward(prompts, completions, **columns):
        return [digits(text) for text in completions]

    learner = GRPOLearner(rl_cluster=made, algo_config=algorithm, reward_fns=reward)
    texts = texts_of(directory, work.width)
    data = [
        {"prompts": np.array([texts[i] for i in turn(work.prompts, step)])}
        for step in range(steps + 1)
    ]
    with mesh:
        clock.mark()
        learner.train(data)
    calls, n = parts["train_seconds"], work.microbatches
    parts["train_seconds"] = [sum(calls[i : i + n]) for i in range(0, len(calls), n)]
    return {"length": lengths[0]}, parts


def main(figure: str, directory: str, repeats: str, microbatches: str = "1") -> None:
    """Print one figure's JSON line."""
    warnings.filterwarnings("ignore")
    programs = Programs()
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
    place = {"dtype": "float32", "device": processor(), "programs": programs.fields()}
    print(json.dumps(place | line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
