"""Tools for language models: Python functions, their calls in each family's format, a calculator,
and a sandbox for code that a model wrote.
"""

from .expression import compute as compute
from .formats import gemma as gemma
from .formats import hermes as hermes
from .formats import llama3 as llama3
from .formats import mistral as mistral
from .functions import Tool as Tool
from .functions import Toolbox as Toolbox
from .functions import tool as tool
from .messages import Call as Call
from .messages import Turn as Turn
from .sandbox import Limits as Limits
from .sandbox import run_python as run_python
