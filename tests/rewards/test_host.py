"""Python rewards: weights, abstention, failures, time-outs, columns, metrics."""

import asyncio
import functools
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from purepost.rewards import combine_rewards
from purepost.track.metrics import to_floats

PROMPTS = ["p"] * 4
COMPLETIONS = ["a", "b", "c", "d"]


def f32(values) -> np.ndarray:
    return np.asarray(values, np.float32)


def constant(values, name="f"):
    def f(prompts, completions, **columns):
        return values

    f.__name__ = name
    return f


def test_none_abstains_and_a_row_without_answers_is_unscored() -> None:
    f1, f2 = constant([1, 0, None, 1], "f1"), constant([2, None, None, 0], "f2")
    scores = combine_rewards([f1, f2], [1, 0.5])(PROMPTS, COMPLETIONS)
    np.testing.assert_array_equal(scores.rewards, f32([2, 0, np.nan, 1]))
    assert scores.rewards.dtype == np.float32
    np.testing.assert_array_equal(scores.scored, [True, True, False, True])
    np.testing.assert_array_equal(
        scores.per_function, f32([[1, 2], [0, np.nan], [np.nan, np.nan], [1, 0]])
    )
    assert scores.failures == {}
    # The advantages that follow from these totals: (r − 1) / (1 + 1e-4), sample deviation 1.
    values = scores.rewards[scores.scored].astype(np.float64)
    advantages = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(advantages, [0.9999, -0.9999, 0], atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), np.float32("nan")])
def test_not_finite_leaves_the_sample_unscored_and_is_counted(bad) -> None:
    reward = combine_rewards([constant([1, bad, 0, 1], "odd"), constant([1, 1, 1, 1], "even")])
    with pytest.warns(RuntimeWarning, match="reward function odd returned"):
        scores = reward(PROMPTS, COMPLETIONS)
    np.testing.assert_array_equal(scores.rewards, f32([2, np.nan, 1, 2]))
    assert scores.failures == {"odd/not_finite": 1}


def test_a_raise_costs_every_sample_of_the_call_and_warns_once() -> None:
    def broken(prompts, completions):
        raise KeyError("answer")

    reward = combine_rewards([broken, constant([1, 1, 1, 1])])
    with pytest.warns(RuntimeWarning, match="broken raised KeyError: 'answer'") as caught:
        scores = reward(PROMPTS, COMPLETIONS)
    assert len(caught) == 1
    assert np.isnan(scores.rewards).all()
    np.testing.assert_array_equal(scores.per_function[:, 1], 1)
    assert scores.failures == {"broken/raised": 4}


def test_called_per_sample_a_raise_costs_one_sample() -> None:
    def picky(completions):
        (only,) = completions
        if only == "b":
            raise ValueError("no b")
        return [ord(only) - ord("a")]

    with pytest.warns(RuntimeWarning, match="picky raised ValueError: no b"):
        scores = combine_rewards([picky], per_sample=True, workers=3)(PROMPTS, COMPLETIONS)
    np.testing.assert_array_equal(scores.rewards, f32([0, np.nan, 2, 3]))
    assert scores.failures == {"picky/raised": 1}


def test_late_sample_is_unscored_and_the_others_are_not() -> None:
    release = threading.Event()

    def slow(completions):
        if completions == ["c"]:
            release.wait(30)
        return [1.0]

    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match=r"slow took more than 1.0 s for a sample"):
        scores = combine_rewards([slow], timeout=1.0, per_sample=True)(PROMPTS, COMPLETIONS)
    release.set()
    assert time.monotonic() - start < 10
    np.testing.assert_array_equal(scores.rewards, f32([1, 1, np.nan, 1]))
    assert scores.failures == {"slow/timed_out": 1}


def test_late_call_is_abandoned_whole() -> None:
    release = threading.Event()

    def slow(completions):
        release.wait(30)
        return [1.0] * len(completions)

    with pytest.warns(RuntimeWarning, match=r"slow took more than 1.0 s for the call"):
        scores = combine_rewards([slow], timeout=1.0)(PROMPTS, COMPLETIONS)
    release.set()
    assert np.isnan(scores.rewards).all()
    assert scores.failures == {"slow/timed_out": 4}


def test_async_functions_run_on_one_loop_and_are_cancelled_when_late() -> None:
    loops, cancelled, over = [], [], threading.Event()

    async def judge(completions, **columns):
        loops.append(asyncio.get_running_loop())
        try:
            await asyncio.sleep(30 if completions == ["d"] else 0)
        except asyncio.CancelledError:
            cancelled.append(completions)
            over.set()
            raise
        return [0.5]

    reward = combine_rewards([judge], timeout=1.0, per_sample=True)
    with pytest.warns(RuntimeWarning, match="judge took more than 1.0 s"):
        scores = reward(PROMPTS, COMPLETIONS)
    np.testing.assert_array_equal(scores.rewards, f32([0.5, 0.5, 0.5, np.nan]))
    assert len(set(map(id, loops))) == 1
    assert over.wait(10) and cancelled == [["d"]]


def test_async_without_timeout_works_inside_a_running_loop() -> None:
    async def judge(completions):
        await asyncio.sleep(0)
        return [1.0, None, 0.0, 1.0]

    async def main():
        return combine_rewards([judge])(PROMPTS, COMPLETIONS)

    scores = asyncio.run(main())
    np.testing.assert_array_equal(scores.rewards, f32([1, np.nan, 0, 1]))


def test_a_coroutine_that_blocks_its_loop_does_not_block_the_next_call() -> None:
    release = threading.Event()
    first = True

    async def rude(completions):
        nonlocal first
        if first:
            first = False
            release.wait(30)
        return [1.0] * 4

    reward = combine_rewards([rude], timeout=1.0)
    with pytest.warns(RuntimeWarning, match="rude took more than"):
        assert np.isnan(reward(PROMPTS, COMPLETIONS).rewards).all()
    np.testing.assert_array_equal(reward(PROMPTS, COMPLETIONS).rewards, np.ones(4, np.float32))
    release.set()


