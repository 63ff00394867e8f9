"""Convert a model from one form into another, and check that it is the same model.

    python -m purepost.convert SOURCE TARGET                    a directory in Hugging Face layout
    python -m purepost.convert SOURCE TARGET --orbax            a directory by Orbax
    python -m purepost.convert SOURCE TARGET --adapter PATH     with a PEFT adapter merged into it
    python -m purepost.convert SOURCE TARGET --dtype bfloat16 --check

SOURCE is a directory in Hugging Face layout or by Orbax, a GGUF file, a hub id or a named model
("smollm2-135m"). `--check` runs source (its adapter beside the weights) and result in float32 on a
few prompts, prints the largest difference of every layer's keys and values, of the last hidden
states and of the logits, and fails beyond the tolerance.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from .models import Decoder
from .models.hub import Loaded, load, load_adapter, save, save_orbax
from .text import Tokenizer
from .types import Rows, causal_rows

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def area(radius):\n    return 3.14159 * radius ** 2\n",
    "Wien liegt an der Donau; 北京是中国的首都。",
)
# How far the values of a model may move, relative to the largest of them, when its weights do not
# stay what they are: some roundings to the dtype they are written in.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
EXACT = 1e-6


class Difference(NamedTuple):
    """How far two arrays are apart."""

    what: str
    largest: float  # |Δ|
    relative: float  # to the largest value of the first


@eqx.filter_jit
def _run(model: Decoder, rows: Rows) -> list[list[Any]]:
    """Of every layer that has its own, keys and values; the routers' probabilities of experts; the
    last hidden states; logits.
    """
    hidden, kv = model(rows)
    routers = [] if kv.router is None else [[kv.router]]
    return [*map(list, kv.layers), *routers, [hidden], [model.unembed(hidden)]]


def differences(before: Decoder, after: Decoder, rows: Rows) -> Iterator[Difference]:
    """How far apart two models of one shape are on some rows, layer by layer."""
    first, second = (jax.tree.map(np.asarray, _run(model, rows)) for model in (before, after))
    config = before.config
    names = [f"layer {i}" for i in range(config.num_layers - config.shared_kv_layers)]
    names += ["routers"] if config.num_experts else []
    for what, *pair in zip([*names, "hidden", "logits"], first, second, strict=True):
        parts = [_difference(what, x, y) for x, y in zip(*pair, strict=True)]
        yield max(parts, key=lambda part: part.relative)


def _difference(
    what: str, first: Float[np.ndarray, "*s"], second: Float[np.ndarray, "*s"]
) -> Difference:
    largest = float(np.abs(first - second).max())
    relative = largest / max(float(np.abs(first).max()), 1e-30)
    return Difference(what, largest, math.inf if math.isnan(relative) else relative)


def prompt_rows(tokenizer: Tokenizer, prompts: Sequence[str]) -> Rows:
    """The prompts as rows of tokens."""
    ids = [tokenizer.encode(prompt, add_special=True) for prompt in prompts]
    if not all(ids):
        raise ValueError(f"expected prompts of at least 1 token, got {list(prompts)}; add words")
    width = max(map(len, ids))
    tokens = np.stack([np.pad(np.array(row, np.int32), (0, width - len(row))) for row in ids])
    return causal_rows(jnp.asarray(tokens), jnp.asarray([len(row) for row in ids], jnp.int32))


def check(before: Loaded, after: Loaded, prompts: Sequence[str], tolerance: float) -> bool:
    """Print how far the two are apart; whether that is within the tolerance."""
    good = True
    for prompt in prompts:
        if before.tokenizer.encode(prompt) != after.tokenizer.encode(prompt):
            print(f"the tokens of {prompt!r} differ")
            good = False
    if before.tokenizer.chat_template != after.tokenizer.chat_template:
        print("the chat templates differ")
        good = False
    print(f"{'':10} {'largest |Δ|':>12} {'relative':>10}")
    rows = prompt_rows(before.tokenizer, prompts)
    for found in differences(before.model, after.model, rows):
        within = found.relative <= tolerance
        good &= within
        mark = "" if within else f"  beyond {tolerance:.0e}"
        print(f"{found.what:10} {found.largest:12.2e} {found.relative:10.2e}{mark}")
    return good


def arguments() -> argparse.ArgumentParser:
    """What the command takes."""
    parser = argparse.ArgumentParser(
        prog="python -m purepost.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a directory, a .gguf file, a hub id or a model's name")
    parser.add_argument("target", help="the directory to make; nothing is overwritten")
    parser.add_argument("--orbax", action="store_true", help="write by Orbax")
    parser.add_argument("--adapter", metavar="PATH", help="merge this PEFT adapter first")
    parser.add_argument(
        "--dtype",
        choices=["keep", *TOLERANCE],
        default="keep",
        help="of the weights that are written; keep: as in the source (float32 from a GGUF file)",
    )
    parser.add_argument("--check", action="store_true", help="compare source and result")
    parser.add_argument(
        "--prompt", action="append", help="to compare on, instead of the usual ones"
    )
    parser.add_argument("--tolerance", type=float, help="of the relative differences")
    return parser


def convert(options: argparse.Namespace) -> bool:
    """Do what the command line says; whether the check, if any, is passed."""
    kept = options.dtype == "keep"
    model, tokenizer = load(options.source, dtype=None if kept else jnp.dtype(options.dtype))
    if options.adapter is not None:
        model = load_adapter(model, options.adapter)
    write = save_orbax if options.orbax else save
    write(model, tokenizer, options.target)
    print(f"wrote {options.target}")
    if not options.check:
        return True
    tolerance = options.tolerance
    if tolerance is None:
        unchanged = kept and options.adapter is None
        tolerance = EXACT if unchanged else TOLERANCE[model.embed.dtype.name]
    before, after = load(options.source), load(options.target)
    if options.adapter is not None:
        before = before._replace(model=load_adapter(before.model, options.adapter))
    return check(before, after, options.prompt or PROMPTS, tolerance)


def main(command_line: Sequence[str] | None = None) -> int:
    """Run the command; its exit status: 0, 1 when the check fails, 2 when there is nothing to
    convert.
    """
    options = arguments().parse_args(command_line)
    try:
        return 0 if convert(options) else 1
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
