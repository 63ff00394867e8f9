"""TRL's losses of pairs, of judged completions, of rows and of a teacher."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from cases import GOOD, MARGINS, ROWS, fold, inputs, logps_of, sums
from transformers.trainer_pt_utils import LabelSmoother  # pyright: ignore[reportMissingImports]
from trl import (  # pyright: ignore[reportMissingImports]
    DPOTrainer,
    KTOTrainer,
    RewardTrainer,
    SFTTrainer,
)
from trl.experimental.cpo import CPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.gkd import GKDTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.orpo import ORPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.distillation_trainer import (  # pyright: ignore[reportMissingImports]
    _chunked_divergence_loss,
)
from trl_bare import Given, Result, bare, differentiated

X = inputs()
ORDER = np.concatenate([np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)])  # chosen, then rejected
LABELS = torch.tensor(np.where(X.mask, X.tokens, -100)).long()


def tensor(x: Any) -> Any:
    """As torch has it; integers long."""
    found = torch.tensor(x)
    return found.long() if found.dtype in (torch.int32, torch.bool) else found


def dpo(loss: str = "sigmoid", **settings: Any) -> Result:
    """DPO's loss, the reference's log-probabilities given by a reference model."""
    model, reference = Given(X.logits[ORDER]), Given(X.ref[ORDER])
    chosen = {
        "loss_types": [loss],
        "loss_weights": [1.0],
        "beta": 0.3,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
        "precompute_ref_logps": False,
    } | settings
    made = bare(DPOTrainer, model, {"discopop_tau": 0.05}, ref_model=reference, **chosen)
    batch = {
        "input_ids": tensor(X.tokens[ORDER]),
        "attention_mask": tensor(X.tokens[ORDER] > 0),
        "completion_mask": tensor(X.mask[ORDER]),
    }
    return differentiated(made._compute_loss(model, batch, False), model, ORDER)


def kto() -> Result:
    """KTO's loss; z is of rows with the next row's completion."""
    model = Given(X.logits, other=(X.kl_tokens, X.kl_logits))
    made = bare(
        KTOTrainer,
        model,
        {},
        calculate_KL=True,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.0,
        undesirable_weight=0.5,
    )
    kl_ref = np.where(X.kl_mask, logps_of(X.kl_ref, X.kl_tokens), 0.0).sum(1)
    batch = {
        "input_ids": tensor(X.tokens),
        "attention_mask": tensor(X.tokens > 0),
        "completion_mask": tensor(X.mask),
        "KL_input_ids": tensor(X.kl_tokens),
        "KL_attention_mask": tensor(X.kl_tokens > 0),
        "KL_completion_mask": tensor(X.kl_mask),
        "label": torch.tensor(GOOD),
        "ref_logps": tensor(sums(X.ref, X)),
        "ref_KL_logps": tensor(kl_ref),
    }
    return differentiated(made._compute_loss(model, batch, False), model)


def unreferenced(trainer: Any, **settings: Any) -> Result:
    """The losses of CPO's and ORPO's trainers."""
    model = Given(X.logits[ORDER])
    made = bare(trainer, model, {}, pad_token_id=0, padding_value=0, **settings)
    batch = {}
    for side, rows in (("chosen", ORDER[: ROWS // 2]), ("rejected", ORDER[ROWS // 2 :])):
        batch[f"{side}_input_ids"] = tensor(X.tokens[rows])
        batch[f"{side}_attention_mask"] = tensor(X.tokens[rows] > 0)
        batch[f"{side}_labels"] = LABELS[rows]
    loss, _ = made.get_batch_loss_metrics(model, batch)
    return differentiated(loss, model, ORDER)


def cpo(loss: str, **settings: Any) -> Result:
    """CPO's and SimPO's loss."""
    chosen = {"beta": 0.3, "label_smoothing": 0.0, "cpo_alpha": 0.0, "simpo_gamma": 0.12}
    chosen |= {"alpha": 0.0} | settings
    return unreferenced(CPOTrainer, loss_type=loss, **chosen)


def reward_model(**inputs: Any) -> Result:
    """Bradley and Terry's loss; its gradient is by the scores."""
    scores = torch.nn.Parameter(tensor(X.scores[ORDER])[:, None])
    made = bare(RewardTrainer, SimpleNamespace(training=False), {"center_rewards_coefficient": 0.1})
    loss = made.compute_loss(lambda **_: SimpleNamespace(logits=scores), inputs)
    loss.backward()
    assert scores.grad is not None
    gradient = np.zeros(ROWS, np.float32)
    gradient[ORDER] = scores.grad[:, 0].numpy()
    return loss.item(), gradient


