"""The values and gradients of Tunix's own loss functions. `make peers` runs it in .venv-tunix.

    .venv-tunix/bin/python tests/golden/peers/make_tunix.py TARGET.npz

The model is one that has its logits at hand; all else is Tunix's. Only the truncated weights of its
TIS are given: it finds them in a learner's step, not in a function.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import LENGTHS, PROMPT, ROWS, VOCAB, WIDTH, fold, inputs, logps_of
from flax import nnx  # pyright: ignore[reportMissingImports]
from tunix.distillation.strategies.logit import (  # pyright: ignore[reportMissingImports]
    LogitStrategy,
)
from tunix.rl import algo_core, common  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo.dapo_learner import reward_shaping  # pyright: ignore[reportMissingImports]
from tunix.sft.dpo import dpo_trainer  # pyright: ignore[reportMissingImports]
from tunix.sft.peft_trainer import _default_loss_fn  # pyright: ignore[reportMissingImports]

X = inputs()
PROMPTS, COMPLETIONS = X.tokens[:, :PROMPT], X.tokens[:, PROMPT:]
MASK = jnp.asarray(X.mask[:, PROMPT:], jnp.int32)
Result = tuple[Any, Any]


class Given(nnx.Module):
    """A model that has its logits, or the numbers of a critic, at hand."""

    def __init__(self, logits: Any) -> None:
        self.logits = nnx.Param(jnp.asarray(logits))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """(logits, no cache)"""
        return self.logits[...], None


def logps(logits: Any) -> Any:
    """Those of the completions, by Tunix."""
    graph, state = nnx.split(Given(logits))
    return common.compute_per_token_logps(graph, state, PROMPTS, COMPLETIONS, 0, 6)


def differentiated(loss: Callable[[Any], Any], logits: Any) -> Result:
    """(value, gradient of the logits)"""
    model = Given(logits)
    value, gradient = nnx.value_and_grad(loss)(model)
    return value, np.asarray(gradient["logits"][...])


def policy(
    advantages: Any = None, *, weights: Any = None, reference: bool = False, **settings: Any
) -> Result:
    """GRPO's loss function and its relatives."""
    rewards = X.rewards[:, 0]
    found = algo_core.compute_advantages(rewards, 4) if advantages is None else advantages
    config = {
        "beta": 0.1 if reference else 0.0,
        "epsilon": 0.2,
        "loss_algo": "grpo",
        "loss_agg_mode": "sequence-mean-token-mean",
        "temperature": 1.0,
        "kl_loss_mode": "low_var_kl",
        "kl_clamp_value": None,
    } | settings
    example = common.TrainExample(
        prompt_ids=PROMPTS,
        prompt_mask=PROMPTS > 0,
        completion_ids=COMPLETIONS,
        completion_mask=MASK,
        advantages=jnp.asarray(found),
        ref_per_token_logps=logps(X.ref) if reference else None,
        old_per_token_logps=logps(X.old),
        sampler_is_weights=weights,
    )
    value, gradient = differentiated(
        lambda m: algo_core.grpo_loss_fn(m, example, SimpleNamespace(**config), 0, 6)[0], X.logits
    )
    return value, fold(gradient)


def ppo(dual: float | None = None) -> Result:
    """PPO's policy loss with an entropy bonus, of advantages that are given."""
    config = SimpleNamespace(epsilon_low=0.2, epsilon_high=0.2, entropy_coef=0.01, epsilon_c=dual)
    example = SimpleNamespace(
        prompt_ids=PROMPTS,
        completion_ids=COMPLETIONS,
        completion_mask=MASK,
        advantages=jnp.asarray(X.advantages),
        old_per_token_logps=logps(X.old),
        ref_per_token_logps=None,
    )
    value, gradient = differentiated(
        lambda m: algo_core.ppo_policy_loss_fn(m, example, config, 0, 6)[0], X.logits
    )
    return value, fold(gradient)


def value_loss() -> Result:
    """PPO's value loss; its gradient is by the critic's values."""
    example = SimpleNamespace(
        prompt_ids=PROMPTS,
        completion_ids=COMPLETIONS,
        completion_mask=MASK,
        old_values=jnp.asarray(X.old_values),
        returns=jnp.asarray(X.advantages),
    )
    # A token's value is that of the state before it.
    states = np.pad(X.values, [(0, 0), (PROMPT - 1, 1)])[..., None]
    value, gradient = differentiated(
        lambda m: algo_core.ppo_value_loss_fn(m, example, 0.2, 0, 6)[0], states
    )
    return value, gradient[:, PROMPT - 1 : -1, 0]


def gae() -> Result:
    """Whitened advantages and returns of the trained tokens; no gradient."""
    found = algo_core.compute_gae_advantages(
        jnp.asarray(X.advantages), jnp.asarray(X.values), MASK, 0.9, 0.8
    )
    trained = np.asarray(MASK, bool)
    return np.stack([np.asarray(x)[trained] for x in found]), []


