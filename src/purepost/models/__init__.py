"""The models: one `Decoder`, a file for each family, heads, and weights in and out."""

if __name__ != "purepost.models":
    raise ImportError(
        f"expected the name purepost.models, got {__name__!r}: the link at the root "
        "is there for readers, and importing it would make a second copy of every class; "
        "write `import purepost.models`"
    )

from .config import Config as Config
from .containers import WithReference as WithReference
from .containers import with_reference as with_reference
from .decoder import Decoder as Decoder
from .decoder import init_decoder as init_decoder
from .moe import load_balancing_loss as load_balancing_loss
from .moe import real_tokens as real_tokens
from .rope import RopeScaling as RopeScaling
