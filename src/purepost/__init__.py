"""purepost: post-training of language models as pure functions over pytrees, in JAX."""

from .algorithm import Algorithm as Algorithm
from .algorithm import TrainState as TrainState
from .algorithm import make_init as make_init
from .algorithm import make_update as make_update
from .loop import fuse as fuse
from .loop import snapshot as snapshot
from .loop import train as train
from .mean import Mean as Mean
from .types import Rows as Rows
