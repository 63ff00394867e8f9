"""reasoning-gym's tasks, all of them by name: as many questions as wanted, judged by the library.

Some of its scorers evaluate what the model wrote, as Python: they would run any code, or compute
9**9**9**9. Those get to see only answers that do nothing but denote a value (`GUARDS`); others are
worth 0. Integrals are compared by sympy, which may take minutes over an odd one: give
`combine_rewards` a time-out. The scores are the library's, whatever they are (game_of_life_halting
takes any answer for a right one), and so are the questions: codeio's are made by running programs
that come with it.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from ..data.records import Records, read
from ..rewards.host import HostReward, RewardFn

Extract = Callable[[str], str]  # completion → the answer in it


def reasoning_names() -> list[str]:
    """The names of all tasks; "composite" is no task but a mixture of others."""
    return sorted(set(_library().factory.DATASETS) - {"composite"})


def tagged_answer(completion: str) -> str:
    """What stands between the last <answer> and </answer>, or all of it where there is none."""
    found = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    return (found[-1] if found else completion).strip()


def reasoning_tasks(
    name: str, *, size: int, seed: int, extract: Extract = tagged_answer, **options: Any
) -> tuple[Records, RewardFn]:
    """`size` questions of a task, and a reward function: the library's score of answers, in [0, 1].

    Columns: prompt, answer (one that is right, or None), task (the name) and index. `options` are
    the task's own, such as `min_terms`. A reward function has nothing to say of other tasks' rows,
    so those of several can be combined over their records together. Raises: ValueError for an
    unknown name, or options that the task does not take.
    """
    if size < 1:
        raise ValueError(f"expected at least one question, got size {size}")
    if name not in reasoning_names():
        raise ValueError(f"expected a task of reasoning-gym, got {name!r}; see reasoning_names()")
    try:
        dataset = _library().create_dataset(name, size=size, seed=seed, **options)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"expected options that {name} takes, got {options}: {error}") from error
    items = [dataset[i] for i in range(size)]
    harmless = GUARDS.get(name, lambda answer: True)

    def score(completion: str, index: int) -> float:
        answer = extract(completion)
        if not harmless(answer):
            return 0.0
        try:
            return float(dataset.score_answer(answer, items[index]))
        except Exception:  # some scorers stumble over what is no answer
            return 0.0

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[str],
        task: Sequence[str],
        index: Sequence[int],
    ) -> list[float | None]:
        rows = zip(completions, task, index, strict=True)
        return [score(text, i) if of == name else None for text, of, i in rows]

    reward.__name__ = name
    rows = [
        {"prompt": item["question"], "answer": item["answer"], "task": name, "index": i}
        for i, item in enumerate(items)
    ]
    return read(rows), reward


class Question:
    """A game of one turn: a prompt, and what reward functions give for what is said."""

    def __init__(self, rewards: HostReward) -> None:
        self.rewards = rewards
        self.task: dict[str, Any] = {}

    def reset(self, task: dict[str, Any], seed: int) -> Any:
        """The task's column "prompt", a text or messages."""
        self.task = task
        return task["prompt"]

    def step(self, action: str) -> tuple[str, float, bool]:
        """The end."""
        columns = {name: [value] for name, value in self.task.items() if name != "prompt"}
        scores = self.rewards([self.task["prompt"]], [action], columns)
        return "", float(scores.rewards[0]), True


def denotes_literal(text: str) -> bool:
    """Whether evaluating a text as Python can give nothing but numbers, strings and lists of them.

    Without brackets, what is no expression does nothing; a word in capitals is no variable's name.
    """
    tree = _expression(text)
    if tree is None:
        return re.search(r"[\[({]", text) is None
    if isinstance(tree, ast.Name):
        return tree.id.isupper()
    plain = (ast.Constant, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub)
    return all(isinstance(node, plain) for node in ast.walk(tree))


FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh exp log ln sqrt Abs".split()
)


def denotes_formula(text: str) -> bool:
    """Whether a text is a formula, not too long: numbers, names, `FUNCTIONS`, + − · / and powers.

    Numbers in exponents are below 100, and no power of a power is raised once more.
    """
    tree = _expression(text)
    if tree is None or len(text) > 500 or not re.fullmatch(r"[\w\s.,+\-*/()]*", text):
        return False
    plain = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            allowed = isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS
        else:
            allowed = isinstance(node, plain) and _is_small(node)
        if not allowed:
            return False
    return True


def denotes_arithmetic(text: str) -> bool:
    """Whether a text is a formula of numbers alone."""
    return denotes_formula(text) and not any(c.isalpha() for c in text)


def _is_small(node: ast.AST) -> bool:
    """Of a power: whether it is not one of a power of a power, and its exponent is plain."""
    if not _is_power(node):
        return True
    inner = [x for x in ast.walk(node.left) if _is_power(x)]
    if any(_is_power(x) for power in inner for x in ast.walk(power) if x is not power):
        return False
    for x in ast.walk(node.right):
        number = x.value if isinstance(x, ast.Constant) else 0
        if isinstance(x, _GROWS) or not (isinstance(number, int | float) and abs(number) < 100):
            return False
    return True


_GROWS = (ast.Mult, ast.Pow, ast.Call)


def _is_power(node: ast.AST) -> TypeGuard[ast.BinOp]:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)


def _expression(text: str) -> ast.expr | None:
    """The expression that a text is, or None."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


# The tasks whose scorers evaluate answers → what they may be.
GUARDS: Mapping[str, Callable[[str], bool]] = {
    "binary_matrix": denotes_literal,
    "n_queens": denotes_literal,
    "spiral_matrix": denotes_literal,
    "string_insertion": denotes_literal,
    "countdown": denotes_arithmetic,
    "intermediate_integration": denotes_formula,
    "polynomial_multiplication": denotes_formula,
    "puzzle24": denotes_arithmetic,
    "simple_integration": denotes_formula,
}


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "these tasks need reasoning-gym: pip install 'purepost[reasoning]'"
        ) from error
    return reasoning_gym
