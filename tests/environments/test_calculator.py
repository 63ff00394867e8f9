"""Expressions against Python's own arithmetic, and what the calculator answers."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purepost.environments.calculator import (
    LETTERS,
    LIMIT,
    Problem,
    calculator,
    evaluate,
    problems,
    spell,
)
from purepost.rollout.environment import Tokens

WIDTH = 48


def letters(text: str, first_id: int = 0) -> Tokens:
    ids = [first_id + LETTERS.index(c) for c in text]
    return Tokens(jnp.asarray(ids + [0] * (WIDTH - len(ids)), jnp.int32), jnp.int32(len(ids)))


def text_of(tokens: Tokens, first_id: int = 0) -> str:
    return "".join(LETTERS[i - first_id] for i in tokens.ids[: int(tokens.length)].tolist())


@pytest.fixture(scope="module")
def compute():
    run = jax.jit(evaluate)

    def computed(text: str) -> int | None:
        tokens = letters(text)
        value, good = run(tokens.ids, tokens.length)
        return int(value) if good else None

    return computed


expressions = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*"), inner).map("".join),
        inner.map(lambda x: f"({x})"),
        inner.map(lambda x: f"-{x}"),
    ),
    max_leaves=6,
).filter(lambda x: len(x) <= WIDTH)


@given(expressions)
@settings(max_examples=200)
def test_expressions_are_those_of_python(compute, text: str) -> None:
    plain = re.sub(r"\b0+(?=\d)", "", text)
    expected = eval(plain, {})  # of digits, signs and parentheses that the strategy wrote
    steps = [abs(int(n)) for n in re.findall(r"\d+", text)] + [1]
    if float(np.prod(np.maximum(steps, 1), dtype=np.float64)) * len(steps) < LIMIT:
        assert compute(text) == expected
    else:
        assert compute(text) in (expected, None)


@given(st.text("0123456789+-*()", max_size=12))
@settings(max_examples=200)
def test_whatever_is_no_expression_has_no_value(compute, text: str) -> None:
    try:
        # Python also takes a plus for a sign, and calls what stands before a parenthesis.
        wrong = re.search(r"(^|[-+*(])\+|[\d)]\(|\)\d|\*\*", text)
        expected = None if wrong else eval(re.sub(r"(?<!\d)0+(?=\d)", "", text), {})
    except (SyntaxError, TypeError):
        expected = None
    found = compute(text)
    if expected is None or isinstance(expected, tuple):
        assert found is None
    elif abs(expected) < 10**6 and not re.search(r"\d{9}", text):
        assert found == expected


def test_limits(compute) -> None:
    assert compute("999999999") == LIMIT - 1
    for text in ("1000000000", "99999*99999", "999999999+1", "999999999*4", "65536*65536", ""):
        assert compute(text) is None
    assert compute("(" * 7 + "1" + ")" * 7) == 1
    assert compute("(" * 8 + "1" + ")" * 8) is None
    assert compute("007+01") == 8


@given(st.integers(1 - LIMIT, LIMIT - 1))
@settings(max_examples=50)
def test_numbers_are_spelt(value: int) -> None:
    assert text_of(jax.jit(spell)(jnp.int32(value))) == f"{value};"


@pytest.mark.parametrize(
    ("said", "answered", "reward", "done"),
    [
        ("?1+2*3;", "7;", 0, False),
        ("?3-10;", "-7;", 0, False),
        ("?1+;", "!;", 0, False),
        ("?;", "!;", 0, False),
        (";", "!;", 0, False),
        ("1+2;", "!;", 0, False),
        ("?99999*9;", "!;", 0, False),  # too long for the width
        ("?1+2", "!;", 0, False),  # cut off
        ("=7;", None, 1, True),
        ("=07;", None, 0, True),
        ("=3+4;", None, 0, True),
        ("=7", None, 0, True),
        ("=8;", None, 0, True),
        ("=--7;", None, 0, True),
        ("=;", None, 0, True),
    ],
)
def test_calls_and_answers(said: str, answered: str | None, reward: float, done: bool) -> None:
    env = calculator(first_id=2, result_width=6)
    state = Problem(jnp.int32(7))
    after, reply, earned, over = env.step(jr.key(0), state, letters(said, 2))
    assert (float(earned), bool(over)) == (reward, done)
    assert int(after.answer) == 7
    if answered is not None:
        assert text_of(reply, 2) == answered


def test_negative_answers() -> None:
    env = calculator()
    for said, reward in (("=-7;", 1), ("=7;", 0), ("=-7", 0)):
        assert float(env.step(jr.key(0), Problem(jnp.int32(-7)), letters(said))[2]) == reward


def test_problems_have_their_answers() -> None:
    tasks = jax.jit(partial(problems, p=200, operands=3, digits=2, first_id=1))(jr.key(0))
    prompts = tasks.prompts
    assert prompts.tokens.shape == (200, 9) and prompts.ids.tolist() == list(range(200))
    texts = [
        "".join(LETTERS[i - 1] for i in row[:n])
        for row, n in zip(prompts.tokens.tolist(), prompts.lengths.tolist(), strict=True)
    ]
    assert all(re.fullmatch(r"\d{1,2}([-+*]\d{1,2}){2};", t) for t in texts)
    assert [eval(t[:-1], {}) for t in texts] == tasks.columns["answer"].tolist()
    assert len(set(texts)) > 190
    state, seen = calculator().reset(jr.key(0), {"answer": tasks.columns["answer"][0]})
    assert int(state.answer) == int(tasks.columns["answer"][0]) and int(seen.length) == 0
