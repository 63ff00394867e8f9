"""The shelf tries every algorithm: nothing without a probe, and a page that lists them all."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments import shelf
from experiments.common import NO_FUSIONS
from experiments.probes import KNOWN, PROBES
from experiments.probes.known import compared, judged, solved
from purepost import algorithms
from purepost.rollout.labelled import Judged, Pairs, Steps
from purepost.types import check_rows

ROOT = Path(__file__).resolve().parents[1]
CONFIG = shelf.Config(seeds=2, steps=3, last=1)


def test_every_factory_has_a_probe() -> None:
    assert shelf.missing() == []
    assert {probe.factory for probe in PROBES.values()} <= set(vars(algorithms))


def test_a_factory_without_a_probe_stops_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "unheard_of", lambda optimizer: None, raising=False)
    with pytest.raises(SystemExit, match="got none of unheard_of; add one to experiments/probes"):
        shelf.main(CONFIG, [])


def test_whatever_learns_from_labels_is_tried_on_a_known_reward() -> None:
    learn = {
        probe.factory
        for probe in PROBES.values()
        if isinstance(probe.data(0)(0), Pairs | Judged | Steps)
    }
    assert learn == {probe.factory for probe in KNOWN.values()}


def test_the_labels_come_of_the_known_reward() -> None:
    """Three of four neighbours as they should be, and a good share of each completion's rank."""
    firsts, goods = [], []
    for step in range(40):
        pairs, judgements, steps = compared(1)(step), judged(1)(step), solved(1)(step)
        for data in (pairs, judgements, steps):
            check_rows(data.rows)
        firsts.append(np.asarray(pairs.rows.tokens)[:12, [2, 4]])  # the first prompt: 5 > 6 > 7 > 8
        goods.append(np.asarray(judgements.good).reshape(-1, 4))
        np.testing.assert_array_equal(judgements.good, steps.right.sum(1) == 1)
        np.testing.assert_array_equal(steps.rows.mask.sum(1), 1)
    chosen, rejected = np.concatenate(firsts).T
    assert (np.abs(chosen - rejected) == 1).all() and abs((chosen < rejected).mean() - 0.75) < 0.05
    odds = 3.0 ** np.array([1.5, 0.5, -0.5, -1.5])
    np.testing.assert_allclose(np.concatenate(goods).mean(0), odds / (1 + odds), atol=0.06)


def test_pairs_in_order_and_margins() -> None:
    """Best to worst 3, 1, 2, 2: of neighbours one is right, one wrong, one even."""
    rewards = np.array([[[[3.0, 1.0, 2.0, 2.0]]]])
    np.testing.assert_allclose(shelf.in_order(rewards, shelf.NEIGHBOURS), [[0.5]])
    np.testing.assert_allclose(shelf.in_order(rewards, shelf.DISTANT), [[2 / 3]])
    np.testing.assert_allclose(shelf.margin(rewards), [[1 / 3]])


def test_a_row_says_what_was_measured_and_who_solved_it() -> None:
    """Student's t of two seeds .8 and 1, whose deviation is .1414: 12.706 · .1."""
    found = np.array([[0.2, 0.5, 0.8], [0.2, 0.5, 1.0]])
    cells = shelf.row("grpo", PROBES["grpo"], found, CONFIG)
    assert cells == ("`grpo`", "reward", "1", "0.200 ± 0.000", "0.900 ± 1.271", "1 of 2")


def test_the_page_and_the_picture_show_every_probe(tmp_path: Path) -> None:
    found = {name: np.zeros((2, 3)) for name in PROBES}
    page = shelf.document(found, {name: np.zeros((2, 3, 2, 4)) for name in KNOWN}, CONFIG)
    for name in PROBES:
        assert f"| `{name}` |" in page
    assert "Not run yet" not in page
    assert "Not run yet: `sft`, " in shelf.document({}, {}, CONFIG)
    shelf.draw({name: (x, 0.0) for name, x in found.items()}, tmp_path / "shelf.png")
    assert (tmp_path / "shelf.png").stat().st_size > 10_000


def test_the_committed_page_lists_every_probe() -> None:
    """As run, or as not run yet: `python experiments/shelf.py NAME` for one that is new."""
    page = (ROOT / "docs" / "shelf.md").read_text(encoding="utf-8")
    lacking = [name for name in PROBES if f"`{name}`" not in page]
    assert not lacking and (ROOT / "docs" / "shelf.png").stat().st_size < 500_000


SINGLE = """
import jax.random as jr, numpy as np, optax
from experiments.probes import PROBES, tiny
from experiments.shelf import Config, curves
from purepost import train

probe, config = PROBES["sft"], Config(seeds=2, steps=4)
both = curves(probe, config)
algorithm, data = probe.algorithm(optax.adam(config.learning_rate)), probe.data(1)
state = algorithm.init(jr.key(1), probe.models(tiny(lora=False, seed=1)))
alone = [float(probe.measure(state.models, {}, data(0)))]
for _, state, metrics in train(algorithm, state, data, key=jr.key(1), steps=3, fused=True):
    alone.append(float(probe.measure(state.models, metrics, data(0))))
np.testing.assert_allclose(both[1], alone, rtol=1e-4)
"""


@pytest.mark.slow
def test_a_vmapped_seed_is_its_single_run() -> None:
    """Up to rounding; in a process of its own, for its flag."""
    environment = os.environ | {"XLA_FLAGS": NO_FUSIONS, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", SINGLE], cwd=ROOT, env=environment, check=True)
