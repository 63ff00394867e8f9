"""The ranges of hyperparameters, checked where they are plain numbers."""

from ..types import Scalar


def expect(
    name: str,
    value: Scalar,
    low: float,
    high: float = float("inf"),
    *,
    or_low: bool = False,
    or_high: bool = False,
) -> None:
    """Raise ValueError unless low < value < high; `or_low`, `or_high`: or equal. An array, which
    may be traced, passes.
    """
    if not isinstance(value, int | float):
        return
    above = value >= low if or_low else value > low
    below = value <= high if or_high else value < high
    if not (above and below):
        signs = "≤" if or_low else "<", "≤" if or_high else "<"
        upper = "" if high == float("inf") else f" {signs[1]} {high:g}"
        raise ValueError(f"expected {low:g} {signs[0]} {name}{upper}, got {value}")
