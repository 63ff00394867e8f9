"""The models: one `Decoder`, a file for each family, heads, and weights in and out."""

if __name__ != "purepost.models":
    raise ImportError(
        f"expected the name purepost.models, got {__name__!r}: the link at the root "
        "is there for readers, and importing it would make a second copy of every class; "
        "write `import purepost.models`"
    )

from .config import Config as Config
from .containers import Distill as Distill
from .containers import WithReference as WithReference
from .containers import with_reference as with_reference
from .critic import ActorCritic as ActorCritic
from .critic import actor_critic as actor_critic
from .decoder import Decoder as Decoder
from .decoder import init_decoder as init_decoder
from .decoder import with_remat as with_remat
from .heads import SequenceClassifier as SequenceClassifier
from .heads import ValueHead as ValueHead
from .heads import adapters_and_head as adapters_and_head
from .heads import reward_model as reward_model
from .heads import value_model as value_model
from .moe import load_balancing_loss as load_balancing_loss
from .moe import real_tokens as real_tokens
from .neftune import Neftune as Neftune
from .rope import RopeScaling as RopeScaling
