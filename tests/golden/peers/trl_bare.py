"""A TRL trainer without its constructor, and a model that has its logits at hand."""

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from cases import COLUMNS, ROWS, VOCAB, fold
from transformers.modeling_outputs import CausalLMOutput  # pyright: ignore[reportMissingImports]
from trl.trainer.utils import add_fused_lm_head  # pyright: ignore[reportMissingImports]

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
Result = tuple[Any, Any]


class Given(torch.nn.Module):
    """A language model whose hidden states are its logits, and its head the identity; `other`
    (tokens, logits) is for rows that are these tokens.
    """

    is_gradient_checkpointing = False

    def __init__(self, logits: Any, *, temperature: float = 1.0, other: Any = None) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor(logits))
        self.lm_head = torch.nn.Linear(VOCAB, VOCAB, bias=False)
        self.lm_head.weight = torch.nn.Parameter(torch.eye(VOCAB), requires_grad=False)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace())
        self.other = other
        add_fused_lm_head(self, temperature=temperature, outputs=FIELDS)

    def base_model(self, input_ids: Any = None, **kwargs: Any) -> Any:
        """Hidden states."""
        if self.other is not None and torch.equal(input_ids, torch.tensor(self.other[0])):
            return SimpleNamespace(last_hidden_state=torch.tensor(self.other[1]))
        return SimpleNamespace(last_hidden_state=self.logits)

    def get_output_embeddings(self) -> Any:
        """The identity."""
        return self.lm_head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Logits."""
        return CausalLMOutput(logits=self.logits)


ONE_PROCESS = SimpleNamespace(
    device=torch.device("cpu"),
    num_processes=1,
    process_index=0,
    is_main_process=True,
    sync_gradients=True,
    parallelism_config=None,
    autocast=nullcontext,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    unwrap_model=lambda model: model,
)


def bare(trainer: Any, model: Any, args: dict[str, Any], **settings: Any) -> Any:
    """A trainer that was not constructed."""
    made = trainer.__new__(trainer)
    common = {
        "accelerator": ONE_PROCESS,
        "model": model,
        "args": SimpleNamespace(report_to=[], gradient_checkpointing_kwargs=None, **args),
        "state": SimpleNamespace(global_step=0),
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_total_train_tokens": 0,
        "_tp_size": 1,
        "label_smoother": None,
        "compute_loss_func": None,
    }
    vars(made).update(common | settings)
    return made


def differentiated(loss: Any, model: Given, rows: Any = None) -> Result:
    """(value, gradient of the logits)"""
    loss.backward()
    assert model.logits.grad is not None
    gradient = np.zeros((ROWS, COLUMNS, VOCAB), np.float32)
    gradient[np.arange(ROWS) if rows is None else rows] = model.logits.grad.numpy()
    return loss.item(), fold(gradient)
