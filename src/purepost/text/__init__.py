"""Text in, token ids out: tokenizers and chat templates."""

from .chat import Dialogue as Dialogue
from .chat import encode_dialogue as encode_dialogue
from .chat import encode_prompt as encode_prompt
from .chat import render as render
from .chat import rewrites_history as rewrites_history
from .tokenizer import Tokenizer as Tokenizer
