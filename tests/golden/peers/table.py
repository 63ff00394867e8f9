"""Prints how far purepost's losses are from its peers': `make peers` runs it with fresh results.

    .venv/bin/python -m tests.golden.peers.table TRL.npz TUNIX.npz

Every case of a peer has a counterpart here. Where the two are meant to differ, `DIFFERS` says why;
tests/test_peers.py holds both to it with the results that are stored.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from purepost import algorithms, losses
from purepost.advantages import batch_scaled, group_normalized
from purepost.filters import finished
from purepost.losses import preference
from purepost.losses.correction import clamped, importance, sequence_total
from purepost.losses.distillation import among_top, forward_kl, jensen_shannon, reverse_kl
from tests.golden.peers import ours
from tests.golden.peers.cases import WIDTH
from tests.golden.peers.ours import Result, distilled, paired, policy, supervised

HERE = Path(__file__).parent
CLOSE = 2e-5  # of the largest number of a result


def dpo(loss: Any, **options: Any) -> Callable[[], Result]:
    """DPO's trainer with another loss."""
    return lambda: paired(algorithms.dpo, beta=0.3, loss=loss, **options)


def grpo(**options: Any) -> Callable[[], Result]:
    """GRPO with other parts."""
    return lambda: policy(algorithms.grpo, **options)


def dapo(**options: Any) -> Callable[[], Result]:
    """The mean over tokens, clipped at .2 on both sides unless said."""
    given: dict[str, Any] = {"high": 0.2, "rollout": algorithms.grpo} | options
    return lambda: policy(algorithms.dapo, **given)


WHOLE = importance(sequence_total, clamped(0.0, 1.2))
HALF = preference.alpha_divergence(0.5)
TRL: dict[str, Callable[[], Result]] = {
    "grpo": grpo(),
    "grpo, one step a rollout": grpo(epochs=1),
    "grpo, temperature .7": grpo(temperature=0.7),
    "grpo, KL k3": grpo(beta=0.1, kl=losses.k3),
    "grpo, KL k3 weighted": grpo(beta=0.1),
    "grpo, two-sided": grpo(objective=partial(losses.two_sided, ceiling=1.5)),
    "grpo, batch scaled": grpo(advantage=batch_scaled),
    "grpo, token mean": grpo(aggregate=losses.token_mean),
    "grpo, an unscored completion": grpo(rewards=ours.unscored()),
    "grpo, truncated left out": grpo(filters=[finished]),
    "dapo": dapo(high=0.28),
    "dapo, truncated left out": dapo(filters=[finished]),
    "dapo, entropy bonus": dapo(high=0.28, entropy=0.01),
    "dapo, off-policy sequences": dapo(correction=losses.off_policy_sequences(0.05)),
    "dapo, TIS": dapo(correction=losses.tis(high=1.2)),
    "dapo, IcePop": dapo(correction=losses.icepop(0.8, 1.2)),
    "dapo, MIS": dapo(correction=losses.mis(1.2)),
    "dapo, sequences truncated": dapo(correction=WHOLE),
    "dr_grpo": lambda: policy(algorithms.dr_grpo, max_tokens=WIDTH),
    "gspo": lambda: policy(algorithms.gspo, low=0.2, high=0.2),
    "luspo": lambda: policy(algorithms.luspo, low=0.2, high=0.2),
    "cispo": lambda: policy(algorithms.cispo, high=1.1),
    "sapo": lambda: policy(algorithms.sapo),
    "vespo": lambda: policy(algorithms.vespo),
    "gmpo": lambda: policy(algorithms.gmpo, low=0.2, high=0.2),
    "gdpo": lambda: policy(algorithms.gdpo, rewards=ours.X.rewards),
    "rloo": lambda: policy(algorithms.rloo, epochs=1),
    "dpo": dpo(preference.sigmoid),
    "dpo, hinge": dpo(preference.hinge),
    "dpo, ipo": dpo(preference.ipo),
    "dpo, nca_pair": dpo(preference.nca_pair),
    "dpo, bco_pair": dpo(preference.bco_pair),
    "dpo, sppo_hard": dpo(preference.sppo_hard),
    "dpo, aot": dpo(preference.sigmoid, couple=preference.sorted_reference),
    "dpo, apo_zero": dpo(preference.apo_zero),
    "dpo, apo_down": dpo(preference.apo_down),
    "dpo, discopop": dpo(preference.discopop),
    "dpo, sigmoid_norm": dpo(preference.sigmoid_norm),
    "dpo, robust": dpo(partial(preference.robust, epsilon=0.1)),
    "dpo, exo_pair": dpo(partial(preference.exo_pair, epsilon=0.1)),
    "dpo, forward_kl": dpo(preference.divergence(preference.forward_kl)),
    "dpo, js_divergence": dpo(preference.divergence(preference.jensen_shannon)),
    "dpo, alpha_divergence": dpo(preference.divergence(HALF)),
    "dpo, LD": dpo(preference.sigmoid, beyond=0.5),
    "dpo, WPO": dpo(preference.sigmoid, weigh=preference.wpo_weights),
    "dpo, RPO": dpo(preference.sigmoid, nll=0.5),
    "kto": ours.kto,
    "cpo": lambda: paired(algorithms.cpo, beta=0.3, nll=0.5),
    "cpo, hinge": lambda: paired(algorithms.cpo, beta=0.3, nll=0.0, loss=preference.hinge),
    "simpo": lambda: paired(algorithms.simpo, beta=0.3, gamma=0.12),
    "orpo": lambda: paired(algorithms.orpo, beta=0.3),
    "reward_model": ours.scored,
    "sft": lambda: supervised(algorithms.sft),
    "sft, label smoothing": lambda: supervised(algorithms.sft, label_smoothing=0.1),
    "dft": lambda: supervised(algorithms.dft),
    "gkd": lambda: distilled(jensen_shannon(0.3)),
    "gkd, forward KL": lambda: distilled(forward_kl),
    "gkd, reverse KL": lambda: distilled(reverse_kl),
    "distillation, temperature 2": lambda: distilled(jensen_shannon(0.5), temperature=2.0),
    "distillation, JSD": lambda: distilled(jensen_shannon(0.3)),
    "distillation, forward KL": lambda: distilled(forward_kl),
}

