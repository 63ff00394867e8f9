"""Data: which rows make up the batch of a step."""

from .order import Draw as Draw
from .order import hash_of as hash_of
from .order import shuffled as shuffled
