"""Kinds of weights and the transforms between them."""

from .linear import Weight as Weight
from .linear import grouped_linear as grouped_linear
from .linear import linear as linear
from .linear import shape_of as shape_of
from .lora import ALL_LINEAR as ALL_LINEAR
from .lora import LowRank as LowRank
from .lora import adapters as adapters
from .lora import add_lora as add_lora
from .lora import default_trainable as default_trainable
from .lora import has_adapters as has_adapters
from .lora import initial_adapters as initial_adapters
from .lora import lora_scale as lora_scale
from .lora import without_lora as without_lora
from .merge import merge as merge
from .tiled import Tiled as Tiled
from .tiled import tile as tile
