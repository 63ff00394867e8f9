"""reasoning-gym's tasks: each scores its own answers, and no answer runs as a program."""

import inspect
import json
import time
from typing import Any

import pytest
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from purepost.data import concatenate
from purepost.environments.host import Failure, Pool
from purepost.environments.reasoning import (
    GUARDS,
    Question,
    denotes_arithmetic,
    denotes_formula,
    denotes_literal,
    reasoning_names,
    reasoning_tasks,
    tagged_answer,
)
from purepost.environments.workers import Reply
from purepost.rewards import combine_rewards

NAMES = reasoning_names()


def columns(records: Any) -> dict[str, list[Any]]:
    return {name: [row[name] for row in records] for name in records[0]}


def rewards_of(records: Any, reward: Any, completions: list[str]) -> list[float]:
    given = columns(records)
    scores = combine_rewards([reward])(given.pop("prompt"), completions, given)
    return scores.rewards.tolist()


# The library tells no right answer of these; of some the questions' data holds one.
UNTOLD = {
    "boxnet": None,
    "graph_color": lambda data: json.dumps(data["possible_answer"]),
    "propositional_logic": lambda data: data["example_answer"],
    "rubiks_cube": lambda data: data["example_correct_answer"],
    "rush_hour": None,
}
# Its scorer takes any answer for a right one.
ALWAYS_RIGHT = {"game_of_life_halting"}


# They take seconds to make up or to load.
SLOW = {"arc_agi", "group_anagrams", "knight_swap"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in NAMES]
)
def test_a_task_scores_a_right_answer_best(name: str) -> None:
    records, reward = reasoning_tasks(name, size=1, seed=7)
    (row,) = records
    assert row["prompt"] and (row["task"], row["index"]) == (name, 0)
    assert (row["answer"] is None) == (name in UNTOLD)
    nonsense = rewards_of(records, reward, ["no idea"])[0]
    assert nonsense == 1 if name in ALWAYS_RIGHT else nonsense < 0.5
    answer = row["answer"]
    if name in UNTOLD:
        told = UNTOLD[name]
        if told is None:
            return
        answer = told(create_dataset(name, size=1, seed=7)[0]["metadata"])
    assert rewards_of(records, reward, [answer]) == [1.0]
    assert rewards_of(records, reward, [f"Well.\n<answer>\n{answer}\n</answer>"]) == [1.0]


def test_questions_are_the_seeds_alone() -> None:
    first, again, other = (list(reasoning_tasks("gcd", size=4, seed=s)[0]) for s in (1, 1, 2))
    assert first == again != other


def test_the_guarded_are_those_that_evaluate() -> None:
    def evaluates(name: str) -> bool:
        text = inspect.getsource(DATASETS[name][0].score_answer)
        return "eval(" in text.replace('eval(entry["answer"])', "") or "parse_expr(answer" in text

    assert {name for name in NAMES if evaluates(name)} == set(GUARDS)


ATTACKS = [
    "__import__('pathlib').Path({!r}).touch()",
    "  [__import__('pathlib').Path({!r}).touch()]",
    "\n__import__('pathlib').Path({!r}).touch() + 3!",
    "[*map(__import__('pathlib').Path.touch, [__import__('pathlib').Path({!r})])]",
    "f\"{{__import__('pathlib').Path({!r}).touch()}}\"",
    "exec(\"__import__('pathlib').Path({!r}).touch()\")",
    "(lambda: __import__('pathlib').Path({!r}).touch())()",
]
BOMBS = [
    "9**9**9**9",
    "\n 9**9**9**9",
    "(((9**99)**99)**99)**99",
    "9**(99*99*99*99)",
    "'a'*10**10",
    "exp(exp(exp(99)))",
]


@pytest.mark.parametrize("name", sorted(GUARDS))
def test_answers_do_not_run(name: str, tmp_path: Any) -> None:
    records, reward = reasoning_tasks(name, size=1, seed=7)
    mark = tmp_path / "ran"
    for attack in ATTACKS:
        assert rewards_of(records, reward, [attack.format(str(mark))]) == [0.0]
        assert not mark.exists()
    start = time.monotonic()
    for bomb in BOMBS:
        assert rewards_of(records, reward, [bomb])[0] < 0.5
    assert time.monotonic() - start < 5


