"""The dialogues that experiments/agent_tool.py warms up on, and its table."""

import jax
import jax.random as jr
import numpy as np

from experiments.agent_tool import FIRST, Config, draw_dialogues, table
from purepost.environments.calculator import LETTERS
from purepost.types import check_rows


def test_dialogues_call_the_calculator_every_other_time() -> None:
    config = Config(dialogues=6)
    rows = jax.jit(lambda key: draw_dialogues(key, config))(jr.key(0))
    check_rows(rows)
    for i in range(6):
        n = int((np.asarray(rows.end[i]) > np.arange(rows.end.shape[1]) + 1).sum()) + 1
        text = "".join(LETTERS[t - FIRST] for t in rows.tokens[i, :n].tolist())
        said = "".join(c for c, m in zip(text, rows.mask[i, :n].tolist(), strict=True) if m)
        problem, _, rest = text.partition(";")
        answer = str(eval(problem, {}))
        if i % 2:
            assert rest == f"?{problem};{answer};={answer};"
            assert said == f"?{problem};={answer};"
        else:
            assert rest == said == f"={answer};"


def test_the_table_has_a_row_for_each_seed_and_their_mean() -> None:
    columns = (np.array([0.25, 0.75]), np.array([0.0, 1.0]))
    lines = table({"before": columns, "after": columns}).splitlines()
    assert len(lines) == 2 + 2 + 1
    assert lines[2] == "| 0 | 0.250 | 0.250 | 0.000 | 0.000 |"
    assert lines[-1].startswith("| mean, 95% | 0.500 ± ")
