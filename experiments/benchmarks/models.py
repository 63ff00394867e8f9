"""The two models that are measured and the prompts cut for their tokenizers."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax.random as jr
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from purepost.models import Config, init_decoder
from purepost.models.hub import Loaded, load, save
from purepost.text.tokenizer import Tokenizer

from .work import DISTINCT_PROMPTS, LONG_PROMPT, PROMPT_WIDTH, story

TINY = Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    max_positions=1024,
)


class Prompt(NamedTuple):
    """A prompt: BOS and the tokens of `text`."""

    text: str
    ids: list[int]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 512 ids, trained on the prompts' text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY.vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([story()], trainer)
    return Tokenizer(backend, bos_id=1, eos_ids=(2,), pad_id=0, chat_template=None)


def load_model(name: str) -> Loaded:
    """A benchmark's model by its name, or one that `export` wrote, by its directory."""
    match name:
        case "smollm2":
            return load("smollm2-135m")
        case "tiny":
            return Loaded(init_decoder(jr.key(0), TINY), tiny_tokenizer())
    return load(Path(name))


def prompts_for(tokenizer: Tokenizer, *, count: int, width: int) -> list[Prompt]:
    """`count` prompts of exactly `width` tokens, whose text gives the same ids again."""
    ids = tokenizer.encode(story())
    out, start = [], 0
    while len(out) < count:
        window = ids[start : start + width - 1]
        text = tokenizer.decode(window)
        if len(window) < width - 1:
            raise ValueError(f"expected text for {count} prompts of {width} tokens, got too little")
        start += 1
        if tokenizer.encode(text) == window:
            bos = 0 if tokenizer.bos_id is None else tokenizer.bos_id
            out.append(Prompt(text, [bos, *window]))
            start += width
    return out


def export(name: str, directory: Path) -> Path:
    """Write a model for the peers in Hugging Face layout, over an older one; prompts by width."""
    target = directory / name
    shutil.rmtree(target, ignore_errors=True)
    loaded = load_model(name)
    save(loaded.model, loaded.tokenizer, target)
    cut = partial(prompts_for, loaded.tokenizer, count=DISTINCT_PROMPTS)
    prompts = {n: [p._asdict() for p in cut(width=n)] for n in (PROMPT_WIDTH, LONG_PROMPT)}
    (target / "prompts.json").write_text(json.dumps(prompts))
    return target
