"""How much of an accelerator a step uses: a JSON line for every figure and model.

    python -m experiments.benchmarks.gpu                          Qwen2.5's shapes of 0.5B and 1.5B
    python -m experiments.benchmarks.gpu --model 1.5b --only generate --repeats 9
    python -m experiments.benchmarks.gpu --attention reference flash cudnn
    python -m experiments.benchmarks.gpu --model tiny             anywhere: a test that it runs
    python -m experiments.benchmarks.gpu --peak-tflops 200 --peak-gbps 900   of an unknown device

    sft-full    SFT of the whole model, 16 rows of 1024 tokens
    sft-lora    the same with adapters of rank 16 on every linear layer
    generate    8 completions of each of 16 prompts, 256 + 256 tokens, at temperature 1
    grpo        the same, and one optimizer step of GRPO with a reference, in 4 micro-batches

Weights are random and bfloat16 (with float32 masters where they are trained; AdamW). `attention` is
that of models/kernels.py; cuDNN's takes no rows whose prompt is shared, so that GRPO is left out.

`tokens_per_second` are tokens trained on, or generated. `mfu` is the share of the device's bfloat16
peak that the model's own FLOPs are, recomputation not counted: 2 for each weight and token of a
forward pass, 4·heads·head_dim for each layer, token and key that it sees, and twice as much again
for a backward pass (for the weights under an adapter once as much). Of prompts that a group shares,
what is computed once counts once. `bandwidth` is the share of the peak at which a decoding step
would have to read all weights and the filled part of the cache, once each. A peak that is not known
makes these null.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr

from purepost import tree
from purepost.models import Config, Decoder, init_decoder
from purepost.models.kernels import FlashAttention, cudnn_attention, with_attention
from purepost.models.qwen2 import QWEN2_5_0_5B, QWEN2_5_1_5B
from purepost.rollout.draw import Sampling
from purepost.rollout.sample import generate
from purepost.weights import add_lora

from ..common import use_compile_cache
from .measure import GIB, processor, versions
from .models import TINY
from .ours import PACKAGES
from .scaling import prepare, prompts_of, seconds_of
from .work import LORA_ALPHA, Generate, Grpo, Sft

CONFIGS = {"0.5b": QWEN2_5_0_5B, "1.5b": QWEN2_5_1_5B, "tiny": TINY}
ATTENTIONS: dict[str, Callable[[Decoder], Decoder]] = {
    "reference": lambda model: model,
    "flash": lambda model: with_attention(model, FlashAttention()),
    "cudnn": lambda model: with_attention(model, cudnn_attention),
}
Measured = Sft | Generate | Grpo
FIGURES: dict[str, Measured] = {
    "sft-full": Sft(16, 1024),
    "sft-lora": Sft(16, 1024, rank=16),
    "generate": Generate(16, 256, 256, group=8),
    "grpo": Grpo(16, 256, 256, group=8, microbatches=4),
}
SMALL: dict[str, Measured] = {
    "sft-full": Sft(2, 32),
    "sft-lora": Sft(2, 32, rank=4),
    "generate": Generate(2, 16, 8, group=2),
    "grpo": Grpo(2, 16, 8, group=2),
}


@dataclass(frozen=True)
class Peak:
    """What a device can do: dense bfloat16 products, and reading its memory."""

    flops: float  # per second
    bandwidth: float  # bytes per second


# By a part of the device's kind; the first that fits. From the makers' data sheets.
PEAKS = {
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(989e12, 3.35e12),
    "A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "A100 80GB PCIe": Peak(312e12, 1.935e12),
    "A100": Peak(312e12, 2.039e12),
    "L40S": Peak(362e12, 0.864e12),
    "L4": Peak(121e12, 0.3e12),
    "A10G": Peak(70e12, 0.6e12),
    "RTX 4090": Peak(165e12, 1.008e12),
    "TPU v4": Peak(275e12, 1.2e12),
    "TPU v5 lite": Peak(197e12, 0.819e12),
    "TPU v5": Peak(459e12, 2.765e12),
    "TPU v6 lite": Peak(918e12, 1.64e12),
}


def peak_of(kind: str) -> Peak | None:
    """The peaks of a device by its kind; None if they are not known."""
    return next((peak for part, peak in PEAKS.items() if part in kind), None)


def keys_seen(first: int, tokens: int) -> float:
    """Keys that so many tokens see one after another, the first of them `first`."""
    return tokens * (2 * first + tokens - 1) / 2


@dataclass(frozen=True)
class Cost:
    """FLOPs of a forward pass."""

    weights: float
    attention: float


def forward(model: Decoder, *, tokens: int, headed: int, seen: float) -> Cost:
    """Of `tokens`, of which `headed` reach the vocabulary and which see `seen` keys in all."""
    c = model.config
    head = c.hidden_size * c.vocab_size
    attention = 4.0 * c.num_layers * c.num_heads * c.head_dim * seen
    return Cost(2.0 * (tree.count(model.layers) * tokens + head * headed), attention)


def flops(model: Decoder, work: Measured) -> float:
    """The model's FLOPs in a step."""
    match work:
        case Sft():
            seen = work.rows * keys_seen(1, work.width)
            cost = forward(model, tokens=work.tokens, headed=work.tokens, seen=seen)
            if work.rank is None:
                return 3 * (cost.weights + cost.attention)
            adapters = 6.0 * adapter_numbers(model, work.rank) * work.tokens
            return 2 * cost.weights + 3 * cost.attention + adapters
        case Generate() | Grpo():
            rows = work.prompts * work.group
            prompts = work.prompts * keys_seen(1, work.width)
            seen = prompts + rows * keys_seen(work.width + 1, work.new)
            tokens = work.prompts * work.width + work.tokens
            cost = forward(model, tokens=tokens, headed=work.tokens, seen=seen)
            once = cost.weights + cost.attention
            return once if isinstance(work, Generate) else (1 + 1 + 3) * once


