"""Every family against transformers' golden numbers (tests/golden/families.py), and what holds of
any model: packing, batching, caching, adapters, export.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder, init_decoder, load_balancing_loss, real_tokens
from purepost.models.cache import decode, prefill, unstack
from purepost.models.hub import load, save
from purepost.models.hub.families import FAMILIES
from purepost.models.hub.safetensors import read_checkpoint
from purepost.types import Rows, causal_rows, check_rows, group_rows
from purepost.weights import add_lora, merge
from tests.compare import assert_close

GOLDEN = Path(__file__).parents[1] / "golden"
EVERY = pytest.mark.parametrize("name", [*FAMILIES, "qwen3_moe_dense", "gemma4_text_experts"])


@cache
def family(name: str) -> Decoder:
    """The tiny checkpoint of a family."""
    return load(GOLDEN / name).model


def integers(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


@eqx.filter_jit
def logits_at(model: Decoder, rows: Rows, positions: jax.Array) -> tuple[jax.Array, Any]:
    hidden, kept = model(rows)
    return model.unembed(jnp.take_along_axis(hidden, positions[..., None], 1)), kept


@EVERY
def test_logits_equal_transformers(name: str) -> None:
    """Two rows of uneven lengths, past the window and to the last position."""
    golden, model = np.load(GOLDEN / f"{name}.npz"), family(name)
    rows = causal_rows(integers(golden["ids"]), integers(golden["lengths"]))
    got, kept = logits_at(model, rows, integers(golden["positions"]))
    np.testing.assert_allclose(got, golden["logits"], rtol=0, atol=1e-4)
    assert golden["lengths"].max() == model.config.max_positions
    assert np.std(golden["logits"]) > 0.3
    assert (kept.router is None) == (model.config.num_experts == 0)
    if kept.router is not None:
        per_token = model.config.experts_per_token
        loss = load_balancing_loss(kept.router, real_tokens(rows), per_token)
        np.testing.assert_allclose(loss, golden["load_balancing_loss"], rtol=1e-5)


class Documents(NamedTuple):
    """Two documents of 28 and 17 tokens: each in a row, both in one row, and one alone."""

    apart: Rows
    packed: Rows
    alone: Rows


def documents() -> Documents:
    tokens = np.random.default_rng(4).integers(0, 288, 45)
    a, b, t = 28, 17, 48
    split = np.zeros((2, t), np.int32)
    split[0, :a], split[1, :b] = tokens[:a], tokens[a:]
    index = np.arange(t)
    real, second = index < a + b, index >= a
    joined = np.where(real, np.pad(tokens, (0, t - a - b)), 0)
    end = np.where(real, np.where(second, a + b, a), index + 1)
    start = np.where(second, a, 0)
    parent = np.where(real, np.maximum(index - 1, start), index)
    columns = (joined, end, np.where(real, index - start, 0), parent)
    token, ends, depth, up = (integers(np.stack([x, np.zeros_like(x)])) for x in columns)
    mask = np.stack([real & (parent < index), np.zeros(t, bool)])
    nothing, ids = jnp.zeros(mask.shape, jnp.int32), integers([0, 1])
    packed = Rows(token, ends, depth, up, jnp.asarray(mask), nothing, ids)
    apart = causal_rows(integers(split), integers([a, b]))
    return Documents(apart, packed, causal_rows(integers(split), integers([a, 0])))


@eqx.filter_jit
def scored(model: Decoder, rows: Rows) -> tuple[jax.Array, jax.Array, Decoder]:
    """Log-probabilities of the tokens after each one's parent, hidden states, and the gradient of
    the former's sum.
    """

    def loss(model: Decoder) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        hidden, _ = model(rows)
        before = jnp.take_along_axis(hidden, rows.parent[..., None], 1)
        logps = jax.nn.log_softmax(model.unembed(before))
        logps = jnp.take_along_axis(logps, rows.tokens[..., None], 2)[..., 0]
        logps = jnp.where(rows.mask, logps, 0.0)
        return logps.sum(), (logps, hidden)

    grads, (logps, hidden) = eqx.filter_grad(loss, has_aux=True)(model)
    return logps, hidden, grads


@EVERY
def test_packing_batching_gradients_and_fresh_adapters(name: str) -> None:
    model, rows = family(name), documents()
    for each in rows:
        check_rows(each)
    apart, packed, alone = (scored(model, r) for r in rows)
    for one, two, three in zip(packed[:2], apart[:2], alone[:2], strict=True):
        np.testing.assert_allclose(one[0, :28], two[0, :28], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(one[0, 28:45], two[1, :17], rtol=1e-5, atol=2e-5)
        np.testing.assert_allclose(three[0, :28], two[0, :28], rtol=1e-5, atol=2e-5)
    leaves = zip(jax.tree.leaves(packed[2]), jax.tree.leaves(apart[2]), strict=True)
    for x, y in leaves:
        assert np.isfinite(x).all() and np.isfinite(y).all()
        assert np.linalg.norm(y) > 0
        assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y)
    # Fresh adapters change nothing.
    adapted = add_lora(model, rank=2, key=jr.key(0))
    fresh = eqx.filter_jit(lambda m, r: m(r)[0])(adapted, rows.apart)
    np.testing.assert_allclose(fresh, apart[1], rtol=1e-5, atol=1e-5)


@eqx.filter_jit
def decoded_and_forced(
    model: Decoder, prompts: jax.Array, lengths: jax.Array, branches: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Hidden states after the prompts and after each token of their branches, with a cache; and
    those of one pass over all tokens.
    """
    p, g, t = branches.shape
    last, cached = prefill(model, prompts, lengths, g, t)
    blocks = unstack(model)

    def step(cached: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        hidden, cached = decode(model, blocks, cached, branches[:, :, i], i)
        return cached, hidden

    _, steps = jax.lax.scan(step, cached, jnp.arange(t, dtype=jnp.int32))
    full = jnp.full((p, g), t, jnp.int32)
    rows = group_rows(prompts, lengths, branches, full, jnp.ones(branches.shape, bool))
    hidden = model(rows)[0]
    at_last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], 1)[:, 0]
    of_branches = hidden[:, prompts.shape[1] :].reshape(p, g, t, -1)
    return (last, jnp.moveaxis(steps, 0, 2)), (at_last, of_branches)


