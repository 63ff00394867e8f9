"""What adapters cost, by the compiled program's own account."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import pytest

from experiments.benchmarks import adapters as bench
from experiments.benchmarks.program import Program, compile_step, flops
from purepost.algorithms import sft
from purepost.models import Config, Decoder, init_decoder
from purepost.tree import count, named_leaves
from purepost.types import causal_rows
from purepost.weights import add_lora, linear, nf4, quantize

pytestmark = pytest.mark.usefixtures("full_compilation")

CONFIG = Config(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
)
TOKENS = 32
ROWS = causal_rows(jnp.ones((1, TOKENS), jnp.int32), jnp.asarray([TOKENS]))


def variants(model: Decoder) -> dict[str, Decoder]:
    lora: dict[str, Any] = {"rank": 2, "key": jr.key(1)}
    return {
        "full": model,
        "lora": add_lora(model, **lora),
        "dora": add_lora(model, dora=True, **lora),
        "qlora": add_lora(quantize(model), **lora),
    }


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    """A step of each, compiled."""
    algorithm = sft(optax.adam(1e-3))
    models = variants(init_decoder(jr.key(0), CONFIG))
    return {
        name: compile_step(algorithm, algorithm.init(jr.key(0), model), ROWS)
        for name, model in models.items()
    }


def matrices() -> int:
    """Numbers in the matrices of all layers."""
    return CONFIG.num_layers * (4 * 128 * 128 + 3 * 128 * 256)


def test_flops_count_a_loop_as_often_as_it_runs() -> None:
    w, x = jnp.ones((7, 32, 32)), jnp.ones((8, 32))

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] @ w[0]

    text = jax.jit(f).lower(x, w).compile().as_text()
    assert text is not None
    assert flops(text) == 8 * 2 * 8 * 32 * 32


def test_adapters_save_the_gradient_of_the_weights(programs: dict[str, Program]) -> None:
    """Of forward, backward to inputs and backward to weights, the third."""
    full = programs["full"].flops
    assert full > 6 * matrices() * TOKENS
    assert programs["lora"].flops <= 0.72 * full
    assert programs["qlora"].flops <= 0.72 * full
    assert programs["dora"].flops <= 0.75 * full


def test_no_dense_weights_survive_into_the_backward_pass(programs: dict[str, Program]) -> None:
    """A quantised step's temporaries are those of the raw one and less than a layer's weights."""
    layer = 4 * matrices() // CONFIG.num_layers
    assert programs["qlora"].temporary < programs["lora"].temporary + layer
    assert programs["dora"].temporary < programs["lora"].temporary + layer


def test_products_keep_codes_for_the_backward_pass() -> None:
    """One after the other, outside a loop over layers: no array of floats is as large as a weight
    among what is kept.
    """
    ws = [nf4(jr.normal(jr.key(i), (256, 256)), None) for i in range(2)]

    def f(x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(linear(x, w))
        return x.sum()

    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(f, x)[1], jnp.ones((4, 256))))
    assert sum(x.dtype == jnp.uint8 for x in kept) == 2
    assert max(x.size for x in kept if x.dtype == jnp.float32) == 4 * 256


def test_memory_of_weights_and_of_the_optimizer() -> None:
    models = variants(init_decoder(jr.key(0), CONFIG))
    quantized, whole = bench.weight_shares(models["qlora"])
    assert quantized <= 0.27
    kept = 64 * 128 + 13 * 128  # embeddings and norms
    assert whole == pytest.approx((quantized * matrices() + kept) / (matrices() + kept), rel=1e-6)
    assert bench.weight_shares(models["lora"]) == (1.0, 1.0)
    state = sft(optax.adam(1e-3)).init(jr.key(0), models["qlora"])
    assert count(state.opt_state.inner) == 2 * count(state.params) + 1
    assert all(name.endswith((".a", ".b")) for name, _ in named_leaves(state.params))


def test_the_benchmark_prints_every_variant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On one narrow layer."""
    narrow = replace(CONFIG, hidden_size=64, intermediate_size=64, num_layers=1)
    chosen = {name: bench.VARIANTS[name] for name in ("full", "qlora-nf4")}
    monkeypatch.setattr(bench, "VARIANTS", chosen)
    monkeypatch.setattr(bench, "use_compile_cache", lambda: None)
    monkeypatch.setattr(
        bench, "load_model", lambda name: type("L", (), {"model": init_decoder(jr.key(0), narrow)})
    )
    monkeypatch.setattr(bench, "WORK", replace(bench.WORK, rows=1, width=8))
    bench.main("tiny", "1")
    full, qlora = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert full["flops_ratio"] == 1 and full["quantized_share_of_bf16"] == 1
    assert qlora["quantized_share_of_bf16"] <= 0.27 and qlora["seconds"] > 0
