"""Makes the golden files beside it from transformers, the reference for models, tokenizers and
chat templates.

    make parity                                       compares all of them with what is stored
    .venv-parity/bin/python tests/golden/make.py      makes them again

The environment holds torch, transformers, gguf and purepost. SmolLM2's weights are the values that
its GGUF file stands for, read by transformers' own reader; its tokenizer is transformers' own
conversion of the one in that file.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import regex  # pyright: ignore[reportMissingModuleSource]
import torch  # pyright: ignore[reportMissingImports]
from chats import chats_table
from exports import check_exports
from families import make_families
from heads import check_classifier
from heads import make as make_classifier
from lora import check_steps
from lora import make as make_lora
from multimodal import make_multimodal
from parity import check_table
from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
from tables import DIALOGUES, PATTERNS, PROMPTS, TEMPLATES, TEXTS, TOOLS
from texts import check_texts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (  # pyright: ignore[reportMissingImports]
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from purepost.models.hub import fetch

HERE = Path(__file__).parent
NEW_TOKENS = 32
TINY_TOKENS = 1500
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def smollm2_reference() -> tuple[LlamaForCausalLM, Any]:
    """SmolLM2 and its tokenizer, both by transformers from the GGUF file."""
    path = fetch("smollm2-135m")
    options = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **options).eval()
    # Its reader keeps the ε that float32 rounds 1e-5 to; the model was trained with 1e-5.
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.variance_epsilon = 1e-5
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Its reader leaves out that SmolLM2's words hold single digits, which shows at ½ and ٣ only.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return model, tokenizer


def small_bpe(size: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the tables."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    return backend


def tokenizer_table(smollm2: Any) -> dict[str, Any]:
    """Ids of the texts by three tokenizers, and the words that each pattern cuts them into."""
    model = json.loads(small_bpe(480).to_str())["model"]
    vocab, merges = model["vocab"], [tuple(merge) for merge in model["merges"]]
    references = {
        "gpt-2": GPT2Tokenizer(vocab=vocab, merges=merges, extra_special_tokens=SPECIAL),
        "qwen2": Qwen2Tokenizer(vocab=vocab, merges=merges, extra_special_tokens=SPECIAL),
    }
    words: dict[str, list[list[str]]] = {}
    for name, pattern in PATTERNS.items():
        words[name] = [regex.findall(pattern, text) for text in TEXTS]
        assert all("".join(w) == text for w, text in zip(words[name], TEXTS, strict=True))
    return {
        "texts": TEXTS,
        "smollm2": [smollm2.encode(text, add_special_tokens=False) for text in TEXTS],
        "decoded": [
            smollm2.decode(smollm2.encode(text), skip_special_tokens=True) for text in TEXTS
        ],
        "vocab": vocab,
        "merges": [" ".join(merge) for merge in merges],
        "ids": {
            name: [reference.encode(text, add_special_tokens=False) for text in TEXTS]
            for name, reference in references.items()
        },
        "words": words,
    }


def chat_table(tokenizer: Any) -> list[dict[str, Any]]:
    """Every template's text of every dialogue, and the assistant mask where it marks one."""
    rows: list[dict[str, Any]] = []
    for name, template in {"smollm2": tokenizer.chat_template, **TEMPLATES}.items():
        for messages in DIALOGUES:
            for prompt in (False, True):
                options = {
                    "chat_template": template,
                    "add_generation_prompt": prompt,
                    "tools": TOOLS if "tools" in template else None,
                }
                text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
                row = {"name": name, "messages": messages, "prompt": prompt, "text": text}
                row |= {"template": template, "tools": options["tools"]}
                if "{% generation %}" in template and not prompt:
                    marked = tokenizer.apply_chat_template(
                        messages, return_dict=True, return_assistant_tokens_mask=True, **options
                    )
                    row["ids"], row["mask"] = marked["input_ids"], marked["assistant_masks"]
                rows.append(row)
    return rows


@torch.no_grad()
def smollm2_logits(model: LlamaForCausalLM, tokenizer: Any) -> dict[str, Any]:
    """Greedy answers to the prompts, and logits along them: the 50 largest and a fixed sample."""
    subset = np.sort(np.random.default_rng(0).choice(model.config.vocab_size, 256, replace=False))
    out: dict[str, Any] = {"subset": subset.astype(np.int32)}
    for i, question in enumerate(PROMPTS):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 2}
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        logits = model(ids).logits[0]
        positions = np.linspace(0, ids.shape[1] - 1, 6).astype(np.int32)
        top = logits[positions].topk(50)
        out[f"prompt{i}"] = prompt[0].numpy().astype(np.int32)
        out[f"ids{i}"] = ids[0].numpy().astype(np.int32)
        out[f"positions{i}"] = positions
        out[f"top_ids{i}"] = top.indices.numpy().astype(np.int32)
        out[f"top_logits{i}"] = top.values.numpy()
        out[f"subset_logits{i}"] = logits[positions][:, subset].numpy()
        answer = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
        out[f"answer{i}"] = np.frombuffer(answer.encode(), np.uint8)
    return out