def sft(loss: str, *, smoothing: float = 0.0) -> Result:
    """The loss of rows, completions only."""
    model = Given(X.logits)
    smoother = LabelSmoother(epsilon=smoothing) if smoothing else None
    args = {"loss_type": loss, "average_tokens_across_devices": False}
    made = bare(SFTTrainer, model, args, label_smoother=smoother)
    batch = {
        "input_ids": tensor(X.tokens),
        "labels": LABELS,
        "attention_mask": tensor(X.tokens > 0),
    }
    return differentiated(made.compute_loss(model, batch), model)


def gkd(beta: float, temperature: float = 1.0) -> Result:
    """The generalised Jensen–Shannon divergence, of GKD's trainer."""
    student = torch.nn.Parameter(tensor(X.logits))
    loss = GKDTrainer.generalized_jsd_loss(
        student[:, :-1], tensor(X.teacher)[:, :-1], LABELS[:, 1:], beta, temperature
    )
    loss.backward()
    assert student.grad is not None
    return loss.item(), fold(student.grad.numpy())


def distillation(beta: float) -> Result:
    """The same, of the distillation trainer."""
    student, head = torch.nn.Parameter(tensor(X.logits)), torch.eye(X.logits.shape[-1])
    mask = tensor(X.mask)[:, 1:]
    loss, _, _ = _chunked_divergence_loss(
        student[:, :-1], tensor(X.teacher)[:, :-1], head, head, mask, beta
    )
    loss.backward()
    assert student.grad is not None
    return loss.item(), fold(student.grad.numpy())


def dpo_cases() -> dict[str, Callable[[], Result]]:
    """Every loss of DPO's trainer that purepost has."""
    plain = "hinge ipo nca_pair bco_pair sppo_hard aot apo_zero apo_down discopop sigmoid_norm"
    cases: dict[str, Callable[[], Result]] = {
        f"dpo, {name}": lambda name=name: dpo(name) for name in plain.split()
    }
    for divergence in ("forward_kl", "js_divergence", "alpha_divergence"):
        cases[f"dpo, {divergence}"] = lambda d=divergence: dpo(f_divergence_type=d)
    return cases | {
        "dpo": lambda: dpo(),
        "dpo, robust": lambda: dpo("robust", label_smoothing=0.1),
        "dpo, exo_pair": lambda: dpo("exo_pair", label_smoothing=0.1),
        "dpo, LD": lambda: dpo(ld_alpha=0.5),
        "dpo, WPO": lambda: dpo(use_weighting=True),
        "dpo, RPO": lambda: dpo(loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    }


PAIRED: dict[str, Callable[[], Result]] = dpo_cases() | {
    "kto": kto,
    "cpo": lambda: cpo("sigmoid", cpo_alpha=0.5),
    "cpo, hinge": lambda: cpo("hinge"),
    "simpo": lambda: cpo("simpo"),
    "orpo": lambda: unreferenced(ORPOTrainer, beta=0.3),
    "reward_model": lambda: reward_model(margin=tensor(MARGINS)),
    "sft": lambda: sft("nll"),
    "sft, label smoothing": lambda: sft("nll", smoothing=0.1),
    "dft": lambda: sft("dft"),
    "gkd": lambda: gkd(0.3),
    "gkd, forward KL": lambda: gkd(0.0),
    "gkd, reverse KL": lambda: gkd(1.0),
    "distillation, temperature 2": lambda: gkd(0.5, 2.0),
    "distillation, JSD": lambda: distillation(0.3),
    "distillation, forward KL": lambda: distillation(0.0),
}
