"""What a training step holds in memory, by the compiled programs' own account.

    python -m experiments.benchmarks.memory [smollm2|tiny] [--write]

A JSON line for each variant: an SFT and a GRPO step against what the backward pass keeps of a layer
(`models.remat`), micro-batches, what trains, the weights' type, and where the optimizer's state
lies; then scores of 8k tokens of a vocabulary of 152k. Programs are compiled for shapes: nothing is
allocated and nothing runs. `--write` puts the lines into docs/memory.md as a table.

Bytes are those of XLA's buffers on this backend: arguments (weights, optimizer state, batch),
temporaries, and results that take no argument's place. On a CPU the host's memory is the device's:
there `on_host` is counted in what precedes it. A CPU widens bfloat16 to float32 in products.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, PyTree

from purepost import Algorithm, TrainState
from purepost.algorithms import grpo, sft
from purepost.mean import Metrics
from purepost.models import Config, Decoder, WithReference, init_decoder, remat, with_remat
from purepost.models.decoder import Unembed
from purepost.models.llama import SMOLLM2_135M
from purepost.models.trace import Trace
from purepost.rollout.collect import Tasks, single_turn
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import Completions, Prompts
from purepost.rollout.score import score
from purepost.types import Rows, causal_rows
from purepost.weights import add_lora, without_lora

from ..common import ROOT, use_compile_cache
from .measure import processor, versions
from .models import TINY
from .program import compile_step
from .work import BETA, CLIP, LORA_ALPHA, SFT_RATE, WEIGHT_DECAY, Grpo, Sft

MODELS = {"smollm2": SMOLLM2_135M, "tiny": TINY}
WORKS = {
    "smollm2": (Sft(8, 256), Grpo(4, 64, 64, group=8)),
    "tiny": (Sft(8, 128), Grpo(4, 32, 32, group=4)),
}
POLICIES = {"none": remat.none, "dots": remat.dots, "block": remat.block}
VOCABULARY, HIDDEN = 151_936, 896  # Qwen2.5's
MIB = 2**20


@dataclass(frozen=True)
class Variant:
    """How a step is taken."""

    trains: str = "full"  # or "lora"
    dtype: str = "float32"  # of the weights; in bfloat16, what trains has float32 masters
    remat: str = "dots"
    microbatches: int = 1
    offload: bool = False  # the optimizer's state lies in the host's memory


VARIANTS = (
    *(Variant(remat=policy, microbatches=n) for policy in POLICIES for n in (1, 4)),
    Variant(dtype="bfloat16"),
    Variant(dtype="bfloat16", remat="block", microbatches=4),
    Variant("lora"),
    Variant("lora", remat="block", microbatches=4),
    Variant(remat="block", microbatches=4, offload=True),
)


def build(key: Any, config: Config, variant: Variant) -> Decoder:
    """The model of a variant; of weights that are never made, only their shapes count."""
    model = init_decoder(key, config, jnp.dtype(variant.dtype))
    model = with_remat(model, POLICIES[variant.remat])
    return (
        add_lora(model, rank=16, alpha=LORA_ALPHA, key=key) if variant.trains == "lora" else model
    )


def step_of(
    work: Sft | Grpo, config: Config, variant: Variant
) -> tuple[Algorithm[Any, Any, Any], TrainState[Any], PyTree]:
    """The algorithm, and the shapes of its state and batch."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(SFT_RATE, weight_decay=WEIGHT_DECAY)
    )
    shapes = eqx.filter_eval_shape
    model = shapes(partial(build, config=config, variant=variant), jr.key(0))
    match work:
        case Sft():
            algorithm = sft(optimizer, microbatches=variant.microbatches)
            batch = shapes(causal_rows, ids(work.rows, work.width), ids(work.rows))
            return algorithm, shapes(algorithm.init, jr.key(0), model), batch
        case Grpo():
            collect = single_turn(count_fives, Sampling(work.new), group=work.group)
            algorithm = grpo(optimizer, collect, beta=BETA, microbatches=variant.microbatches)
            models = WithReference(model, shapes(without_lora, model))
            state = shapes(algorithm.init, jr.key(0), models)
            prompts = Prompts(ids(work.prompts, work.width), ids(work.prompts), ids(work.prompts))
            batch, _ = shapes(algorithm.rollout, jr.key(0), state, Tasks(prompts))
            return algorithm, state, batch


def ids(*shape: int) -> Any:
    """The shape of an array of integers."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def count_fives(tasks: Tasks, completions: Completions) -> tuple[Float[Array, "p g"], Metrics]:
    """A reward."""
    fives = (completions.tokens == 5) & completions.mask
    return fives.sum(-1).astype(jnp.float32), {}


def away(state: TrainState[Any]) -> TrainState[Any]:
    """Shapes of a state whose optimizer's lies in the host's memory, as `offload` moves it."""
    pinned = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    def move(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=pinned) if x.ndim else x

    return eqx.tree_at(lambda s: s.opt_state, state, jax.tree.map(move, state.opt_state))


def figures(work: Sft | Grpo, config: Config, variant: Variant) -> dict[str, Any]:
    """A step's memory."""
    algorithm, state, batch = step_of(work, config, variant)
    state = away(state) if variant.offload else state
    program = compile_step(algorithm, state, batch)
    on_host = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.opt_state))
    return {
        "peak_mib": round(program.peak / MIB, 1),
        "temporary_mib": round(program.temporary / MIB, 1),
        "arguments_mib": round(program.arguments / MIB, 1),
        "on_host_mib": round(on_host / MIB, 1) if variant.offload else 0.0,
    }


