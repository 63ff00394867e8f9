"""Losses on arrays, per token, and the ways to make one number of them."""

from .aggregate import Aggregate as Aggregate
from .aggregate import constant as constant
from .aggregate import sequence_mean as sequence_mean
from .aggregate import sequence_sum as sequence_sum
from .aggregate import token_mean as token_mean
from .kl import KL as KL
from .kl import k2 as k2
from .kl import k3 as k3
from .kl import k3_weighted as k3_weighted
from .policy import Objective as Objective
from .policy import clipped as clipped
from .policy import reinforce as reinforce
