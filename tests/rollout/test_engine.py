"""The engine against `generate`: the same rows whatever they are beside, full slots, reuse."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from purepost.models import Decoder
from purepost.models.slots import empty_slots
from purepost.rollout import rounds
from purepost.rollout.draw import Sampling
from purepost.rollout.engine import Engine, Limits, sampler
from purepost.rollout.prefixes import Prefixes
from purepost.rollout.requests import (
    CANCELLED,
    Request,
    Result,
    as_completions,
    key_data,
    requests_for,
)
from purepost.rollout.sample import LENGTH, STOP, Completions, Prompts, generate, pad_prompts
from purepost.rollout.score import score
from purepost.rollout.stop import stop_strings
from purepost.types import causal_rows

VOCABULARY = [bytes([97 + i % 4]) for i in range(15)] + [b"ab", b"ba", b"", b"dd"]
STOP_STRINGS = stop_strings(["ab", "cda"], VOCABULARY)
LIMITS = Limits(slots=4, room=128, steps=5, chunk=16, chunks=2)
KEY = jr.key(5)
TIE = 1e-3  # nats


@pytest.fixture(scope="module")
def long_model(model: Decoder) -> Decoder:
    """The model with room for prompts that are longer than a piece, and than the smallest room."""
    return dataclasses.replace(model, config=dataclasses.replace(model.config, max_positions=256))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Of 1 to 70 tokens."""
    rng = np.random.default_rng(1)
    lengths = [1, 70, 2, 17, 16, 33, 5]
    return pad_prompts(
        [rng.integers(0, 19, n).tolist() for n in lengths], ids=[4, 0, 9, 2, 3, 7, 1]
    )


def unlike(got: Completions, want: Completions) -> int:
    """How many rows differ, but for those whose first difference is between tokens that tie."""
    count = 0
    for place in np.ndindex(got.lengths.shape):
        a, b = got.tokens[place], want.tokens[place]
        if (a != b).any():
            first = int(np.argmax(np.asarray(a != b)))
            count += abs(float(got.logps[place][first] - want.logps[place][first])) > TIE
        else:
            assert got.lengths[place] == want.lengths[place]
            assert got.finish[place] == want.finish[place]
            np.testing.assert_allclose(got.logps[place], want.logps[place], rtol=0, atol=2e-5)
    return count


def shuffled(requests: Sequence[Request], seed: int) -> list[Request]:
    order = np.random.default_rng(seed).permutation(len(requests))
    return [requests[i] for i in order]


def answers(engine: Engine, requests: Sequence[Request], seed: int) -> Completions:
    """The results in order of the requests, submitted in another."""
    done = {r.id: r for r in engine.run(shuffled(requests, seed))}
    results = [done[r.id] for r in requests]
    most = max(r.sampling.max_tokens for r in requests)
    return as_completions(results, group=3, max_tokens=most)


@pytest.mark.parametrize("guesses", [0, 3])
def test_rows_are_those_of_generate(long_model: Decoder, prompts: Prompts, guesses: int) -> None:
    """In any order, in any slots, with and without guesses."""
    sampling = Sampling(8, stop_ids=(2,))
    want = generate(KEY, long_model, prompts, sampling, group=3, stop=STOP_STRINGS)
    assert set(np.unique(np.asarray(want.finish))) == {LENGTH, STOP}
    requests = requests_for(KEY, prompts, sampling, group=3)
    engine = Engine(long_model, dataclasses.replace(LIMITS, guesses=guesses), stop=STOP_STRINGS)
    for seed in (0, 1):
        assert unlike(answers(engine, requests, seed), want) == 0
    assert engine.stats.reused > 0


