"""Models in and out: Hugging Face and Orbax directories, hub ids, GGUF files, adapters,
classifiers.
"""

from .classifier import load_classifier as load_classifier
from .classifier import save_classifier as save_classifier
from .fetch import fetch as fetch
from .load import Loaded as Loaded
from .load import load as load
from .load import save as save
from .load import save_orbax as save_orbax
from .peft import load_adapter as load_adapter
from .peft import save_adapter as save_adapter
