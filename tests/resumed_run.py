"""A small real run, in a process of its own, that can be told to die: see test_resume.py.

LoRA with dropout on a tiny decoder, next-token loss, 10 rows shuffled every epoch in batches of 2,
2 micro-batches, AdamW with a schedule and LoRA+, an average of the weights, a checkpoint every 2 of
7 steps.

    python resumed_run.py DIRECTORY [die in-step|in-save|after-metrics|by-sigterm STEP]
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from purepost import Algorithm, Mean, TrainState, make_init, make_update, train
from purepost.checkpoint import Checkpoints, make_manifest, stop_on_sigterm
from purepost.data import hash_of, shuffled
from purepost.models.decoder import Config, Decoder, init_decoder
from purepost.optimizers import averaged, lora_plus
from purepost.track import Jsonl, Tracker
from purepost.tree import named_leaves
from purepost.types import KeyArray, Rows, causal_rows
from purepost.weights import adapters, add_lora

SEED, STEPS, EVERY = 3, 7, 2
CONFIG = Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
)


def loss(key: KeyArray, models: Decoder, batch: Rows) -> tuple[dict[str, Mean], dict[str, Mean]]:
    """Next-token negative log-likelihood, in nats per token."""
    hidden, _ = models(batch, key=key)
    before = jnp.take_along_axis(hidden, batch.parent[:, :, None], 1)
    logps = jax.nn.log_softmax(models.unembed(before))
    nll = -jnp.take_along_axis(logps, batch.tokens[:, :, None], 2)[:, :, 0]
    total = jnp.where(batch.mask, nll, 0.0).sum()
    return {"nll": Mean(total, batch.mask.sum(dtype=jnp.float32))}, {}


def algorithm() -> Algorithm[Decoder, Rows, Rows]:
    """SFT of the adapters."""
    optimizer = optax.adamw(optax.cosine_decay_schedule(0.05, STEPS))
    optimizer = averaged(optax.chain(optimizer, lora_plus(4.0)), 0.9)
    return Algorithm(
        init=make_init(optimizer, trainable=adapters),
        rollout=lambda key, state, data: (data, {}),
        loss=loss,
        update=make_update(optimizer, microbatches=2),
    )


def data() -> tuple[Callable[[int], Rows], Callable[[int], list[int]], str]:
    """The batch of a step, its row numbers, and the data's hash."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (10, 8)).astype(np.int32)
    lengths = rng.integers(4, 9, 10).astype(np.int32)
    order = shuffled(10, 2, seed=SEED)

    def rows(step: int) -> Rows:
        index = order(step).rows
        ids = jnp.asarray(index, jnp.int32)
        return causal_rows(jnp.asarray(tokens[index]), jnp.asarray(lengths[index]), ids=ids)

    return rows, lambda step: order(step).rows.tolist(), hash_of(tokens)


def kill() -> None:
    """End at once, as by a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_when_there(path: Path) -> None:
    """End as soon as a path exists, watching from another thread."""

    def watch() -> None:
        while not path.exists():
            pass
        kill()

    threading.Thread(target=watch, daemon=True).start()


def main(directory: Path, how: str = "", where: int = 0) -> None:
    """Run, from wherever the run in the directory stands."""
    rows, numbers, data_hash = data()

    def batch(step: int) -> Rows:
        if (how, where) == ("in-step", step + 1):
            checkpoints.wait()  # what was saved before counts
            kill()
        return rows(step)

    parts = algorithm()
    models = init_decoder(jr.key(SEED), CONFIG)
    models = add_lora(models, rank=2, key=jr.key(SEED + 1), dropout=0.1)
    state: TrainState[Decoder] = parts.init(jr.key(SEED), models)
    manifest = make_manifest(CONFIG, seed=SEED, data_hash=data_hash)
    with (
        stop_on_sigterm() as stop,
        Checkpoints(directory, every=EVERY, keep=1, manifest=manifest) as checkpoints,
    ):
        state = checkpoints.restore(state)
        begun = int(state.step)
        print("resumed after", begun, flush=True)
        steps = train(parts, state, batch, key=jr.key(SEED), steps=STEPS)
        with Tracker(Jsonl(directory / "metrics.jsonl", step=begun)) as tracker:
            for step, latest, metrics in checkpoints.saving(steps, stop):
                state = latest
                first, second = numbers(step - 1)
                tracker.write(step, metrics, first=first, second=second)
                if (how, where) == ("in-save", step):
                    kill_when_there(directory / f"{step}.orbax-checkpoint-tmp")
                if (how, where) == ("after-metrics", step):
                    checkpoints.wait()
                    kill()
                if (how, where) == ("by-sigterm", step):
                    os.kill(os.getpid(), signal.SIGTERM)
    if stop.requested:
        print("stopped after", int(state.step), flush=True)
        return
    leaves = {name: np.asarray(x) for name, x in named_leaves(state) if isinstance(x, jax.Array)}
    np.savez(directory / "final.npz", allow_pickle=False, **leaves)


if __name__ == "__main__":
    directory, how, where = [*sys.argv[1:], "", "0"][:3] if len(sys.argv) < 4 else sys.argv[1:]
    main(Path(directory), how, int(where))
