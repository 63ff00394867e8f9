"""How a checkpoint comes in: a tensor at a time, into the memory it will have, or onto a mesh."""

import gc
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Config, Decoder, init_decoder
from purepost.models.hub import load, save, save_orbax
from purepost.models.hub.convert import decoder_from_tensors, on_default_device, tensors_from
from purepost.models.hub.families import family_of
from purepost.models.hub.safetensors import read_checkpoint
from purepost.text import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
ROOT = Path(__file__).parents[3]

# Eight layers; the embeddings are the largest tensor, a tenth of the model.
CONFIG = Config(2000, 128, 384, 8, 4, 4, 32)


def random_decoder(config: Config) -> Decoder:
    rng = np.random.default_rng(0)
    shapes = eqx.filter_eval_shape(init_decoder, jr.key(0), config)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), shapes)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(GOLDEN / "tiny-tied")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    path = tmp_path_factory.mktemp("streaming") / "model"
    save(random_decoder(CONFIG), tokenizer, path, max_shard_bytes=2**21)
    return path


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the host's memory is not the device's")
def test_the_host_holds_the_model_and_one_tensor(directory: Path) -> None:
    """Traced by Python's allocators, which NumPy uses; the CPU's arrays are that same memory."""
    names = family_of("llama").names
    _, tensors = read_checkpoint(directory)
    size = sum(tensors[name].nbytes for name in tensors)
    largest = max(tensors[name].nbytes for name in tensors)
    jax.random.normal(jr.key(0), (2,))  # what JAX itself allocates on first use
    decoder_from_tensors(CONFIG, tensors, names, jnp.float32)
    gc.collect()
    tracemalloc.start()
    model = decoder_from_tensors(CONFIG, tensors, names, jnp.float32)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size <= kept < size + 0.2e6
    assert size + largest <= peak < size + 1.5 * largest
    assert model.embed.dtype == jnp.float32


def test_leaves_stay_in_the_memory_they_were_read_into() -> None:
    """And a donated one may be overwritten without harm: nothing else refers to it."""
    seen: dict[str, int] = {}

    def place(name: str, values: np.ndarray) -> jax.Array:
        seen[name] = values.ctypes.data
        return on_default_device(name, values)

    model, _ = load(GOLDEN / "tiny-llama3", place=place)
    assert len(seen) == 12 and "layers.attention.q" in seen
    if jax.default_backend() == "cpu":
        assert model.layers.mlp_norm.unsafe_buffer_pointer() == seen["layers.mlp_norm"]
    before = np.array(model.embed)
    doubled = jax.jit(lambda x: x * 2, donate_argnums=0)(model.embed)
    np.testing.assert_array_equal(doubled, before * 2)
    assert model.embed.is_deleted()


def test_leaves_by_orbax(tmp_path: Path, tokenizer: Tokenizer, directory: Path) -> None:
    model, _ = load(GOLDEN / "tiny-tied", dtype=None)
    save_orbax(model, tokenizer, tmp_path / "model")
    again, other = load(tmp_path / "model", dtype=None)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        assert x.dtype == y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(x, y)
    assert other.encode("Hello") == tokenizer.encode("Hello")
    assert load(tmp_path / "model").model.embed.dtype == jnp.float32
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert {"config.json", "orbax", "tokenizer.json"} <= set(names)
    with pytest.raises(ValueError, match="expected nothing at"):
        save_orbax(model, tokenizer, tmp_path / "model")


def test_damaged_orbax_directories(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model, _ = load(GOLDEN / "tiny-tied", dtype=None)
    path = tmp_path / "model"
    save_orbax(model, tokenizer, path)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"hidden_size": 32', '"hidden_size": 40'))
    with pytest.raises(ValueError, match=r"embed of shape \(288, 32\), not \(288, 40\)"):
        load(path)
    (path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="config.json"):
        load(path)
    (path / "config.json").write_text(config)
    (path / "orbax" / "_METADATA").unlink()
    with pytest.raises(ValueError, match="expected an Orbax checkpoint at"):
        load(path)


ON_A_MESH = """
import sys
import jax
from purepost.models.hub import load
from purepost.sharding import FSDP, make_mesh, place
mesh = make_mesh(fsdp=4)
plain = load(sys.argv[1]).model
model = load(sys.argv[1], place=lambda name, x: place({name: x}, mesh, FSDP)[name]).model
for x, y, z in zip(*map(jax.tree.leaves, (model, plain, place(plain, mesh, FSDP)))):
    assert x.sharding == z.sharding, (x.sharding, z.sharding)
    assert (x == y).all()
assert not model.layers.mlp.up.sharding.is_fully_replicated
"""


def test_leaves_go_straight_onto_a_mesh(directory: Path) -> None:
    """In a process that has four devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, "-c", ON_A_MESH, str(directory)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "src"},
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


def test_experts_stand_alone_on_disk() -> None:
    """Our [layer, expert, in, out] is a tensor [out, in] for each layer and expert."""
    config = Config(
        *(30, 8, 12, 2, 2, 1, 4),
        **{"family": "qwen3_moe", "qk_norm": True, "num_experts": 3, "experts_per_token": 2},
    )
    model, names = random_decoder(config), family_of("qwen3_moe").names
    tensors = tensors_from(model, names)
    up = np.asarray(model.layers.mlp.up)
    assert up.shape == (2, 3, 8, 12)
    for layer in range(2):
        for expert in range(3):
            found = tensors[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"]
            np.testing.assert_array_equal(found, up[layer, expert].T)
    again = decoder_from_tensors(config, tensors, names, None)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(x, y)
    del tensors["model.layers.1.mlp.experts.2.down_proj.weight"]
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.mlp\.experts\.2\.down_proj"):
        decoder_from_tensors(config, tensors, names, None)
