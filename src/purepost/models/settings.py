"""What differs between layers beside their weights."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from .config import Config
from .rope import Angles

UNLIMITED = 2**31 - 1  # the window of a layer without one, where others have some


class Setting(NamedTuple):
    """What differs between layers beside their weights."""

    window: int | Int[Array, ""] | None
    angles: Angles


def layer_settings(
    config: Config, positions: Int[Array, "b t"], layers: range | None = None
) -> tuple[PyTree, Callable[[PyTree], Setting]]:
    """What to scan over beside the layers (by default all), and the function from a layer's part
    of it to its setting. Layers that are all alike scan over nothing.
    """
    windows = config.layer_windows
    windows = windows if layers is None else windows[layers.start : layers.stop]
    if len(set(windows)) == 1:
        alike = Setting(windows[0], config.rope(windows[0]).angles(positions))
        return None, lambda _: alike
    sizes = jnp.asarray([UNLIMITED if w is None else w for w in windows], jnp.int32)
    plain = config.rope(None).angles(positions)
    if not config.has_two_ropes:
        return sizes, lambda size: Setting(size, plain)
    windowed = config.rope(1).angles(positions)

    def setting(size: Int[Array, ""]) -> Setting:
        full = size == UNLIMITED
        return Setting(size, jax.tree.map(lambda a, b: jnp.where(full, a, b), plain, windowed))

    return sizes, setting
