"""Which family file reads and writes which `model_type`."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .. import llama
from ..decoder import Config


class Family(NamedTuple):
    """A family's configuration in both directions, and its names (see `llama.NAMES`)."""

    config_from_hf: Callable[[Mapping[str, Any]], Config]
    config_to_hf: Callable[[Config], dict[str, Any]]
    names: Mapping[str, tuple[str, bool]]


def family_of(model_type: str | None) -> Family:
    """The family of a `model_type` in config.json, or of a Config's `family`.

    Raises: ValueError for one that is not supported.
    """
    match model_type:
        case "llama":
            return Family(llama.config_from_hf, llama.config_to_hf, llama.NAMES)
    raise ValueError(f"expected model_type 'llama', got {model_type!r}; load a model of that kind")