def test_every_request_has_its_own_sampling(long_model: Decoder, prompts: Prompts) -> None:
    """Temperatures, filters, lengths, stop ids and strings, all in one batch."""
    kinds: list[tuple[Sampling, Any]] = [
        (Sampling(20, temperature=0.0), None),
        (Sampling(20, top_p=0.6, stop_ids=(1, 2, 3)), STOP_STRINGS),
        (Sampling(14, temperature=1.3, top_k=9, top_p=0.8, min_p=0.1, stop_ids=(4,)), None),
    ]
    requests = []
    for n, (sampling, stop) in enumerate(kinds):
        strings = None if stop is not None else ()
        for r in requests_for(KEY, prompts, sampling, group=3, strings=strings):
            requests.append(dataclasses.replace(r, id=(n, r.id)))
    done = {
        r.id: r for r in Engine(long_model, LIMITS, stop=STOP_STRINGS).run(shuffled(requests, 2))
    }
    for n, (sampling, stop) in enumerate(kinds):
        mine = [done[r.id] for r in requests if r.id[0] == n]  # pyright: ignore[reportIndexIssue]
        got = as_completions(mine, group=3, max_tokens=sampling.max_tokens)
        want = generate(KEY, long_model, prompts, sampling, group=3, stop=stop)
        assert unlike(got, want) == 0, sampling


def heavy_tail(count: int) -> list[int]:
    """Lengths of 2 to 64 tokens, as many tokens in each octave."""
    sizes = 2 ** np.arange(1, 7)
    shares = (1 / sizes) / (1 / sizes).sum()
    return np.random.default_rng(0).choice(sizes, count, p=shares).tolist()


def simple(id: int, prompt: Sequence[int], tokens: int, **options: Any) -> Request:
    return Request(id, prompt, key_data(jr.key(id)), Sampling(tokens), **options)


def test_slots_stay_full_where_batches_run_empty(long_model: Decoder) -> None:
    lengths = heavy_tail(600)
    requests = [simple(i, [1 + i % 18], n) for i, n in enumerate(lengths)]
    engine = Engine(long_model, Limits(slots=8, room=128, steps=4))
    results = engine.run(requests)
    assert [len(r.tokens) for r in results] == lengths
    assert engine.stats.drawn == engine.stats.busy == sum(lengths)
    batches = [lengths[i : i + 8] for i in range(0, len(lengths), 8)]
    static = sum(lengths) / sum(8 * max(batch) for batch in batches)
    assert engine.stats.occupancy(8) >= 0.85
    assert static < 0.5


def logps_of(model: Decoder, request: Request, result: Result) -> np.ndarray:
    """The log-probabilities of a result's tokens, by a pass over all."""
    tokens = jnp.asarray([*request.prompt, *result.tokens.tolist()], jnp.int32)
    padded = jnp.pad(tokens, (0, 128 - len(tokens)))[None]
    rows = causal_rows(padded, jnp.asarray([len(tokens)], jnp.int32))
    logps = eqx.filter_jit(score)(model, rows).logps
    return np.asarray(logps)[0, len(request.prompt) : len(tokens)]


def test_what_was_computed_is_not_computed_again(long_model: Decoder) -> None:
    """Branches reuse all of their prompt, a second turn the first one's prompt and completion."""
    prompts = pad_prompts([list(range(1, 19)) * 3], ids=[3])
    requests = requests_for(KEY, prompts, Sampling(7), group=4, remember=True)
    engine = Engine(long_model, LIMITS)
    first = engine.run(requests)
    assert (engine.stats.prefilled, engine.stats.reused) == (53, 3 * 53)
    prompt = [*requests[2].prompt, *first[2].tokens.tolist(), 5, 6, 7]
    turn = simple(9, prompt, 6)
    (second,) = engine.run([turn])
    assert engine.stats.reused == 3 * 53 + 60  # all that was fed: not the last token
    assert engine.stats.prefilled == 53 + 3
    np.testing.assert_allclose(second.logps, logps_of(long_model, turn, second), rtol=0, atol=2e-5)
    plain = Engine(long_model, dataclasses.replace(LIMITS, prefix_bytes=0))
    assert plain.run([turn])[0].tokens.tolist() == second.tokens.tolist()
    assert plain.stats.reused == 0


