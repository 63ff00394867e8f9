"""Runs that stop and go on: checkpoints, the manifest beside them, an orderly stop."""

from .journal import journaled as journaled
from .manifest import Manifest as Manifest
from .manifest import differences as differences
from .manifest import make_manifest as make_manifest
from .signals import Stop as Stop
from .signals import stop_on_sigterm as stop_on_sigterm
from .store import Checkpoints as Checkpoints
