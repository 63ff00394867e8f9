"""Rewards: Python functions of prompts and completions, weighted and added up."""

from .host import HostReward as HostReward
from .host import RewardFn as RewardFn
from .host import combine_rewards as combine_rewards
from .models import model_reward as model_reward
from .models import process_reward as process_reward
from .overlong import overlong as overlong
from .overlong import overlong_penalty as overlong_penalty
from .scores import Scores as Scores
from .text import text_reward as text_reward
