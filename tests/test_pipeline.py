"""SFT → RL → distillation in one script: shrunk, and whole (slow)."""

from dataclasses import replace

import pytest

from experiments import pipeline

NAMES = ["SFT", "SFT → RL", "SFT → RL → distilled", "as small, by SFT alone"]


def test_every_stage_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of each; a line of the table for each model."""
    config = pipeline.Config()
    tiny = replace(config.small, num_layers=1, hidden_size=12, intermediate_size=16)
    large = replace(config.small, num_layers=1)
    lines = pipeline.main(replace(config, steps=2, held_out=8, large=large, small=tiny))
    assert [line.name for line in lines] == NAMES
    assert lines[0].parameters == lines[1].parameters > lines[2].parameters
    assert all(0 <= line.right <= 1 for line in lines)
    printed = capsys.readouterr().out.splitlines()
    assert [line[:24].strip() for line in printed[1:]] == NAMES


@pytest.mark.slow
def test_each_stage_is_worth_its_while() -> None:
    """RL gets beyond demonstrations of which half are wrong, and a model of a sixth of the size
    takes it over.
    """
    imitated, reinforced, distilled, alone = (
        line.right for line in pipeline.main(pipeline.Config())
    )
    assert imitated < 0.7 and alone < 0.7
    assert reinforced > 0.9
    assert distilled > 0.8
