"""Arithmetic with a calculator: call it, read its result, answer. Token by token, all in JAX."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ..rollout.collect import Tasks
from ..rollout.environment import Environment, Tokens
from ..rollout.sample import Prompts
from ..types import KeyArray

# Token first_id + i stands for letter i. A turn is "?1+2;", a call, answered by "3;", or by "!;"
# where it cannot be computed; or "=3;", the answer, which ends the episode.
LETTERS = "0123456789+-*()?=!;"
PLUS, MINUS, TIMES, OPEN, CLOSE, CALL, ANSWER, REFUSAL, END = range(10, 19)
LIMIT, DEPTH = 10**9, 8  # magnitudes are below, parentheses at most
NUMBER, OPERAND = 1, 2  # what stands before: digits of a number, or a whole one; 0: none


class Problem(eqx.Module):
    """What the answer should be."""

    answer: Int[Array, ""]


class _Reading(eqx.Module):
    """An expression read up to some letter: of each open parenthesis the sum of the terms that are
    over, and the product so far of the one that is not.
    """

    total: Int[Array, " d"]
    term: Int[Array, " d"]
    depth: Int[Array, ""]
    number: Int[Array, ""]  # the last operand
    before: Int[Array, ""]
    good: Bool[Array, ""]


def _times(a: Int[Array, ""], b: Int[Array, ""]) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """(a·b, whether it is below the limit), 0 where it is not."""
    near = jnp.abs(a.astype(jnp.float32) * b.astype(jnp.float32)) < 2.0 * LIMIT
    product = jnp.where(near, a, 0) * jnp.where(near, b, 0)
    return product, near & (jnp.abs(product) < LIMIT)


def _read(state: _Reading, letter: Int[Array, ""]) -> _Reading:
    """The next letter of an expression."""
    at, number = state.depth, state.number
    digit, sign = letter < PLUS, (letter == PLUS) | (letter == MINUS)
    times, opens, closes = letter == TIMES, letter == OPEN, letter == CLOSE
    fresh, operand = state.before == 0, state.before > 0
    negates = (letter == MINUS) & fresh
    longer, small = _times(number, jnp.int32(10))
    shown = jnp.where(fresh, 0, longer) + letter
    product, bounded = _times(state.term[at], number)
    sum_ = state.total[at] + product
    bounded &= jnp.abs(sum_) < LIMIT
    allowed = jnp.select(
        [digit, negates, sign | times, opens, closes],
        [
            fresh | ((state.before == NUMBER) & small & (shown < LIMIT)),
            jnp.bool_(True),
            operand & bounded,
            fresh & (at + 1 < DEPTH),
            operand & bounded & (at > 0),
        ],
        jnp.bool_(False),
    )
    unit = jnp.where(letter == MINUS, -1, 1).astype(jnp.int32)
    term = jnp.select([negates, sign, times], [-state.term[at], unit, product], state.term[at])
    ends = sign & ~negates
    depth = at + opens.astype(jnp.int32) - closes.astype(jnp.int32)
    inner = jnp.minimum(at + 1, DEPTH - 1)
    total = state.total.at[at].set(jnp.where(ends, sum_, state.total[at]))
    terms = state.term.at[at].set(term)
    total = total.at[inner].set(jnp.where(opens, 0, total[inner]))
    terms = terms.at[inner].set(jnp.where(opens, 1, terms[inner]))
    before = jnp.where(digit, NUMBER, jnp.where(closes, OPERAND, 0)).astype(jnp.int32)
    return _Reading(
        total,
        terms,
        jnp.clip(depth, 0, DEPTH - 1),
        jnp.where(digit, shown, jnp.where(closes, sum_, number)),
        before,
        state.good & allowed,
    )


def evaluate(letters: Int[Array, " w"], length: Int[Array, ""]) -> tuple[Array, Array]:
    """(value, whether there is one) of an expression: integers, + − · and parentheses, − also as a
    sign. There is none where it is ill-formed, nested too deep, or a number reaches the limit.
    """
    none = jnp.zeros((), jnp.int32)
    total, term = jnp.zeros(DEPTH, jnp.int32), jnp.ones(DEPTH, jnp.int32)
    first = _Reading(total, term, none, none, none, jnp.bool_(True))

    def read(state: _Reading, x: Any) -> tuple[_Reading, None]:
        letter, there = x
        after = _read(state, letter)
        return jax.tree.map(lambda new, old: jnp.where(there, new, old), after, state), None

    there = jnp.arange(letters.shape[0]) < length
    last, _ = jax.lax.scan(read, first, (letters, there))
    product, bounded = _times(last.term[0], last.number)
    value = last.total[0] + product
    good = last.good & bounded & (last.depth == 0) & (last.before > 0) & (jnp.abs(value) < LIMIT)
    return jnp.where(good, value, 0), good


def spell(value: Int[Array, ""], width: int = 11) -> Tokens:
    """The letters of an integer below the limit, END behind them, in `width` slots.

    Not for widths below 11, unless the numbers are known to be short.
    """
    powers = jnp.asarray([10**k for k in range(9)], jnp.int32)
    digits = jnp.abs(value) // powers % 10
    count = jnp.maximum((jnp.abs(value) >= powers).sum(dtype=jnp.int32), 1)
    negative = (value < 0).astype(jnp.int32)
    place = jnp.arange(width, dtype=jnp.int32)
    from_end = negative + count - 1 - place  # the power of ten that stands here
    letters = jnp.where(
        from_end >= 0, jnp.take(digits, jnp.clip(from_end, 0, 8)), jnp.where(from_end == -1, END, 0)
    )
    letters = jnp.where((place == 0) & (value < 0), MINUS, letters)
    return Tokens(letters.astype(jnp.int32), negative + count + 1)


def calculator(*, first_id: int = 0, result_width: int = 11) -> Environment[Problem]:
    """The problem stands in the prompt, its answer in the task: {"answer": ...}. The right answer
    earns 1, and any answer ends the episode; calls, refused ones too, earn nothing.

    Results of more than `result_width` − 1 letters are refused.
    """

    def reset(key: KeyArray, task: dict[str, Array]) -> tuple[Problem, Tokens]:
        none = Tokens(jnp.zeros(result_width, jnp.int32), jnp.zeros((), jnp.int32))
        return Problem(task["answer"]), none

    def step(
        key: KeyArray, state: Problem, action: Tokens
    ) -> tuple[Problem, Tokens, Float[Array, ""], Bool[Array, ""]]:
        letters = action.ids - first_id
        ended = letters[action.length - 1] == END
        value, good = evaluate(letters[1:], action.length - 2)
        good &= ended & (action.length > 2)
        done = letters[0] == ANSWER
        # An answer is a number: digits, and perhaps a sign; not a sum.
        answer = spell(value)
        written = jnp.pad(letters, (0, 12))[1:12]
        here = jnp.arange(11) < answer.length
        plain = (jnp.where(here, written, 0) == jnp.where(here, answer.ids, 0)).all()
        plain &= action.length == answer.length + 1
        right = done & good & plain & (value == state.answer)
        said = spell(value, result_width)
        said_well = good & (letters[0] == CALL) & (said.length <= result_width)
        refusal = jnp.zeros(result_width, jnp.int32).at[:2].set(jnp.asarray([REFUSAL, END]))
        ids = jnp.where(said_well, said.ids, refusal) + first_id
        reply = Tokens(ids, jnp.where(said_well, said.length, 2))
        return state, reply, right.astype(jnp.float32), done

    return Environment(reset, step)


def problems(
    key: KeyArray, p: int, *, operands: int = 3, digits: int = 2, first_id: int = 0
) -> Tasks:
    """p random sums and products, such as "12+7*30;": `operands` numbers of up to `digits` digits
    each, their answers beside them.
    """
    k_numbers, k_signs = jr.split(key)
    numbers = jr.randint(k_numbers, (p, operands), 0, 10**digits, jnp.int32)
    signs = jr.randint(k_signs, (p, operands), PLUS, TIMES + 1, jnp.int32)
    width = operands * (digits + 1)

    def write(numbers: Int[Array, " o"], signs: Int[Array, " o"]) -> Tokens:
        letters, length = jnp.zeros(width + 1, jnp.int32), jnp.zeros((), jnp.int32)
        for number, sign in zip(numbers, signs.at[-1].set(END), strict=True):
            text = spell(number, digits + 1)
            ended = text.ids.at[text.length - 1].set(sign)
            letters = jax.lax.dynamic_update_slice(letters, ended, (length,))
            length = length + text.length
        return Tokens(jnp.where(jnp.arange(width + 1) < length, letters, 0)[:width], length)

    text = jax.vmap(write)(numbers, signs)
    answers, _ = jax.vmap(evaluate)(text.ids, text.length - 1)
    here = jnp.arange(width) < text.length[:, None]
    prompts = Prompts(
        jnp.where(here, text.ids + first_id, 0), text.length, jnp.arange(p, dtype=jnp.int32)
    )
    return Tasks(prompts, {"answer": answers})