def test_wrong_number_of_rewards_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected 4 rewards from reward function short, got 3"):
        combine_rewards([constant([1, 2, 3], "short")])(PROMPTS, COMPLETIONS)


@pytest.mark.parametrize(
    ("result", "message"),
    [(1.0, "a list of 4 rewards, got float"), ("1111", "got str"), ([1, 0, "1", 0], "got '1'")],
)
def test_results_that_are_no_list_of_numbers_are_errors(result, message) -> None:
    with pytest.raises(TypeError, match=message):
        combine_rewards([constant(result)])(PROMPTS, COMPLETIONS)


def test_functions_get_the_columns_they_name() -> None:
    seen = {}

    def only(completions, answer, *, level=None):
        seen["only"] = (answer, level)
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    def everything(prompts, completions, **columns):
        seen["everything"] = sorted(columns)
        return jnp.zeros(4)

    columns = {"answer": ["a", "x", "c", "x"], "source": list(range(4))}
    scores = combine_rewards([only, everything])(PROMPTS, COMPLETIONS, columns)
    np.testing.assert_array_equal(scores.rewards, f32([1, 0, 1, 0]))
    assert seen == {"only": (columns["answer"], None), "everything": ["answer", "source"]}


def test_bad_calls_are_named() -> None:
    def needs(completions, answer):
        return [0.0] * 4

    with pytest.raises(ValueError, match=r"needs expects \['answer'\], got \['completions'"):
        combine_rewards([needs])(PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match="expected 4 entries in answer, one per sample, got 3"):
        combine_rewards([needs])(PROMPTS, COMPLETIONS, {"answer": ["a"] * 3})
    with pytest.raises(ValueError, match="expected 4 entries in completions"):
        combine_rewards([needs])(PROMPTS, COMPLETIONS[:3])
    with pytest.raises(ValueError, match="names of their own, got"):
        combine_rewards([needs])(PROMPTS, COMPLETIONS, {"prompts": PROMPTS})


def test_bad_settings_are_named() -> None:
    f = constant([1])
    with pytest.raises(ValueError, match="at least one reward function"):
        combine_rewards([])
    with pytest.raises(ValueError, match="expected 1 weights"):
        combine_rewards([f], [1, 2])
    with pytest.raises(ValueError, match="finite weights"):
        combine_rewards([f], [float("nan")])
    with pytest.raises(ValueError, match="timeout > 0"):
        combine_rewards([f], timeout=0)
    with pytest.raises(ValueError, match="workers ≥ 1"):
        combine_rewards([f], workers=0)


class Judge:
    """A reward that is an object."""

    def __call__(self, completions):
        return [1.0] * len(completions)


def test_names_are_distinct() -> None:
    same = constant([1] * 4)
    reward = combine_rewards([same, same, functools.partial(same, extra=1), Judge()])
    assert reward.names == ("f", "f_2", "f_3", "Judge")


def test_metrics_have_the_fields_names_and_leave_out_the_unscored() -> None:
    # Groups A = [2, 0], B = [unscored, 1]: deviations √2 of A alone; B teaches nothing.
    f1, f2 = constant([1, 0, None, 1], "f1"), constant([2, None, None, 0], "f2")
    scores = combine_rewards([f1, f2], [1, 0.5])(PROMPTS, COMPLETIONS)
    record = to_floats(scores.metrics(np.array([0, 0, 1, 1])))
    expected = {
        "reward": 1.0,
        "reward_std": 2**0.5,
        "frac_reward_zero_std": 0.5,
        "frac_unscored": 0.25,
        "rewards/f1/mean": 2 / 3,
        "rewards/f1/std": (1 / 3) ** 0.5,
        "rewards/f1/failures": 0.0,
        "rewards/f2/mean": 1.0,
        "rewards/f2/std": 2**0.5,
        "rewards/f2/failures": 0.0,
    }
    assert record.pop("reward/quantiles") == pytest.approx([0, 0.2, 0.5, 1, 1.5, 1.8, 2])
    assert record == pytest.approx(expected)


def test_equal_rewards_have_no_spread_whatever_float32_says() -> None:
    scores = combine_rewards([lambda completions: [0.7] * 4])(PROMPTS, COMPLETIONS)
    record = to_floats(scores.metrics(np.zeros(4, np.int64)))
    assert record["frac_reward_zero_std"] == 1.0


def test_failures_are_counted_in_the_metrics() -> None:
    reward = combine_rewards([constant([1, None, float("nan"), float("nan")])])
    with pytest.warns(RuntimeWarning, match="returned nan"):
        record = to_floats(reward(PROMPTS, COMPLETIONS).metrics(np.zeros(4, np.int64)))
    assert record["rewards/f/failures"] == 2.0
    assert record["frac_unscored"] == 0.75


def test_no_samples_no_rewards() -> None:
    scores = combine_rewards([constant([])])([], [])
    assert scores.rewards.shape == (0,)


@pytest.mark.parametrize("timeout", [None, 5.0])
def test_a_timeout_of_its_own_is_what_a_function_raised(timeout: float | None) -> None:
    async def waits(prompts, completions, **columns):
        raise TimeoutError("its own")

    def blocks(prompts, completions, **columns):
        raise TimeoutError("its own")

    with pytest.warns(RuntimeWarning, match="raised TimeoutError: its own"):
        scores = combine_rewards([waits, blocks], timeout=timeout)(PROMPTS, COMPLETIONS)
    assert scores.failures == {"waits/raised": 4, "blocks/raised": 4}
