"""A training step of adapters that PEFT made is PEFT's: LoRA, embeddings included, and DoRA."""

from pathlib import Path
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder
from purepost.models.hub import load, load_adapter, save_adapter
from purepost.tree import map_named, named_leaves
from purepost.weights import ALL_LINEAR, add_lora, quantize
from tests.golden.steps import differences_of_step

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def base() -> Decoder:
    return load(GOLDEN / "tiny-llama3").model


@pytest.mark.usefixtures("full_compilation")  # 1e-5 is near what another order of sums changes
@pytest.mark.parametrize("name", ["lora", "dora"])
def test_logits_and_a_step_are_pefts(base: Decoder, name: str) -> None:
    """Logits and the new adapter to 1e-5, of the largest entry where that is above 1."""
    assert not differences_of_step(base, GOLDEN / name, dict(np.load(GOLDEN / f"{name}.npz")))


@pytest.mark.parametrize("options", [{"where": f"{ALL_LINEAR}|embed"}, {"dora": True}])
def test_saved_and_loaded_is_the_same(
    base: Decoder, tmp_path: Path, options: dict[str, Any]
) -> None:
    model = add_lora(base, rank=3, key=jr.key(0), **options)
    model = map_named(lambda name, x: x + 0.5 if name[-2:] in (".b", "de") else x, model)
    save_adapter(model, tmp_path / "a", base="owner/name")
    again = load_adapter(base, tmp_path / "a")
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)


def test_an_adapter_goes_onto_a_quantised_base(base: Decoder) -> None:
    plain = load_adapter(base, GOLDEN / "lora")
    on_quantised = load_adapter(quantize(base, block=16), GOLDEN / "lora")
    one, two = (dict(named_leaves(m)) for m in (plain, on_quantised))
    assert on_quantised.layers.attention.q.base.shape == (2, 32, 64)
    np.testing.assert_array_equal(one["layers.attention.q.a"], two["layers.attention.q.a"])


def test_what_peft_does_not_have_is_an_error(base: Decoder, tmp_path: Path) -> None:
    some: dict[str, Any] = {"rank": 2, "key": jr.key(0)}
    mixed = add_lora(add_lora(base, where="q$", dora=True, **some), where="k$", **some)
    tied = add_lora(load(GOLDEN / "tiny-tied").model, where="embed", **some)
    cases = [
        ("expected DoRA on every adapted matrix, or on none", mixed),
        ("not on embed", add_lora(base, where="embed", dora=True, **some)),
        ("embeddings that are the head as well", tied),
    ]
    for i, (message, model) in enumerate(cases):
        with pytest.raises(ValueError, match=message):
            save_adapter(model, tmp_path / str(i), base="owner/name")
