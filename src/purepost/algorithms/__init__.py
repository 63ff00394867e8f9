"""The algorithms: one paper, one file, each a factory that returns an `Algorithm`."""

if __name__ != "purepost.algorithms":
    raise ImportError(
        f"expected the name purepost.algorithms, got {__name__!r}: the link at the root "
        "is there for readers, and importing it would make a second copy of every class; "
        "write `import purepost.algorithms`"
    )

from .attention_transfer import attention_transfer as attention_transfer
from .cispo import cispo as cispo
from .cpo import cpo as cpo
from .dapo import dapo as dapo
from .dft import dft as dft
from .dpo import dpo as dpo
from .dppo import dppo as dppo
from .dr_grpo import dr_grpo as dr_grpo
from .feature_pooling import feature_pooling as feature_pooling
from .feature_projection import feature_projection as feature_projection
from .gdpo import gdpo as gdpo
from .gkd import gkd as gkd
from .gmpo import gmpo as gmpo
from .grpo import grpo as grpo
from .gspo import gspo as gspo
from .gspo_token import gspo_token as gspo_token
from .kto import kto as kto
from .logit_distillation import logit_distillation as logit_distillation
from .luspo import luspo as luspo
from .max_rl import max_rl as max_rl
from .nash_md import nash_md as nash_md
from .on_policy_distillation import on_policy_distillation as on_policy_distillation
from .online_dpo import online_dpo as online_dpo
from .opo import opo as opo
from .orpo import orpo as orpo
from .pass_at_k import pass_at_k as pass_at_k
from .ppo import ppo as ppo
from .process_reward_model import process_reward_model as process_reward_model
from .reinforce import reinforce as reinforce
from .reinforce_pp import reinforce_pp as reinforce_pp
from .remax import remax as remax
from .reward_model import reward_model as reward_model
from .rloo import rloo as rloo
from .sapo import sapo as sapo
from .self_distillation import self_distillation as self_distillation
from .sequence_distillation import sequence_distillation as sequence_distillation
from .sft import sft as sft
from .simpo import simpo as simpo
from .vapo import vapo as vapo
from .vespo import vespo as vespo
from .xpo import xpo as xpo
