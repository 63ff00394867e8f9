"""Models in and out: Hugging Face directories, hub ids, GGUF files and adapters."""

from .fetch import fetch as fetch
from .load import Loaded as Loaded
from .load import load as load
from .load import save as save
from .peft import load_adapter as load_adapter
from .peft import save_adapter as save_adapter