def test_rows_go_on_while_a_long_prompt_is_computed(long_model: Decoder) -> None:
    """99 tokens in pieces of 16, two before each round: the row beside it draws 5 in each."""
    engine = Engine(long_model, LIMITS)
    engine.submit(simple(0, [3], 60))
    engine.step()
    engine.submit(simple(1, [1 + i % 18 for i in range(100)], 20))
    drawn = []
    for _ in range(4):
        engine.step()
        drawn.append((engine.stats.drawn, engine.stats.prefilled))
    assert drawn == [(10, 32), (15, 64), (20, 96), (30, 99)]


def test_a_cancelled_request_leaves_the_others_alone(long_model: Decoder) -> None:
    """One that waits, one whose prompt is being computed, one that is decoded: which can be gone
    on with later, by the same random numbers.
    """
    engine = Engine(long_model, dataclasses.replace(LIMITS, slots=2))
    requests = [
        simple(0, [3], 30),
        simple(1, [1 + i % 18 for i in range(90)], 30),
        simple(2, [4], 9),
    ]
    for r in requests:
        engine.submit(r)
    engine.step()
    engine.submit(simple(3, [5], 8))
    waiting, filling = engine.cancel(2), engine.cancel(1)
    assert [len(r.tokens) for r in (waiting, filling)] == [0, 0]
    assert {r.finish for r in (waiting, filling)} == {CANCELLED}
    with pytest.raises(ValueError, match="a request that has not ended, got 2"):
        engine.cancel(2)
    done = engine.step()
    partial = engine.cancel(0)
    while engine.pending:
        done += engine.step()
    alone = Engine(long_model, LIMITS).run([requests[0], simple(3, [5], 8)])
    assert partial.finish == CANCELLED and len(partial.tokens) == 10
    np.testing.assert_array_equal(partial.tokens, alone[0].tokens[:10])
    prompt = [3, *partial.tokens.tolist()]
    later = dataclasses.replace(requests[0], prompt=prompt, sampling=Sampling(20), first=10)
    np.testing.assert_array_equal(engine.run([later])[0].tokens, alone[0].tokens[10:])
    assert [r.id for r in done] == [3]
    np.testing.assert_array_equal(done[0].tokens, alone[1].tokens)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_between_rounds(long_model: Decoder, recompute: bool) -> None:
    """Every token says which weights drew it. Recomputed rows have the new ones' log-probabilities;
    others those of a cache that is partly old, which are neither's. Prompts are computed anew.
    """
    other = jax.tree.map(lambda x: x * 1.1, long_model)
    request = simple(0, list(range(1, 19)), 25)
    engine = Engine(long_model, LIMITS)
    engine.submit(request)
    engine.step()
    engine.update(other, recompute=recompute)
    later = dataclasses.replace(request, id=1)
    engine.submit(later)
    done = {}
    while engine.pending:
        done |= {r.id: r for r in engine.step()}
    assert done[0].versions.tolist() == [0] * 5 + [1] * 20
    assert done[1].versions.tolist() == [1] * 25
    old, new = (logps_of(m, request, done[0]) for m in (long_model, other))
    np.testing.assert_allclose(done[0].logps[:5], old[:5], rtol=0, atol=2e-5)
    after = [np.abs(done[0].logps[5:] - x[5:]).max() for x in (old, new)]
    assert after[0] > 1e-3
    assert after[1] < 2e-5 if recompute else after[1] > 1e-3
    np.testing.assert_allclose(done[1].logps, logps_of(other, later, done[1]), rtol=0, atol=2e-5)


def test_the_engine_in_the_place_of_generate(long_model: Decoder, prompts: Prompts) -> None:
    """It follows the model that it is given."""
    sampling = Sampling(6, stop_ids=(2,))
    engine = Engine(long_model, LIMITS)
    sample = sampler(engine, sampling, group=2)
    for model in (long_model, jax.tree.map(lambda x: x * 1.1, long_model)):
        for _ in range(2):
            got = sample(KEY, model, prompts)
            assert unlike(got, generate(KEY, model, prompts, sampling, group=2)) == 0
    assert engine.version == 1


