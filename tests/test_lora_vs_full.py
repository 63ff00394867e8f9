"""The comparison of full fine-tuning and adapters: its data, and a run of it on a tiny model."""

from dataclasses import replace

import jax.random as jr
import pytest

from experiments import lora_vs_full
from experiments.benchmarks.models import TINY, tiny_tokenizer
from experiments.lora_vs_full import Config, Result, line, run, table, variants
from purepost.models import init_decoder


def test_held_out_problems_are_not_trained_on() -> None:
    """The same split each time; every answer is right."""
    some = lora_vs_full.problems()
    training, held_out = lora_vs_full.split(some, 128)
    first, second = ({str(x["prompt"]) for x in part} for part in (training, held_out))
    assert len(second) == 128 and not first & second and len(first) > 1000
    assert list(lora_vs_full.split(some, 128)[1]) == list(held_out)
    for x in held_out:
        a, sign, b, _ = str(x["prompt"]).split()
        assert int(str(x["completion"])) == int(a) + (int(b) if sign == "+" else -int(b))


def test_rows_of_the_table() -> None:
    """Means over the seeds, and half of their ranges; memory and time by full fine-tuning's."""
    full = [Result(0.4, 1.0, 2.0, 2**21, 10**7), Result(0.4, 1.0, 5.0, 2**21, 10**7)]
    results = [Result(0.5, 1.0, 2.0, 2**20, 10**6), Result(0.7, 0.9, 4.0, 2**20, 10**6)]
    row = line("LoRA", results, full)
    assert row == "| LoRA | 0.600 ± 0.100 | 0.950 ± 0.050 | 1 | 0.50 | 0.90 ± 0.10 | 1.00 |"
    page = table(Config(), 0.1, {"full": full, "LoRA": results})
    assert row in page and "| before | 0.100 |" in page
    assert all(x.count("|") == 8 for x in page.splitlines() if x.startswith("|"))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(Config()))
def test_every_variant_runs(name: str) -> None:
    """Two steps on a narrow model."""
    small = replace(TINY, hidden_size=64, intermediate_size=64, num_layers=1, head_dim=16)
    config = Config(steps=2, rows=1, width=64)
    training, held_out = lora_vs_full.split(lora_vs_full.problems(), 4)
    model, tokenizer = init_decoder(jr.key(0), small), tiny_tokenizer()
    result = run(model, tokenizer, (training, held_out), config, 0, variants(config)[name], 1e-3)
    assert 0 <= result.solved <= 1 and 2 < result.nll < 10
    assert result.memory > 1000 and result.trained > 100