def paired(**settings: Any) -> Result:
    """The losses of DPO's trainer."""
    order = np.concatenate([np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)])
    ids, mask = jnp.asarray(X.tokens[order]), jnp.asarray(X.tokens[order] > 0)
    where = (ids, common.build_positions_from_mask(mask), common.make_causal_attn_mask(mask))
    referenced = settings.get("algorithm") != "orpo"
    ref = dpo_trainer.compute_logps(Given(X.ref[order]), *where, WIDTH, MASK[order])
    example = dpo_trainer.TrainExample(
        *where,
        ref_chosen_logps=ref[0] if referenced else None,
        ref_rejected_logps=ref[1] if referenced else None,
        completion_mask=MASK[order],
        logits_to_keep=WIDTH,
    )
    value, found = differentiated(
        lambda m: dpo_trainer.dpo_loss_fn(m, example, **settings)[0], X.logits[order]
    )
    gradient = np.zeros_like(X.logits)
    gradient[order] = found
    return value, fold(gradient)


def sft() -> Result:
    """The default loss of its trainer."""
    value, gradient = differentiated(
        lambda m: _default_loss_fn(m, jnp.asarray(X.tokens), jnp.asarray(X.mask), None, None),
        X.logits,
    )
    return value, fold(gradient)


def logit(*, top: int = 0, padded: bool = False) -> Result:
    """Logit distillation: of the trained tokens, or of whole rows as its trainer gives them."""

    def nothing(*args: Any, **kwargs: Any) -> Any:
        return None

    strategy = LogitStrategy(nothing, nothing, nothing, 2.0, 0.5, top)
    rows, before = np.nonzero(np.ones((ROWS, 7), bool) if padded else X.mask[:, 1:])
    labels = jax.nn.one_hot(X.tokens[rows, before + 1], VOCAB)

    def loss(student: Any) -> Any:
        picked, teacher = student[rows, before], jnp.asarray(X.teacher)[rows, before]
        return strategy.compute_loss(picked, teacher, labels)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(X.logits))
    return value, fold(np.asarray(gradient))


def overlong() -> Result:
    """DAPO's penalty of texts of these lengths, for a limit of 10 and a buffer of 4."""
    buffer = {
        "overlong_buffer_length": 4,
        "overlong_buffer_penalty": 1.0,
        "max_response_length": 10,
    }
    texts = ["x" * n for n in (*LENGTHS.tolist(), 8, 10, 14)]
    return reward_shaping([], texts, None, buffer), []


def truncated() -> Any:
    """min(w, 1.2) of every token, w = π_old/π_sampler."""
    gap = logps_of(X.old, X.tokens) - logps_of(X.sampler, X.tokens)
    return jnp.minimum(jnp.exp(gap[:, PROMPT:]), 1.2)


REWARDS = X.rewards[:, 0]
CENTERED = algo_core.compute_drgrpo_advantages(jnp.asarray(REWARDS), 4)
TOKENS: dict[str, Any] = {"loss_agg_mode": "token-mean"}
CASES: dict[str, Callable[[], Result]] = {
    "grpo, ε 1e-6": lambda: policy(),
    "grpo, ε 1e-6, dual clip": lambda: policy(epsilon_c=1.2),
    "grpo, ε 1e-6, KL k1": lambda: policy(reference=True, kl_loss_mode="kl"),
    "grpo, ε 1e-6, KL k2": lambda: policy(reference=True, kl_loss_mode="mse_kl"),
    "grpo, ε 1e-6, KL k3": lambda: policy(reference=True),
    "grpo, ε 1e-6, sums over tokens": lambda: policy(loss_agg_mode="seq-mean-token-sum"),
    "dapo, ε 1e-6": lambda: policy(**TOKENS, epsilon_high=0.28),
    "dapo, ε 1e-6, TIS": lambda: policy(**TOKENS, weights=truncated()),
    "gspo_token, ε 1e-6": lambda: policy(loss_algo="gspo-token", epsilon=0.05),
    "dr_grpo": lambda: policy(CENTERED, loss_agg_mode="sequence-mean-token-scale"),
    "advantages of rloo": lambda: (algo_core.compute_rloo_advantages(REWARDS, 4), []),
    "ppo, its policy": lambda: ppo(),
    "ppo, its policy, dual clip": lambda: ppo(1.2),
    "ppo, its values": value_loss,
    "gae": gae,
    "dpo": lambda: paired(beta=0.3),
    "dpo, conservative": lambda: paired(beta=0.3, label_smoothing=0.1),
    "orpo": lambda: paired(algorithm="orpo", lambda_orpo=0.3),
    "sft": sft,
    "logit_distillation": lambda: logit(),
    "logit_distillation, top 3": lambda: logit(top=3),
    "logit_distillation, padded rows": lambda: logit(padded=True),
    "overlong penalty": overlong,
}

if __name__ == "__main__":
    made: dict[str, Any] = {}
    for name, case in CASES.items():
        value, gradient = case()
        made[f"{name}/value"] = np.asarray(value, np.float32)
        made[f"{name}/gradient"] = np.asarray(gradient, np.float32)
    np.savez_compressed(sys.argv[1], **made)
