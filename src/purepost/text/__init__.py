"""Text in, token ids out: tokenizers and chat templates."""

from purepost.text.chat import Dialogue as Dialogue
from purepost.text.chat import encode_dialogue as encode_dialogue
from purepost.text.chat import encode_prompt as encode_prompt
from purepost.text.chat import render as render
from purepost.text.tokenizer import Tokenizer as Tokenizer
