"""From records to what each kind of algorithm trains on."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ..rollout.collect import Tasks
from ..rollout.labelled import Judged, Pairs, Steps
from ..rollout.packing import best_fit
from ..rollout.sample import bucket, pad_prompts
from ..text import Tokenizer
from ..types import Rows
from .batches import Batches, Encoded, Report, draw_rows, encode_all, make_batches, steps_of
from .examples import demonstration, judgement, preference, prompt_ids, solution
from .order import Draw, hash_of, stream
from .records import Records
from .schema import Chat, Completion, Judgement, Preference, Solution, Text, parse_prompt


def sft_rows(
    records: Records,
    tokenizer: Tokenizer,
    *,
    width: int,
    rows: int,
    seed: int,
    packed: bool = True,
    whole: bool = False,
) -> Batches[Rows]:
    """Rows for supervised fine-tuning: documents, the assistant's turns of dialogues, or the
    completions of prompts; `whole` trains on every token of them.

    Packed, as many examples share a row of `width` tokens as fit, and keep sharing it; else each
    has a row, and a batch is as wide as its longest needs. Longer ones are cut.
    """
    encode = partial(demonstration, tokenizer, width=width, whole=whole)
    encoded = encode_all(records, encode, Text, Chat, Completion)
    sizes = [tree.size for tree in encoded.trees]
    packs = best_fit(sizes, width) if packed else [[i] for i in range(len(sizes))]
    fixed = width if packed else None
    draw = draw_rows(encoded.trees, packs, rows=rows, seed=seed, most=width, width=fixed)
    return make_batches(encoded, lambda step: draw(step)[0], len(packs), rows)


def pair_rows(
    records: Records, tokenizer: Tokenizer, *, width: int, rows: int, seed: int
) -> Batches[Pairs]:
    """A preference in each row; prompt and completion have at most `width` tokens together."""
    encoded = encode_all(records, partial(preference, tokenizer, width=width), Preference)
    margins = _first_labels(encoded)
    drawn = _one_a_row(encoded, rows=rows, seed=seed, most=2 * width)

    def draw(step: int) -> Pairs:
        batch, order = drawn(step)
        margin = np.where(order.real, margins[order.rows], 0.0)
        return Pairs(batch, jnp.asarray(margin, jnp.float32), jnp.asarray(order.real))

    return make_batches(encoded, draw, len(encoded.trees), rows)


def judged_rows(
    records: Records, tokenizer: Tokenizer, *, width: int, rows: int, seed: int
) -> Batches[Judged]:
    """A judged completion in each row, of at most `width` tokens."""
    encoded = encode_all(records, partial(judgement, tokenizer, width=width), Judgement)
    good = _first_labels(encoded) > 0
    drawn = _one_a_row(encoded, rows=rows, seed=seed, most=width)

    def draw(step: int) -> Judged:
        batch, order = drawn(step)
        return Judged(batch, jnp.asarray(order.real & good[order.rows]), jnp.asarray(order.real))

    return make_batches(encoded, draw, len(encoded.trees), rows)


def step_rows(
    records: Records,
    tokenizer: Tokenizer,
    *,
    width: int,
    rows: int,
    seed: int,
    separator: str = "\n",
) -> Batches[Steps]:
    """A solution in each row, of at most `width` tokens; `separator` is written after each step."""
    encode = partial(solution, tokenizer, width=width, separator=separator)
    encoded = encode_all(records, encode, Solution)
    drawn = _one_a_row(encoded, rows=rows, seed=seed, most=width)

    def draw(step: int) -> Steps:
        batch, order = drawn(step)
        marks = np.asarray(batch.mask)
        right = np.zeros(marks.shape, bool)
        for row in np.flatnonzero(order.real).tolist():
            right[row, marks[row]] = np.asarray(encoded.trees[order.rows[row]].labels) > 0
        return Steps(batch, jnp.asarray(right))

    return make_batches(encoded, draw, len(encoded.trees), rows)


def prompt_tasks(
    records: Records, tokenizer: Tokenizer, *, width: int, prompts: int, seed: int
) -> Batches[Tasks]:
    """Tasks of `prompts` prompts; all columns go to the reward. A prompt of more than `width`
    tokens is dropped: cut, it would ask something else.
    """
    found: list[list[int]] = []
    names: dict[str, None] = {}
    for i, record in enumerate(records):
        try:
            found.append(prompt_ids(tokenizer, parse_prompt(record)))
        except ValueError as error:
            raise ValueError(f"{records.where(i)}: {error}") from error
        names.update(dict.fromkeys(record))
    kept = [i for i, ids in enumerate(found) if len(ids) <= width]
    if not kept:
        raise ValueError(f"expected prompts of at most {width} tokens, got none of {len(found)}")
    encoded, asked = [found[i] for i in kept], records.select(kept)
    padded = min(bucket(max(map(len, encoded))), width)
    order = stream(len(kept), prompts, seed=seed)

    def draw(step: int) -> Tasks:
        places = order(step)
        rows = (places % len(kept)).tolist()
        ids = (places % 2**31).tolist()  # a prompt that comes again in a batch is drawn anew
        some = [asked[i] for i in rows]
        columns = {name: [record.get(name) for record in some] for name in names}
        return Tasks(pad_prompts([encoded[i] for i in rows], ids=ids, width=padded), columns)

    tokens = sum(map(len, encoded))
    report = Report(len(found), len(found) - len(kept), cut=0, tokens=tokens, trained=0)
    hashed = hash_of([encoded, asked.hash()])
    return Batches(draw, steps_of(len(kept), prompts), hashed, report)


def _one_a_row(
    encoded: Encoded, *, rows: int, seed: int, most: int
) -> Callable[[int], tuple[Rows, Draw]]:
    alone = [[i] for i in range(len(encoded.trees))]
    return draw_rows(encoded.trees, alone, rows=rows, seed=seed, most=most)


def _first_labels(encoded: Encoded) -> Float[np.ndarray, " n"]:
    return np.asarray([tree.labels[0] for tree in encoded.trees], np.float64)
