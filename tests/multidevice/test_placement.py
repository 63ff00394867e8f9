"""Rules, meshes and placements, and what is said when they do not fit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from purepost.models import Decoder
from purepost.sharding import (
    DATA_PARALLEL,
    FSDP,
    TENSOR_PARALLEL,
    Rules,
    make_mesh,
    matrix,
    place,
    place_batch,
    sharded,
    shardings,
)
from purepost.tree import named_leaves
from purepost.types import causal_rows
from purepost.weights import add_lora, int8, quantize, without_lora


def specs(tree: PyTree) -> dict[str, P]:
    return {name: x.sharding.spec for name, x in named_leaves(tree) if eqx.is_array(x)}


def test_fsdp_divides_every_matrix(model: Decoder) -> None:
    mesh = make_mesh(fsdp=8)
    placed = place(model, mesh, FSDP)
    found = specs(placed)
    assert found["layers.mlp.down"] == P(None, "fsdp")
    assert found["embed"] == P("fsdp")
    assert found["layers.attention_norm"] == P()
    down = dict(named_leaves(placed))["layers.mlp.down"]
    assert down.addressable_shards[3].data.shape == (2, 8, 32)
    for x, y in zip(jax.tree.leaves(placed), jax.tree.leaves(model), strict=True):
        assert np.array_equal(x, y)


def test_tensor_parallel_pairs_out_with_in(model: Decoder) -> None:
    found = specs(place(model, make_mesh(data=2, fsdp=2, tensor=2), TENSOR_PARALLEL))
    assert found["layers.attention.q"] == found["layers.mlp.up"] == P(None, "fsdp", "tensor")
    assert found["layers.attention.o"] == found["layers.mlp.down"] == P(None, "tensor", "fsdp")
    assert found["embed"] == P(("tensor", "fsdp"))


def test_adapters_are_cut_as_their_base(model: Decoder, key: jax.Array) -> None:
    adapted = add_lora(model, rank=2, key=key)
    found = specs(place(adapted, make_mesh(data=2, fsdp=2, tensor=2), TENSOR_PARALLEL))
    assert found["layers.mlp.up.base"] == P(None, "fsdp", "tensor")
    assert found["layers.mlp.up.a"] == P(None, "fsdp")
    assert found["layers.mlp.up.b"] == P(None, None, "tensor")
    assert found["layers.mlp.down.a"] == P(None, "tensor")
    assert found["layers.mlp.down.b"] == P(None, None, "fsdp")
    found = specs(place(adapted, make_mesh(fsdp=8), FSDP))
    assert found["layers.mlp.up.a"] == P(None, "fsdp")
    assert found["layers.mlp.up.b"] == P(None, None, "fsdp")


def test_quantised_weights_are_cut_as_the_dense_ones(model: Decoder, key: jax.Array) -> None:
    """Codes along in and out; scales where they divide; what is small stays whole."""
    adapted = add_lora(quantize(model, block=8), rank=2, dora=True, key=key)
    found = specs(place(adapted, make_mesh(data=2, fsdp=2, tensor=2), TENSOR_PARALLEL))
    assert found["layers.mlp.up.base.codes"] == P(None, "fsdp", "tensor")
    assert found["layers.mlp.up.base.scales.codes"] == P(None, "fsdp", "tensor")
    assert found["layers.mlp.up.base.scales.outer"] == found["layers.mlp.up.magnitude"] == P()
    assert found["layers.mlp.down.base.codes"] == P(None, "tensor", "fsdp")
    channels = specs(place(quantize(model, kind=int8), make_mesh(fsdp=8), FSDP))
    assert channels["layers.mlp.up.codes"] == P(None, "fsdp")
    assert channels["layers.mlp.up.scales"] == P(None, None, "fsdp")  # one for each output
    rows = causal_rows(jnp.ones((8, 6), jnp.int32), jnp.full(8, 6))
    placed = place(adapted, make_mesh(data=2, fsdp=2, tensor=2), TENSOR_PARALLEL)
    np.testing.assert_allclose(jax.jit(lambda m: m(rows)[0])(placed), adapted(rows)[0], atol=1e-4)


def test_first_match_and_first_fit_win(key: jax.Array) -> None:
    mesh = make_mesh(data=4, tensor=2)
    tree = {"w": jnp.ones((3, 8)), "v": jnp.ones((8, 8)), "s": jnp.ones(()), "key": key, "n": 3}
    rules: Rules = (("w", P("data", None), P("tensor")), ("", P(("data", "tensor"), None)))
    placed = place(tree, mesh, rules)
    # A spec names the last axes: P("tensor") is the axis of 8.
    found = specs(placed)
    assert found["w"] == P(None, "tensor")
    assert found["v"] == P(("data", "tensor"))
    assert found["s"] == P()
    assert placed["n"] == 3
    assert jr.uniform(placed["key"]) == jr.uniform(key)


def test_shapes_can_be_placed_before_they_are_numbers(model: Decoder) -> None:
    mesh = make_mesh(fsdp=8)
    shapes = eqx.filter_eval_shape(lambda m: m, model)
    placed = shardings(shapes, mesh, FSDP)
    assert placed.layers.mlp.up == NamedSharding(mesh, P(None, "fsdp"))


def test_arrays_that_are_shared_stay_shared(model: Decoder, key: jax.Array) -> None:
    policy = add_lora(model, rank=2, key=key)
    models = {"policy": policy, "reference": without_lora(policy)}
    found = dict(named_leaves(place(models, make_mesh(fsdp=8), FSDP)))
    assert found["policy.embed"] is found["reference.embed"]
    assert found["policy.layers.mlp.up.base"] is found["reference.layers.mlp.up"]


def test_placing_onto_another_mesh(model: Decoder) -> None:
    devices = jax.devices()
    trainer = make_mesh(fsdp=4, devices=devices[:4])
    sampler = make_mesh(data=4, devices=devices[4:])
    moved = place(place(model, trainer, FSDP), sampler, DATA_PARALLEL)
    assert moved.embed.sharding.device_set == set(devices[4:])
    assert np.array_equal(moved.embed, model.embed)


def test_a_leaf_that_does_not_divide_is_named() -> None:
    tree = {"layers": {"up": jnp.ones((2, 12, 6))}}
    with pytest.raises(ValueError) as error:
        place(tree, make_mesh(fsdp=8), FSDP)
    for part in ("layers.up", "(2, 12, 6)", "axis 1 of size 12", "axis 2 of size 6", "fsdp = 8"):
        assert part in str(error.value)
    allowed: Rules = (("", P("fsdp", None), P()),)
    assert specs(place(tree, make_mesh(fsdp=8), allowed)) == {"layers.up": P()}


def test_mistaken_rules_are_named() -> None:
    mesh = make_mesh(fsdp=8)
    tree = {"up": jnp.ones((8, 8)), "norm": jnp.ones(8)}
    with pytest.raises(ValueError, match="data, fsdp, tensor, got 'model' in the rule 'up'"):
        place(tree, mesh, (("up", P("model")), ("", P())))
    with pytest.raises(ValueError, match=r"a rule for norm of shape \(8,\), got none"):
        place(tree, mesh, matrix("up", "fsdp", None))
    with pytest.raises(ValueError, match="names 2 axes, the leaf has 1"):
        place(tree, mesh, (("", P("fsdp", None)),))


def test_batches_divide_by_rows() -> None:
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    rows = causal_rows(jnp.ones((8, 6), jnp.int32), jnp.full(8, 6))
    placed = place_batch({"rows": rows, "text": ["a"] * 8, "names": np.array(["b"] * 8)}, mesh)
    assert placed["rows"].tokens.sharding.spec == P(("data", "fsdp"))
    assert placed["rows"].tokens.addressable_shards[0].data.shape == (2, 6)
    assert placed["text"] == ["a"] * 8
    with pytest.raises(ValueError, match=r"rows of tokens of shape \(6, 6\) .* data·fsdp = 4"):
        place_batch(jax.tree.map(lambda x: x[:6], rows), mesh)


def test_a_mesh_has_the_devices_there_are() -> None:
    with pytest.raises(ValueError, match="data · fsdp · tensor = 8, .* got 2 · 2 · 1 = 4"):
        make_mesh(data=2, fsdp=2)
    with pytest.raises(ValueError, match="expected tensor ≥ 1, got 0"):
        make_mesh(tensor=0)


def test_only_meshes_of_ours_shard_algorithms() -> None:
    from purepost.algorithms.sft import sft

    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match="axes data, fsdp, tensor, got x; make it with make_mesh"):
        sharded(sft(optax.sgd(0.1)), mesh, DATA_PARALLEL)