def tiny_model(tied: bool) -> LlamaForCausalLM:
    """A random Llama of two layers: grouped heads, stretched positions when untied."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if not tied:
        stretch = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope = {"rope_type": "llama3", "rope_theta": 500.0, **stretch}
        rope["original_max_position_embeddings"] = 256
    config = LlamaConfig(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        rope_parameters=rope,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:  # large enough for positions to matter
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return model


def tiny_directory(path: Path, tied: bool) -> dict[str, Any]:
    """Write a tiny checkpoint; its logits at long positions."""
    model = tiny_model(tied)
    if tied:  # stored in bfloat16, computed in float32 on the rounded values
        model = model.bfloat16()
    model.save_pretrained(path)
    backend = PreTrainedTokenizerFast(
        tokenizer_object=small_bpe(288),
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
    )
    backend.chat_template = TEMPLATES["chatml"]
    backend.save_pretrained(path)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    ids = np.random.default_rng(1).integers(0, 288, TINY_TOKENS).astype(np.int32)
    positions = np.array([0, 1, 17, 255, 256, 511, 1023, TINY_TOKENS - 1], np.int32)
    with torch.no_grad():
        logits = model(torch.tensor(ids[None], dtype=torch.long)).logits[0, positions]
    return {"ids": ids, "positions": positions, "logits": logits.numpy()}


def adapter_directory(path: Path, base: Path) -> dict[str, Any]:
    """Write an adapter by PEFT, of uneven ranks and scales; the logits it gives the tiny model."""
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 2},
        alpha_pattern={"mlp.down_proj": 3},
        use_rslora=True,
        task_type="CAUSAL_LM",
    )
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, **options), config).eval()
    torch.manual_seed(1)
    ids = np.random.default_rng(3).integers(0, 288, 40).astype(np.int32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
        logits = model(torch.tensor(ids[None], dtype=torch.long)).logits[0]
    model.peft_config["default"].base_model_name_or_path = base.name
    model.save_pretrained(path)
    (path / "README.md").unlink()
    written = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    written["target_modules"].sort()  # PEFT keeps a set
    _write_json(path / "adapter_config.json", written)
    return {"ids": ids, "positions": np.arange(40, dtype=np.int32), "logits": logits.numpy()}


def make(target: Path) -> None:
    """Write every golden file."""
    model, tokenizer = smollm2_reference()
    _write_json(target / "tokenizer.json", tokenizer_table(tokenizer))
    _write_json(target / "chat.json", chat_table(tokenizer))
    _write_json(target / "chats.json", chats_table())
    np.savez_compressed(target / "smollm2.npz", **smollm2_logits(model, tokenizer))
    for name, tied in (("tiny-tied", True), ("tiny-llama3", False)):
        np.savez_compressed(target / f"{name}.npz", **tiny_directory(target / name, tied))
    adapter = adapter_directory(target / "adapter", target / "tiny-llama3")
    np.savez_compressed(target / "adapter.npz", **adapter)
    make_families(target)
    make_multimodal(target)
    make_classifier(target)
    make_lora(target, target / "tiny-llama3")


def differences(stored: Path, made: Path) -> list[str]:
    """What differs between two sets of golden files; logits may by 1e-4."""
    out = []
    for path in sorted(p for p in made.rglob("*") if p.is_file()):
        name = path.relative_to(made)
        other = stored / name
        if not other.is_file():
            out.append(f"{name} is not stored")
        elif path.suffix == ".npz":
            a, b = np.load(path), np.load(other)
            same = set(a.files) == set(b.files) and all(
                a[k].shape == b[k].shape and np.allclose(a[k], b[k], rtol=0, atol=1e-4)
                for k in a.files
            )
            out += [] if same else [f"{name} holds other numbers"]
        elif path.read_bytes() != other.read_bytes():
            out.append(f"{name} has other bytes")
    return out


def _write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def check(report: Callable[[str], None]) -> int:
    """Compare everything with what is stored, let transformers read what purepost saves, and print
    the table of the families.
    """
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        wrong = differences(HERE, Path(folder)) + check_steps(HERE, Path(folder), report)
    wrong += check_exports(HERE, report) + check_texts(report) + check_classifier(HERE, report)
    wrong += check_table(HERE, report)
    for line in wrong:
        report(f"differs: {line}")
    report("parity: " + (f"{len(wrong)} differences" if wrong else "everything agrees"))
    return 1 if wrong else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make or compare the golden files.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        sys.exit(check(print))
    make(HERE)
