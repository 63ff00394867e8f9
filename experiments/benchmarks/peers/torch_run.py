# pyright: basic, reportMissingImports=false
"""A plain PyTorch loop on a figure's SFT, in TRL's environment: transformers' model under
torch.compile, the fused AdamW. `python -m experiments.benchmarks.peers.torch_run sft-full
DIRECTORY 5` prints the JSON line.
"""

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

from ..measure import Clock, describe, processor, threads
from ..work import CLIP, FIGURES, SFT_RATE, WEIGHT_DECAY, Sft, token_rows

PACKAGES = ("torch", "transformers")


def train(work: Sft, model: torch.nn.Module, clock: Clock, steps: int, scratch: str) -> list[float]:
    """The loss of every step, which is also written to a file."""
    vocab_size = model.config.vocab_size
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, SFT_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    loss_of = torch.compile(lambda x: model(input_ids=x, labels=x, use_cache=False).loss)
    rows = [torch.tensor(token_rows(work, vocab_size, step)) for step in range(steps)]
    losses = []
    with Path(scratch, "metrics.jsonl").open("w", buffering=1) as file:
        clock.mark()
        for x in rows:
            loss = loss_of(x)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            file.write(json.dumps({"loss": losses[-1]}) + "\n")
            clock.mark()
    return losses


def main(figure: str, directory: str, repeats: str, microbatches: str = "1") -> None:
    """Print one figure's JSON line."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(threads())
    work = FIGURES[figure]
    if not isinstance(work, Sft) or work.rank is not None or microbatches != "1":
        raise ValueError(f"expected SFT of the whole model in one piece, got {figure}")
    clock = Clock()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    with tempfile.TemporaryDirectory() as scratch:
        losses = train(work, model, clock, work.warmups + int(repeats), scratch)
    line = describe(
        clock,
        warmups=work.warmups,
        tokens=work.tokens,
        parts={},
        load_seconds=clock.marks[0].at - start,
        packages=PACKAGES,
        check={"loss": round(losses[0], 4)},
    )
    print(json.dumps({"dtype": "float32", "device": processor(), **line}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
