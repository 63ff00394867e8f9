"""TRL's policy gradients, from given completions on: advantages, the sampler's correction, loss."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from cases import EOS, LENGTHS, PROMPT, ROWS, UNSCORED, inputs, logps_of
from trl import GRPOTrainer, RLOOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.gmpo import GMPOTrainer  # pyright: ignore[reportMissingImports]
from trl_bare import Given, Result, bare, differentiated

X = inputs()
GRPO_ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": ROWS,
}
GRPO = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "num_iterations": 2,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "max_completion_length": 6,
    "current_gradient_accumulation_steps": 1,
    "mask_truncated_completions": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": None,
    "_entropy_bonus_enabled": False,
    "use_adaptive_entropy": False,
    "reward_clip_range": None,
    "normalize_advantages": False,
    "num_generations": 4,
    "temperature": 1.0,
}


def collected(made: Any, rewards: Any, temperature: float) -> Any:
    """The trainer with generation and rewards that are given."""
    prompts = X.tokens[:, :PROMPT].tolist()
    ids = [X.tokens[i, PROMPT : PROMPT + n].tolist() for i, n in enumerate(LENGTHS)]
    sampled = logps_of(X.sampler, X.tokens, temperature)
    logps = [sampled[i, PROMPT : PROMPT + n].tolist() for i, n in enumerate(LENGTHS)]
    texts = ["" for _ in ids]
    answers = (prompts, ids, None, texts, logps, {}, None, None)
    if isinstance(made, RLOOTrainer):
        answers = (prompts, ids, texts)
    vars(made).update(
        environment_factories=None,
        environments=None,
        tools=None,
        log_multimodal=False,
        pad_to_multiple_of=None,
        eos_token_ids=[EOS],
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _generate=lambda prompts: answers,
        _calculate_rewards=lambda *_: torch.tensor(rewards),
        reward_funcs=[None] * rewards.shape[1],
        reward_func_names=[str(i) for i in range(rewards.shape[1])],
        reward_weights=torch.ones(rewards.shape[1]),
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    return made


def policy(
    trainer: Any = GRPOTrainer, rewards: Any = None, args: Any = (), **settings: Any
) -> Result:
    """A policy gradient from given completions on: advantages, corrections and loss."""
    chosen = GRPO | settings
    on_policy = chosen["num_iterations"] == 1
    temperature = chosen["temperature"]
    given = X.rewards[:, :1] if rewards is None else rewards
    model = Given(X.logits, temperature=temperature)
    past = model if on_policy else Given(X.old, temperature=temperature)
    reference = Given(X.ref, temperature=temperature)
    made = bare(trainer, past, GRPO_ARGS | dict(args), ref_model=reference, **chosen)
    batch = collected(made, given, temperature)._generate_and_score_completions(
        [{"prompt": ""}] * ROWS
    )
    return differentiated(made._compute_loss(model, batch), model)


def unscored() -> Any:
    """The rewards with one that is missing."""
    rewards = X.rewards[:, :1].copy()
    rewards[UNSCORED] = np.nan
    return rewards


SAMPLER: dict[str, Any] = {"use_vllm": True}
TOKENS: dict[str, Any] = {"loss_type": "dapo"}
POLICY: dict[str, Callable[[], Result]] = {
    "grpo": lambda: policy(),
    "grpo, one step a rollout": lambda: policy(num_iterations=1),
    "grpo, temperature .7": lambda: policy(temperature=0.7),
    "grpo, KL k3": lambda: policy(beta=0.1),
    "grpo, KL k3 weighted": lambda: policy(beta=0.1, args={"use_bias_correction_kl": True}),
    "grpo, two-sided": lambda: policy(args={"delta": 1.5}),
    "grpo, batch scaled": lambda: policy(scale_rewards="batch"),
    "grpo, token mean": lambda: policy(loss_type="bnpo"),
    "grpo, an unscored completion": lambda: policy(rewards=unscored()),
    "grpo, truncated left out": lambda: policy(mask_truncated_completions=True),
    "dapo": lambda: policy(**TOKENS, epsilon_high=0.28),
    "dapo, truncated left out": lambda: policy(**TOKENS, mask_truncated_completions=True),
    "dapo, entropy bonus": lambda: policy(
        **TOKENS, epsilon_high=0.28, _entropy_bonus_enabled=True, entropy_coef=0.01
    ),
    "dapo, off-policy sequences": lambda: policy(**TOKENS, off_policy_mask_threshold=0.05),
    "dapo, TIS": lambda: policy(
        **TOKENS,
        **SAMPLER,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=1.2,
    ),
    "dapo, IcePop": lambda: policy(
        **TOKENS,
        **SAMPLER,
        vllm_importance_sampling_mode="token_mask",
        vllm_importance_sampling_clip_min=0.8,
        vllm_importance_sampling_clip_max=1.2,
    ),
    "dapo, MIS": lambda: policy(
        **TOKENS,
        **SAMPLER,
        vllm_importance_sampling_mode="sequence_mask",
        vllm_importance_sampling_clip_max=1.2,
    ),
    "dapo, sequences truncated": lambda: policy(
        **TOKENS,
        **SAMPLER,
        vllm_importance_sampling_mode="sequence_truncate",
        vllm_importance_sampling_clip_max=1.2,
    ),
    "dr_grpo": lambda: policy(loss_type="dr_grpo", scale_rewards="none"),
    "gspo": lambda: policy(importance_sampling_level="sequence"),
    "luspo": lambda: policy(loss_type="luspo", importance_sampling_level="sequence"),
    "cispo": lambda: policy(loss_type="cispo", epsilon_high=1.1),
    "sapo": lambda: policy(loss_type="sapo"),
    "vespo": lambda: policy(loss_type="vespo"),
    "gmpo": lambda: policy(GMPOTrainer, epsilon_low=0.2, epsilon_high=0.2),
    "gdpo": lambda: policy(rewards=X.rewards, multi_objective_aggregation="normalize_then_sum"),
    "rloo": lambda: policy(RLOOTrainer, num_iterations=1),
}