def test_few_programs_serve_every_length(
    long_model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round, and three sizes of pieces of a prompt, for each room of 64, 128 and 256 tokens: all
    traced once, however long prompts and completions are.
    """
    traced, whole = [], rounds.extend

    def counting(model: Any, blocks: Any, slots: Any, tokens: Any, start: Any) -> Any:
        traced.append((slots.room, tokens.shape))
        return whole(model, blocks, slots, tokens, start)

    jax.clear_caches()
    monkeypatch.setattr(rounds, "extend", counting)
    engine = Engine(long_model, Limits(slots=3, room=256, steps=4, chunk=32))
    rng = np.random.default_rng(2)
    sizes = [(int(rng.integers(1, 200)), int(rng.integers(1, 50))) for _ in range(20)]
    engine.run([simple(i, [1 + i % 7] * n, t) for i, (n, t) in enumerate(sizes)])
    assert len(traced) == len(set(traced)) == len(engine.stats.programs) <= 12


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (simple(0, [1], 3), "an id that is not in use, got it twice, in request 0"),
        (simple(1, [], 3), "a prompt of at least 1 token, got none"),
        (simple(1, [1] * 99, 30), "≤ 128, the engine's room, got 99 \\+ 30; shorten"),
        (
            Request(1, [1], key_data(KEY), Sampling(3, stop_ids=tuple(range(9)))),
            "at most 8 stop ids, got 9; raise the limit",
        ),
        (simple(1, [1], 3, strings=[0]), "numbers of the engine's 0 stop strings, got \\[0\\]"),
    ],
)
def test_requests_that_do_not_fit_are_errors(
    long_model: Decoder, request_: Request, message: str
) -> None:
    engine = Engine(long_model, LIMITS)
    engine.submit(simple(0, [1], 3))
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)
    with pytest.raises(ValueError, match="an idle engine, got one with 1 requests"):
        engine.run([])


def test_limits_out_of_range_are_errors(long_model: Decoder) -> None:
    with pytest.raises(ValueError, match="expected slots ≥ 1, got 0"):
        Limits(slots=0)
    with pytest.raises(ValueError, match="expected guesses ≥ 0, got -1"):
        Limits(guesses=-1)
    with pytest.raises(ValueError, match="at most 256 tokens, the model's positions, got 512"):
        Engine(long_model, Limits(room=512))


def test_prefixes_are_forgotten_least_recently_used_first(model: Decoder) -> None:

    part = empty_slots(model.config, 1, 8, jnp.float32)
    size = sum(x.nbytes for x in jax.tree.leaves(part))
    prefixes = Prefixes(2 * size)
    prefixes.add([1, 2, 3], part)
    prefixes.add([1, 2, 3, 4], part)  # serves for the shorter one
    assert (len(prefixes), prefixes.held) == (1, size)
    prefixes.add([1, 2], part)  # is served by the longer one
    assert len(prefixes) == 1
    prefixes.add([5, 6], part)
    assert prefixes.longest([1, 2, 9])[0] == 2
    prefixes.add([7], part)
    assert prefixes.longest([5, 6, 7]) == (0, None)
    assert [prefixes.longest(x)[0] for x in ([1, 2, 3, 4, 5], [7, 8], [])] == [4, 1, 0]
    prefixes.clear()
    assert (len(prefixes), prefixes.held) == (0, 0)
    with pytest.raises(ValueError, match="at least 0 bytes, got -1"):
        Prefixes(-1)


def test_int8_slots_draw_much_the_same(long_model: Decoder, prompts: Prompts) -> None:
    sampling = Sampling(24, temperature=0.0)
    want = generate(KEY, long_model, prompts, sampling, group=3)
    limits = dataclasses.replace(LIMITS, cache_dtype=jnp.int8)
    got = answers(Engine(long_model, limits), requests_for(KEY, prompts, sampling, group=3), 0)
    np.testing.assert_allclose(got.logps[..., 0], want.logps[..., 0], rtol=0, atol=0.1)
    assert not np.array_equal(got.logps, want.logps)
