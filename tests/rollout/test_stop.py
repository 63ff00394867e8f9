"""Stop strings found by their automata exactly where a search of the text finds them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from purepost.rollout.stop import StopStrings, stop_strings

# Tokens of no, one and several bytes, halves of a character, and whole strings to stop at.
VOCABULARY = [b"", b"a", b"b", b"ab", b"ba", b"aab", b"abab", b"\n", b"b\n\na", b"\xc3", b"\xa9"]
WIDTH = 6


def run(stop: StopStrings, tokens: list[int]) -> list[bool]:
    """After each token: whether some string has been completed."""
    state, complete = stop.start(1), []
    for token in tokens:
        state, hit = stop.advance(state, jnp.asarray([token], jnp.int32))
        complete.append(bool(hit[0]))
    return complete


def search(strings: list[str], tokens: list[int]) -> list[bool]:
    texts = [b"".join(VOCABULARY[t] for t in tokens[: i + 1]) for i in range(len(tokens))]
    return [any(s.encode() in text for s in strings) for text in texts]


@given(
    st.lists(st.text("ab\né", min_size=1, max_size=5), min_size=1, max_size=2),
    st.lists(st.integers(0, len(VOCABULARY) - 1), min_size=WIDTH, max_size=WIDTH),
)
@example(["aab"], [1, 1, 1, 2, 1, 1])  # a a a b: the overlap is kept
@example(["abab"], [1, 2, 5, 4, 2, 1])
@example(["a\n\nb"], [1, 7, 7, 2, 1, 1])
@example(["é"], [9, 9, 10, 1, 1, 1])
def test_complete_exactly_when_the_text_holds_a_string(
    strings: list[str], tokens: list[int]
) -> None:
    assert run(stop_strings(strings, VOCABULARY), tokens) == search(strings, tokens)


def test_a_string_across_tokens() -> None:
    stop = stop_strings(["bab"], VOCABULARY)
    assert run(stop, [3, 1, 7, 3, 3]) == [False, False, False, False, True]  # ab a \n ab ab


def test_a_string_inside_one_token() -> None:
    assert run(stop_strings(["\n\n"], VOCABULARY), [1, 8]) == [False, True]


def test_tokens_without_text_change_nothing() -> None:
    assert run(stop_strings(["ab"], VOCABULARY), [0, 1, 0, 0, 2]) == [False] * 4 + [True]


def test_rows_are_matched_apart() -> None:
    stop = stop_strings(["ab", "bb"], VOCABULARY)
    columns = jnp.asarray([[1, 2, 2], [2, 2, 1]], jnp.int32)
    state, hit = stop.advance(stop.start(3), columns[0])
    assert hit.tolist() == [False, False, False]
    assert state.tolist() == [[1, 0], [0, 1], [0, 1]]
    _, hit = stop.advance(state, columns[1])
    assert hit.tolist() == [True, True, False]


def test_a_long_periodic_string_over_random_tokens() -> None:
    rng = np.random.default_rng(0)
    tokens = [int(t) for t in rng.choice([1, 2, 3, 4, 6], 200)]
    strings = ["ababababaab", "bbabbab"]
    want = search(strings, tokens)
    assert any(want) and not want[10]
    stop = stop_strings(strings, VOCABULARY)
    _, got = jax.lax.scan(
        lambda s, t: stop.advance(s, t[None]), stop.start(1), jnp.asarray(tokens, jnp.int32)
    )
    assert got[:, 0].tolist() == want


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_empty_strings_are_errors(strings: list[str]) -> None:
    with pytest.raises(ValueError, match="expected stop strings that are not empty, got"):
        stop_strings(strings, VOCABULARY)
