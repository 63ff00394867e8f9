"""Experts whose gate and up projection are stored as one tensor."""

import numpy as np

from purepost.models.hub.views import join_experts, split_experts


def test_halves_apart_and_together() -> None:
    stem, rng = "model.layers.3.experts.", np.random.default_rng(0)
    both = rng.normal(size=(2, 6, 4)).astype(np.float32)
    stored = {f"{stem}gate_up_proj": both, "model.norm.weight": both[0, 0]}
    split = split_experts(stored)
    assert set(split) == {f"{stem}gate_proj", f"{stem}up_proj", "model.norm.weight"}
    np.testing.assert_array_equal(split[f"{stem}gate_proj"], both[:, :3])
    np.testing.assert_array_equal(split[f"{stem}up_proj"], both[:, 3:])
    again = join_experts(split)
    assert set(again) == set(stored) and len(again) == 2
    for name, tensor in stored.items():
        np.testing.assert_array_equal(again[name], tensor)


def test_what_cannot_be_halved_keeps_its_shape() -> None:
    """And is found to be of a wrong one."""
    flat = np.ones(6, np.float32)
    split = split_experts({"x.experts.gate_up_proj": flat})
    np.testing.assert_array_equal(split["x.experts.gate_proj"], flat)


def test_experts_stored_one_by_one_stay_so() -> None:
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    assert set(join_experts({name: np.ones((2, 2))})) == {name}