def score_temporary(tokens: int) -> int:
    """Bytes beside hidden states, head and their gradients when one row is scored, and its score
    differentiated.
    """
    rows = eqx.filter_eval_shape(causal_rows, ids(1, tokens), ids(1))

    def loss(weights: Any, rows: Rows) -> Float[Array, ""]:
        hidden, embed = weights
        return score(Trace(hidden, (), (), Unembed(embed, True)), rows).logps.sum()

    weights = (
        jax.ShapeDtypeStruct((1, tokens, HIDDEN), jnp.float32),
        jax.ShapeDtypeStruct((VOCABULARY, HIDDEN), jnp.float32),
    )
    memory: Any = jax.jit(jax.grad(loss)).lower(weights, rows).compile().memory_analysis()
    return memory.temp_size_in_bytes


def measure(name: str) -> Iterator[dict[str, Any]]:
    """The lines, one after another; a step's peak beside that of the work's first variant."""
    about = {
        "model": name,
        "device": processor() if jax.default_backend() == "cpu" else jax.devices()[0].device_kind,
        "versions": versions(("jax", "jaxlib", "optax")),
    }
    for tokens in (4096, 8192):
        size, logits = score_temporary(tokens), 4 * tokens * VOCABULARY
        shapes = {"tokens": tokens, "vocabulary": VOCABULARY, "hidden": HIDDEN}
        found = {"temporary_mib": round(size / MIB, 1), "of_whole_logits": round(size / logits, 4)}
        yield {"work": "score", "shapes": shapes, "dtype": "float32"} | found | about
    for work in WORKS[name]:
        first = 0.0
        for variant in VARIANTS if isinstance(work, Sft) else VARIANTS[1::2]:
            found = figures(work, MODELS[name], variant)
            first = first or found["peak_mib"]
            label = {"work": type(work).__name__.lower(), "shapes": asdict(work)}
            ratio = {"peak_ratio": round(found["peak_mib"] / first, 3)}
            yield label | asdict(variant) | found | ratio | about


def page(lines: Sequence[dict[str, Any]]) -> str:
    """docs/memory.md."""
    steps = [line for line in lines if line["work"] != "score"]
    about = lines[0]
    out = [
        "# Memory of a training step",
        "",
        f"`python -m experiments.benchmarks.memory {about['model']} --write` wrote this page: what",
        f"XLA (jax {about['versions']['jax']}, {about['device']}) allocates for a step, by the",
        "compiled program's own account. Peak: weights, optimizer state, batch and temporaries;",
        "its ratio is to the first row's of the same step.",
        "`remat` is what the backward pass keeps of a layer: `with_remat(models, remat.block)`.",
        "In bfloat16 what trains has float32 masters; a CPU widens its products. With `offload`",
        "the state of the optimizer lies in the host's memory between steps, which on a CPU is the",
        "device's own: on an accelerator it is not part of the arguments.",
        "",
        "| step | trains | weights | remat | micro-batches | offload | peak MiB | temporary MiB "
        "| ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in steps:
        away = f"{x['on_host_mib']} MiB" if x["offload"] else ""
        out.append(
            f"| {x['work']} | {x['trains']} | {x['dtype']} | {x['remat']} | {x['microbatches']} "
            f"| {away} | {x['peak_mib']} | {x['temporary_mib']} | {x['peak_ratio']} |"
        )
    shapes = {x["work"]: x["shapes"] for x in steps}
    out += ["", *(f"{work}: {shape}  " for work, shape in shapes.items())]
    out += ["", "Log-probabilities of one row and their gradient, of a vocabulary of 151,936:", ""]
    for x in lines:
        if x["work"] == "score":
            out.append(
                f"- {x['shapes']['tokens']} tokens: {x['temporary_mib']} MiB of temporaries, "
                f"{x['of_whole_logits']} of the logits' own size."
            )
    return "\n".join(out) + "\n"


def main(name: str = "smollm2", *flags: str) -> None:
    """Print every variant's JSON line."""
    if name not in MODELS or not set(flags) <= {"--write"}:
        raise SystemExit(
            f"expected one of {', '.join(MODELS)}, and --write or nothing, got {flags}"
        )
    use_compile_cache()
    lines = []
    for line in measure(name):
        print(json.dumps(line), flush=True)
        lines.append(line)
    if flags:
        (ROOT / "docs" / "memory.md").write_text(page(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