LEAST = partial(group_normalized, epsilon=1e-6)
TOKEN = partial(losses.gspo_token, low=0.05, high=0.05)
DUAL = partial(losses.dual_clipped, bound=1.2)
TUNIX: dict[str, Callable[[], Result]] = {
    "grpo, ε 1e-6": grpo(advantage=LEAST),
    "grpo, ε 1e-6, dual clip": grpo(advantage=LEAST, objective=DUAL),
    "grpo, ε 1e-6, KL k1": grpo(advantage=LEAST),
    "grpo, ε 1e-6, KL k2": grpo(advantage=LEAST, beta=0.1, kl=losses.k2),
    "grpo, ε 1e-6, KL k3": grpo(advantage=LEAST, beta=0.1, kl=losses.k3),
    "grpo, ε 1e-6, sums over tokens": grpo(advantage=LEAST, aggregate=losses.sequence_sum),
    "dapo, ε 1e-6": dapo(advantage=LEAST, high=0.28),
    "dapo, ε 1e-6, TIS": dapo(advantage=LEAST, correction=losses.tis(high=1.2)),
    "gspo_token, ε 1e-6": grpo(advantage=LEAST, objective=TOKEN),
    "dr_grpo": lambda: policy(algorithms.dr_grpo, max_tokens=WIDTH),
    "advantages of rloo": ours.rloo_advantages,
    "ppo, its policy": lambda: ours.ppo(),
    "ppo, its policy, dual clip": lambda: ours.ppo(objective=DUAL),
    "ppo, its values": ours.value_loss,
    "gae": ours.generalised_advantages,
    "dpo": dpo(preference.sigmoid),
    "dpo, conservative": dpo(partial(preference.conservative, epsilon=0.1)),
    "orpo": lambda: paired(algorithms.orpo, beta=0.3),
    "sft": lambda: supervised(algorithms.sft),
    "logit_distillation": lambda: distilled(forward_kl, temperature=2.0, alpha=0.5),
    "logit_distillation, top 3": lambda: distilled(
        among_top(3, forward_kl), temperature=2.0, alpha=0.5
    ),
    "logit_distillation, padded rows": lambda: distilled(forward_kl, temperature=2.0, alpha=0.5),
    "overlong penalty": ours.penalties,
}
PEERS = {"trl": TRL, "tunix": TUNIX}

