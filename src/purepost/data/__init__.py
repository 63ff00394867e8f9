"""Data: files and lists as records, and the batches that each step trains on.

records = read("train.jsonl")
train, held_out = split(records, 0.02)
data = sft_rows(train, tokenizer, width=2048, rows=8, seed=0)      # step → Rows
"""

from ..rollout.packing import padding_share as padding_share
from .batches import Batches as Batches
from .batches import Report as Report
from .feeds import judged_rows as judged_rows
from .feeds import pair_rows as pair_rows
from .feeds import prompt_tasks as prompt_tasks
from .feeds import sft_rows as sft_rows
from .feeds import step_rows as step_rows
from .order import Draw as Draw
from .order import hash_of as hash_of
from .order import shuffled as shuffled
from .records import Records as Records
from .records import concatenate as concatenate
from .records import read as read
from .split import mix as mix
from .split import split as split