def test_the_scorers_own_variables_are_no_answers() -> None:
    records, reward = reasoning_tasks("string_insertion", size=1, seed=7)
    assert rewards_of(records, reward, ["oracle_answer"]) == [0.0]
    as_list = str(list(records[0]["answer"]))
    assert rewards_of(records, reward, [as_list]) == [pytest.approx(0.1)]  # as the library has it


@pytest.mark.parametrize(
    ("text", "literal", "formula"),
    [
        ("3", True, True),
        ("1 2 3\n4 5 6", True, False),
        ("[[1, -2], ['a']]", True, False),
        ("ABBA", True, True),
        ("answer", False, True),
        ("(3 + 4) * 5 / 2 - 1.5", False, True),
        ("x**3/3 + 2*sin(x)**2 + C", False, True),
        ("(x**2 + 1)**(3/2)/3 - exp(-x)", False, True),
        ("x.real", False, False),
        ("open(x)", False, False),
        ("sin(x).func(x)", False, False),
        ("24 # 1 2 3", True, False),
        ("3!", True, False),
        ("2**100", False, False),
        ("x**(y**2)", False, False),
        ("_ Q _\nQ _ _", True, False),
        ("-" * 5000 + "1", None, False),
        ("(" * 300, False, False),
    ],
)
def test_what_denotes_something(text: str, literal: bool | None, formula: bool) -> None:
    assert literal is None or denotes_literal(text) == literal
    assert denotes_formula(text) == formula
    assert denotes_arithmetic(text) == (formula and not any(c.isalpha() for c in text))


def test_several_tasks_in_one_run() -> None:
    sums, sum_reward = reasoning_tasks("chain_sum", size=3, seed=0, min_terms=2, max_terms=2)
    gcds, gcd_reward = reasoning_tasks("gcd", size=2, seed=0)
    both = concatenate(sums, gcds)
    given = columns(both)
    given["answer"][1] = "nothing"
    scores = combine_rewards([sum_reward, gcd_reward])(given.pop("prompt"), given["answer"], given)
    assert scores.names == ("chain_sum", "gcd")
    assert scores.rewards.tolist() == [1, 0, 1, 1, 1]
    assert [row["prompt"].count("+") + row["prompt"].count("-") for row in sums] == [1, 1, 1]


def test_a_game() -> None:
    records, reward = reasoning_tasks("gcd", size=1, seed=0)
    rewards = combine_rewards([reward])
    pool = Pool(lambda: Question(rewards))
    seat = pool.seat()
    first = seat.call("reset", records[0], 0).result()
    assert first == Reply(({"role": "user", "content": records[0]["prompt"]},))
    assert seat.call("step", records[0]["answer"]).result() == Reply((), 1.0, True)
    seat.close()
    other = pool.seat()
    other.call("reset", records[0] | {"task": "lcm"}, 0).result()
    last = other.call("step", "7").result()
    assert isinstance(last, Failure) and "finite reward" in last.why
    pool.close()


def test_what_is_asked_for_must_exist() -> None:
    with pytest.raises(ValueError, match="expected a task of reasoning-gym, got 'sums'"):
        reasoning_tasks("sums", size=1, seed=0)
    with pytest.raises(ValueError, match="expected options that chain_sum takes"):
        reasoning_tasks("chain_sum", size=1, seed=0, terms=3)
    with pytest.raises(ValueError, match="expected options that chain_sum takes"):
        reasoning_tasks("chain_sum", size=1, seed=0, min_terms=0)
    with pytest.raises(ValueError, match="at least one question"):
        reasoning_tasks("chain_sum", size=0, seed=0)


def test_answers_in_tags() -> None:
    assert tagged_answer("<answer> 1 </answer> no, <answer>\n2\n3\n</answer> it is") == "2\n3"
    assert tagged_answer(" 4 ") == "4"
    assert tagged_answer("<answer>5") == "<answer>5"
