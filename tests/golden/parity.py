"""The table of `make parity`: every family's tiny checkpoint against transformers and PEFT, live.
make.py calls it; alone it prints the table and nothing else.

logits    of two rows of uneven lengths, past the window and to the last position
cache     of completions that are decoded token by token, two of each prompt
packing   of two documents in one row, where transformers reads each alone
export    of transformers reading what purepost saved, and what it was loaded from
template  texts of dialogues in the family's formats, ours and the one that TRL comes with
adapter   of PEFT reading what purepost saved, and of purepost reading what PEFT saves of that
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from adapters import adapter_difference
from exports import reference, reference_logits
from families import FAMILIES, LENGTHS
from texts import family_differences

from purepost.data.examples import Tokens, Tree
from purepost.data.pack import lay
from purepost.models import Decoder
from purepost.models.cache import decode, prefill, unstack
from purepost.models.hub import load, save
from purepost.text import Tokenizer
from purepost.types import Rows, causal_rows

HERE = Path(__file__).parent
PROMPTS, NEW = (15, 3), 16  # tokens of the prompts, and of each branch
DOCUMENTS = (28, 17)
RNG = np.random.default_rng(6)
TOKENS = RNG.integers(3, 288, (2, LENGTHS[0])).astype(np.int32)


class Case(NamedTuple):
    """A family's checkpoint, read by both."""

    name: str
    path: Path
    model: Decoder
    tokenizer: Tokenizer
    theirs: Any


@eqx.filter_jit
def our_logits(model: Decoder, rows: Rows) -> jax.Array:
    """Ours of every token."""
    return model.unembed(model(rows)[0])


@torch.no_grad()
def their_logits(case: Case, ids: np.ndarray) -> np.ndarray:
    """transformers' logits of one sequence, [t, v]."""
    return case.theirs(torch.tensor(ids[None], dtype=torch.long)).logits[0].numpy()


def apart(ours: Any, theirs: np.ndarray) -> float:
    """The largest difference."""
    return float(np.abs(np.asarray(ours) - theirs).max())


@torch.no_grad()
def logits(case: Case) -> float:
    """Of the real tokens of a padded batch."""
    real = np.arange(LENGTHS[0]) < np.array(LENGTHS)[:, None]
    ids, mask = torch.tensor(TOKENS, dtype=torch.long), torch.tensor(real).long()
    theirs = case.theirs(ids, attention_mask=mask).logits.numpy()
    rows = causal_rows(jnp.asarray(TOKENS), jnp.asarray(LENGTHS, jnp.int32))
    return apart(our_logits(case.model, rows)[real], theirs[real])


@eqx.filter_jit
def decoded(
    model: Decoder, prompts: jax.Array, lengths: jax.Array, branches: jax.Array
) -> jax.Array:
    """Logits after each prompt and after each token of its branches, [p, g, 1 + t, v]."""
    p, g, t = branches.shape
    last, cached = prefill(model, prompts, lengths, g, t)
    blocks = unstack(model)

    def step(cached: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        hidden, cached = decode(model, blocks, cached, branches[:, :, i], i)
        return cached, hidden

    _, steps = jax.lax.scan(step, cached, jnp.arange(t, dtype=jnp.int32))
    first = jnp.broadcast_to(last[:, None, None], (p, g, 1, last.shape[-1]))
    return model.unembed(jnp.concatenate([first, jnp.moveaxis(steps, 0, 2)], 2))


def cache(case: Case) -> float:
    """Of what is decoded, where transformers reads prompt and branch at once."""
    prompts = TOKENS[:, : max(PROMPTS)]
    branches = TOKENS[:, 20 : 20 + 2 * NEW].reshape(2, 2, NEW)
    lengths = jnp.asarray(PROMPTS, jnp.int32)
    ours = decoded(case.model, jnp.asarray(prompts), lengths, jnp.asarray(branches))
    wholes = [
        np.concatenate([prompts[i, :n], branches[i, j]])
        for i, n in enumerate(PROMPTS)
        for j in range(2)
    ]
    theirs = np.stack([their_logits(case, ids)[-NEW - 1 :] for ids in wholes])
    return apart(ours.reshape(theirs.shape), theirs)


def packing(case: Case) -> float:
    """Of documents that lie in one row."""
    documents = [TOKENS[i, :n] for i, n in enumerate(DOCUMENTS)]
    trees = [Tree(Tokens(ids, np.ones(len(ids), bool))) for ids in documents]
    rows = lay([trees], sum(DOCUMENTS) + 3, ids=np.zeros(1, np.int32))
    ours = our_logits(case.model, rows)[0, : sum(DOCUMENTS)]
    return apart(ours, np.concatenate([their_logits(case, ids) for ids in documents]))


def export(case: Case) -> float:
    """Of the saved model, and of the checkpoint, both by transformers."""
    with tempfile.TemporaryDirectory() as folder:
        save(case.model, case.tokenizer, Path(folder) / "saved")
        return apart(reference_logits(Path(folder) / "saved"), reference_logits(case.path))


def template(case: Case) -> float:
    """How many texts differ."""
    return float(len(family_differences(case.model.config.family)))


def adapter(case: Case) -> float:
    """Of an adapter of uneven ranks and scales, there and back."""
    return adapter_difference(case.model, case.path)


# What each column may differ by.
COLUMNS: dict[str, tuple[Callable[[Case], float], float]] = {
    "logits": (logits, 1e-4),
    "cache": (cache, 1e-4),
    "packing": (packing, 1e-4),
    "export": (export, 1e-5),
    "template": (template, 0.0),
    "adapter": (adapter, 1e-4),
}


def check_table(golden: Path, report: Callable[[str], None]) -> list[str]:
    """Print the table; the cells that are beyond their column's limit."""
    wrong: list[str] = []
    report(" | ".join(["family".ljust(15), *(name.ljust(8) for name in COLUMNS)]))
    for name in FAMILIES:
        path = golden / name
        case = Case(name, path, *load(path), reference(path))
        cells = []
        for column, (difference, limit) in COLUMNS.items():
            found = difference(case)
            cells.append("equal" if found == 0 else f"{found:.1e}")
            if not found <= limit:  # NaN is not
                wrong.append(f"{column} of {name}: {found:.1e}, beyond {limit:.0e}")
        report(" | ".join([name.ljust(15), *(cell.ljust(8) for cell in cells)]))
        jax.clear_caches()
    return wrong


if __name__ == "__main__":
    beyond = check_table(HERE, print)
    print("\n".join(beyond) or "every cell is within its limit")
    sys.exit(1 if beyond else 0)
