"""The record of a run: metrics to files, progress on the screen, a picture at the end."""

from .metrics import Record as Record
from .metrics import to_floats as to_floats
from .picture import picture as picture
from .progress import Progress as Progress
from .writers import Jsonl as Jsonl
from .writers import TensorBoard as TensorBoard
from .writers import Tracker as Tracker
from .writers import Writer as Writer
from .writers import read_jsonl as read_jsonl
