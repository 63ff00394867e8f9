"""The encyclopaedia says what its questions ask, the search finds it, and only that is rewarded."""

import json
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purepost.data import prompt_tasks
from purepost.environments.host import Pool
from purepost.environments.retrieval import (
    RELATIONS,
    Index,
    encyclopaedia,
    exact_match,
    questions,
    retrieval,
    search_tools,
    words,
)
from purepost.environments.workers import Reply
from purepost.tools.messages import Call
from tests.environments.test_dialogues import PLAIN, make_tokenizer


def test_articles_say_their_facts() -> None:
    articles = encyclopaedia()
    assert 100 <= len(articles) <= 150
    assert len({a.title for a in articles}) == len({a.text for a in articles}) == len(articles)
    for article in articles:
        assert article.title.lower() in article.text.lower()
        for relation, value in article.facts.items():
            assert relation in RELATIONS
            assert value.lower() in article.text.lower(), (article.title, relation)
            assert value != article.title


def scores_of(texts: list[str], query: str, k1: float = 1.2, b: float = 0.75) -> np.ndarray:
    """BM25 as it is written, over a dense table of counts."""
    vocabulary = sorted({w for text in [*texts, query] for w in words(text)})
    table = np.array([[words(t).count(w) for w in vocabulary] for t in texts], np.float64)
    lengths, having = table.sum(1, keepdims=True), (table > 0).sum(0)
    rarity = np.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
    share = table / (table + k1 * (1 - b + b * lengths / lengths.mean()))
    asked = np.array([w in words(query) for w in vocabulary])
    return (share * rarity * asked).sum(1)


texts_of_letters = st.lists(
    st.lists(st.sampled_from("abcde"), min_size=1, max_size=8).map(" ".join), min_size=1, max_size=6
)


@given(texts_of_letters, st.lists(st.sampled_from("abcdez"), max_size=4).map(" ".join))
def test_ranks_are_those_of_bm25(texts: list[str], query: str) -> None:
    index, expected = Index(texts), scores_of(texts, query)
    found = index.search(query, len(texts))
    assert sorted(found) == np.flatnonzero(expected).tolist()
    got = [sum(index.weights.get(w, {}).get(i, 0) for w in set(words(query))) for i in found]
    np.testing.assert_allclose(got, expected[found], rtol=1e-12)
    assert got == sorted(got, reverse=True)
    assert index.search(query, 1) == found[:1]


def test_a_worked_score() -> None:
    # Two texts of 2 and 4 words: "a" is in one of them, once. ln(1 + 1.5/1.5) = ln 2, and
    # 1 / (1 + 1.2 · (1/4 + 3/4 · 2/3)) = 1/1.9.
    index = Index(["a b", "b b c d"])
    assert index.weights["a"] == {0: pytest.approx(np.log(2) / 1.9, rel=1e-12)}
    assert index.search("A, a!", 5) == [0]
    assert index.search("", 5) == index.search("nowhere", 5) == []


def test_every_question_is_answered_by_what_is_found() -> None:
    articles = encyclopaedia()
    place = {a.title: i for i, a in enumerate(articles)}
    index = Index([f"{a.title} {a.text}" for a in articles])
    asked = list(questions(seed=0))
    assert len({row["prompt"] for row in asked}) == len(asked) > 500
    for row in asked:
        for title in row["titles"]:  # the question names the first, and that one's article the next
            assert place[title] in index.search(title, 3), row
        first, *_, last = (articles[place[title]] for title in [*row["titles"]] * 2)
        assert first.title.lower() in row["prompt"].lower()
        assert last.title.lower() in first.text.lower()
        assert row["answer"].lower() in last.text.lower()


def test_the_seed_decides_the_order_alone() -> None:
    first, again, other = (list(questions(seed=s)) for s in (3, 3, 4))
    assert first == again != other
    by_prompt = partial(sorted, key=lambda row: row["prompt"])
    assert by_prompt(first) == by_prompt(other)
    short, long = list(questions(seed=3, hops=(1,))), list(questions(seed=3, hops=(2,)))
    assert by_prompt(short + long) == by_prompt(first)
    assert {len(row["titles"]) for row in short} == {1}
    assert {len(row["titles"]) for row in long} == {2}
    for wrong in ((), (0,), (1, 3)):
        with pytest.raises(ValueError, match="expected questions of 1 or 2 look-ups"):
            questions(seed=0, hops=wrong)


def test_questions_are_tasks() -> None:
    batches = prompt_tasks(questions(seed=0), make_tokenizer(PLAIN), width=64, prompts=3, seed=0)
    columns = batches(0).columns
    assert set(columns) == {"prompt", "answer", "titles"}
    rows = {row["prompt"]: row for row in questions(seed=1)}
    for prompt, answer, titles in zip(*columns.values(), strict=True):
        assert rows[prompt] == {"prompt": prompt, "answer": answer, "titles": titles}


def call(query: str) -> str:
    written = json.dumps({"name": "search", "arguments": {"query": query}})
    return f"<tool_call>{written}</tool_call>"


@pytest.mark.parametrize("processes", [False, True])
def test_an_episode_of_two_look_ups(processes: bool) -> None:
    pool = Pool(retrieval, processes=processes)
    row = {
        "prompt": "In which town was the author of The Salt Almanac born?",
        "answer": "Tarn Cross",
    }
    seat = pool.seat()
    said = [call("The Salt Almanac"), call("Linnet Ashby"), "<think>There.</think> tarn cross."]
    replies = [seat.call("reset", row, 0).result()]
    replies += [seat.call("step", text).result() for text in said]
    good = [reply for reply in replies if isinstance(reply, Reply)]
    assert len(good) == 4
    question, almanac, ashby, end = good
    assert question.messages == ({"role": "user", "content": row["prompt"]},)
    assert almanac.messages[0]["role"] == "tool"
    assert re.search(r"by Linnet Ashby|author was Linnet Ashby", almanac.messages[0]["content"])
    assert "born in Tarn Cross" in ashby.messages[0]["content"]
    assert [(r.reward, r.done) for r in good[1:]] == [(0, False), (0, False), (1, True)]
    assert end.messages == ()
    seat.close()
    pool.close()


def test_the_tool() -> None:
    box = search_tools(results=2)
    (schema,) = box.schemas
    assert schema["function"]["name"] == "search"
    assert list(schema["function"]["parameters"]["properties"]) == ["query"]
    two, none, wrong = box.call(
        [Call("search", {"query": "lighthouse"}), Call("search", {"query": "zzz"}), Call("look")]
    )
    assert two.startswith("Rook Lighthouse: ") and two.count("\n\n") <= 1
    assert none == "nothing found" and wrong.startswith("error: no tool 'look'")
    with pytest.raises(ValueError, match="at least one result"):
        search_tools(results=0)
    with pytest.raises(ValueError, match="expected texts"):
        Index([])


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("The Grey Heron", 1),
        ("grey  heron.", 1),
        ("A grey heron!", 1),
        ("The grey heron, I think", 0),
        ("heron", 0),
        ("", 0),
    ],
)
def test_answers_match_but_for_case_articles_and_punctuation(said: str, reward: float) -> None:
    assert exact_match({"answer": "The Grey Heron"}, said) == reward