COUNTED = "rows that are left out still count in TRL's mean over rows; here B has none of them"
DIFFERS: dict[tuple[str, str], str] = {
    ("trl", "grpo, an unscored completion"): COUNTED,
    ("trl", "grpo, truncated left out"): COUNTED,
    ("trl", "gdpo"): "TRL whitens by std + 1e-4, we by √(variance + 1e-8), as all that is whitened",
    ("trl", "rloo"): "the value only: TRL's is of the ratio of whole completions, ours of A log π",
    ("trl", "dpo, WPO"): "TRL divides π by Σ p² of each token; we have the paper's weights, eq. 2",
    ("trl", "distillation, temperature 2"): "TRL leaves Hinton's factor T² out",
    ("trl", "orpo"): "TRL's NLL is of the prompt too; ours of the chosen completion",
    ("tunix", "grpo, ε 1e-6, KL k1"): "k1's expected gradient is 0: refused here, so left out",
    ("tunix", "orpo"): "Tunix 0.1.7 takes odds of whole completions' probabilities, the paper of "
    "their mean over tokens, and means the NLL by rows",
    ("tunix", "logit_distillation, padded rows"): "Tunix's mean is over padding and prompt too",
    (
        "tunix",
        "overlong penalty",
    ): "Tunix counts characters, and goes on below −1, the paper's least",
}


def difference(found: Any, stored: Any) -> float:
    """The largest, relative to the largest number (a value near 0 is of terms of some size)."""
    a, b = (np.asarray(x, np.float64).ravel() for x in (found, stored))
    least = 0.1 if a.size == 1 else 1e-3
    return float(np.abs(a - b).max(initial=0.0) / max(least, np.abs(b).max(initial=0.0)))


def differences(peer: str, name: str, results: Any) -> tuple[float, float]:
    """(of the value, of the gradient) of one case."""
    value, gradient = PEERS[peer][name]()
    return (
        difference(value, results[f"{name}/value"]),
        difference(gradient, results[f"{name}/gradient"]),
    )


def report(results: dict[str, Any]) -> list[str]:
    """Print the table; the cases that are not as they should be."""
    wrong = []
    print(f"{'peer':6} {'case':34} {'Δ value':>9} {'Δ gradient':>11}  note")
    for peer, cases in PEERS.items():
        for name in cases:
            value, gradient = differences(peer, name, results[peer])
            why = DIFFERS.get((peer, name), "")
            note = why or ("" if max(value, gradient) <= CLOSE else "DIFFERS")
            print(f"{peer:6} {name:34} {value:9.1e} {gradient:11.1e}  {note}")
            wrong += [f"{peer}: {name}"] if note == "DIFFERS" else []
    return wrong


if __name__ == "__main__":
    fresh = dict(zip(PEERS, map(np.load, sys.argv[1:3]), strict=True))
    faults = report(fresh)
    for peer in PEERS:
        stored = np.load(HERE / f"{peer}.npz")
        new = [n for n in fresh[peer].files if n not in stored.files]
        moved = [n for n in stored.files if difference(fresh[peer][n], stored[n]) > CLOSE]
        faults += [f"{peer}.npz is not what the peer gives: {n}" for n in new + moved]
    print("\n".join(faults) if faults else "peers: as documented, and as stored")
    sys.exit(bool(faults))