def adapter_numbers(model: Decoder, rank: int) -> int:
    """The numbers in adapters of this rank."""
    add = partial(add_lora, rank=rank, alpha=LORA_ALPHA, key=jr.key(0))
    sizes = [x.size for x in jax.tree.leaves(eqx.filter_eval_shape(add, model))]
    return sum(sizes) - tree.count(model)


def decoding_bytes(model: Decoder, work: Generate) -> float:
    """What a decoding step has to read: the weights, and the cache as far as it is filled, half of
    the new tokens on the average.
    """
    c = model.config
    embed = 0 if c.tie_embeddings else model.embed.nbytes  # of which only some rows are read
    weights = sum(x.nbytes for x in jax.tree.leaves(model)) - embed
    held = work.prompts * (work.width + work.group * work.new / 2)
    per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * model.norm.dtype.itemsize
    return weights + held * per_token


def generating(model: Decoder, work: Generate, new: int, repeats: int) -> float:
    """The median seconds of generating `new` tokens of each completion, after one that compiles."""
    prompts, sampling = prompts_of(work, model.config.vocab_size), Sampling(new)
    seconds = []
    for i in range(repeats + 1):
        start = time.perf_counter()
        generate(jr.key(i), model, prompts, sampling, group=work.group).tokens.block_until_ready()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(model: Decoder, work: Measured, repeats: int, peak: Peak | None) -> Any:
    """What a figure's line says of the work."""
    bandwidth = None
    if isinstance(work, Generate):
        seconds = generating(model, work, work.new, repeats)
        step = (seconds - generating(model, work, 1, repeats)) / (work.new - 1)
        if peak is not None and step > 0:
            bandwidth = round(decoding_bytes(model, work) / step / peak.bandwidth, 4)
    else:
        seconds = seconds_of(prepare(work, model), repeats)
    rate = flops(model, work) / seconds
    return {
        "seconds": round(seconds, 5),
        "tokens_per_second": round(work.tokens / seconds, 1),
        "tflops": round(rate / 1e12, 3),
        "mfu": None if peak is None else round(rate / peak.flops, 4),
        "bandwidth": bandwidth,
    }


def line(
    name: str, figure: str, repeats: int, peak: Peak | None, attention: str = "reference"
) -> dict[str, Any]:
    """One figure's line."""
    device = jax.devices()[0]
    config: Config = CONFIGS[name]
    work = (SMALL if name == "tiny" else FIGURES)[figure]
    model = ATTENTIONS[attention](init_decoder(jr.key(0), config, jnp.bfloat16))
    found = measure(model, work, repeats, peak or peak_of(device.device_kind))
    most = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "figure": figure,
        "model": name,
        "attention": attention,
        "parameters": tree.count(model),
        **found,
        "peak_memory_gib": most and round(most / GIB, 3),  # of this process so far
        "shapes": {k: v for k, v in asdict(work).items() if k != "warmups"},
        "dtype": "bfloat16",
        "device": processor() if device.platform == "cpu" else device.device_kind,
        "versions": versions(PACKAGES),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, as in the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(CONFIGS), nargs="+", default=["0.5b", "1.5b"])
    parser.add_argument("--only", choices=list(FIGURES), nargs="+", default=list(FIGURES))
    parser.add_argument("--attention", choices=list(ATTENTIONS), nargs="+", default=["reference"])
    parser.add_argument("--repeats", type=int, default=5, help="timed steps")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16, dense")
    parser.add_argument("--peak-gbps", type=float, help="GB/s of the device's memory")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"expected --repeats ≥ 1, got {options.repeats}")
    if (options.peak_tflops is None) != (options.peak_gbps is None):
        parser.error("expected both of --peak-tflops and --peak-gbps, or neither; got one")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    peak = None
    if options.peak_tflops is not None:
        peak = Peak(options.peak_tflops * 1e12, options.peak_gbps * 1e9)
    use_compile_cache()
    for name, attention, figure in product(options.model, options.attention, options.only):
        if (attention, figure) != ("cudnn", "grpo"):
            print(json.dumps(line(name, figure, options.repeats, peak, attention)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