@EVERY
def test_cached_decoding_equals_teacher_forcing(name: str) -> None:
    """Prompts of 15 and 3 tokens, two branches of 16 each: the window of 12 leaves both behind."""
    rng = np.random.default_rng(5)
    prompts, branches = rng.integers(0, 288, (2, 15)), rng.integers(0, 288, (2, 2, 16))
    arguments = integers(prompts), integers([15, 3]), integers(branches)
    decoded, forced = decoded_and_forced(family(name), *arguments)
    # Of the largest entry: an embedding's last bit moves Gemma 4's hidden states by half of that.
    assert_close(decoded, forced, relative=1e-5)


@EVERY
def test_re_export_is_the_same_tensor_for_tensor(name: str, tmp_path: Path) -> None:
    model, tokenizer = load(GOLDEN / name, dtype=None)
    save(model, tokenizer, tmp_path / "model")
    (config, before), (saved, after) = (
        read_checkpoint(path) for path in (GOLDEN / name, tmp_path / "model")
    )
    assert set(before) == set(after)
    for key in before:
        assert before[key].dtype == after[key].dtype
        np.testing.assert_array_equal(before[key], after[key])
    module = FAMILIES[model.config.family]
    assert module.config_from_hf(saved) == module.config_from_hf(config) == model.config
    assert saved["architectures"] == config["architectures"]


@EVERY
def test_a_fresh_model_has_the_loaded_ones_shapes(name: str) -> None:
    """And its norms multiply by 1."""
    model = family(name)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), model.config)
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(model), strict=True)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)
    norm = jax.jit(lambda key: init_decoder(key, model.config).norm)(jr.key(0))
    np.testing.assert_array_equal(norm + model.config.norm_offset, 1.0)


@EVERY
def test_a_bfloat16_model_computes_in_bfloat16(name: str) -> None:
    """Adapters are float32; under strict promotion a mixed product is an error."""
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), family(name))
    adapted = add_lora(model, rank=2, key=jr.key(0))
    tokens, lengths = integers(np.ones((2, 9))), integers([9, 4])
    rows = causal_rows(tokens, lengths)

    def passes(model: Decoder) -> tuple[jax.Array, jax.Array, jax.Array]:
        hidden, _ = model(rows, key=jr.key(1))
        _, cached = prefill(model, tokens, lengths, 2, 8)
        step = decode(model, unstack(merge(model)), cached, tokens[:, :2], integers(0))[0]
        return hidden, step, model.unembed(hidden)

    shapes = eqx.filter_eval_shape(passes, adapted)
    assert [x.dtype for x in shapes] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
