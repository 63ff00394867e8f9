"""What keeps training in few bits sound: the precision that is computed in, an optimizer's recipe
with warm-up and clipping, loss scaling for float16.

A step whose loss or gradient is not finite is skipped and counted by every algorithm's update.

bfloat16 needs no loss scaling: it has float32's exponents, so that no gradient vanishes in it that
would not in float32. float16's smallest number is 6e-8, below which many gradients lie.

Source: Micikevicius et al., Mixed precision training, 1710.03740, §3.2 (loss scaling).
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from .algorithm import Algorithm, Batch, Data, LossFn, Models, OptState, TrainState
from .mean import Metrics, Terms
from .types import KeyArray
from .weights import ALL_LINEAR, Kind, add_lora, cast_weights, nf4, quantize

Model = TypeVar("Model")


class Precision(Enum):
    """What weights, activations and their gradients are computed in. Losses, norms, softmax,
    optimizer and adapters are float32 always.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def in_precision(model: Model, precision: Precision) -> Model:
    """The model computing in this precision: its weights cast, quantised ones read as such, its
    adapters float32.
    """
    return cast_weights(model, jnp.dtype(precision.value))


def qlora(
    model: Model,
    *,
    key: KeyArray,
    precision: Precision = Precision.BFLOAT16,
    where: str = ALL_LINEAR,
    kind: Kind = nf4,
    block: int | None = None,
    **options: Any,
) -> Model:
    """The model quantised, in this precision, with adapters: `options` are those of `add_lora`.

    Source: Dettmers et al., QLoRA, 2305.14314, eq. 5.
    """
    quantized = quantize(model, where=where, kind=kind, block=block)
    return add_lora(in_precision(quantized, precision), where=where, key=key, **options)


def recipe(
    learning_rate: float,
    *,
    steps: int,
    warmup: float | int = 0.03,
    clip: float | int = 1.0,
    weight_decay: float | int = 0.0,
) -> optax.GradientTransformation:
    """AdamW whose gradient is clipped to the norm `clip`, with a learning rate that rises from 0
    over the share `warmup` of the optimizer steps and falls to 0 along a cosine.
    """
    if steps < 1 or not 0 <= warmup < 1 or clip <= 0:
        raise ValueError(
            f"expected steps ≥ 1, 0 ≤ warmup < 1 and clip > 0, got {steps}, {warmup} and {clip}"
        )
    rise = round(warmup * steps)
    schedule = optax.warmup_cosine_decay_schedule(
        learning_rate / (rise + 1), learning_rate, rise, max(steps, rise + 1)
    )
    return optax.chain(
        optax.clip_by_global_norm(clip), optax.adamw(schedule, weight_decay=weight_decay)
    )


class Scaled(eqx.Module):
    """An optimizer's state, and the number that the loss is multiplied by."""

    scale: Float[Array, ""]
    counter: Int[Array, ""]  # finite updates since it last changed
    inner: Any


def loss_scaled(
    build: Callable[[optax.GradientTransformation], Algorithm[Models, Data, Batch]],
    optimizer: optax.GradientTransformation,
    *,
    initial: float = 2.0**15,
    period: int = 2000,
    factor: int = 2,
) -> Algorithm[Models, Data, Batch]:
    """The algorithm that `build(optimizer)` is, its loss multiplied before the backward pass and
    its gradient divided after it: `loss_scaled(sft, optimizer)`. For float16.

    A skipped update divides the number by `factor`, `period` finite ones in a row multiply it
    (jmp.DynamicLossScale). Raises: ModuleNotFoundError without the package jmp.
    """
    try:
        import jmp
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "expected the package jmp, got none; install purepost[float16]", name="jmp"
        ) from error

    def init(params: PyTree) -> Scaled:
        return Scaled(jnp.float32(initial), jnp.int32(0), optimizer.init(params))

    def divided(grads: PyTree, state: Scaled, params: PyTree = None) -> tuple[PyTree, Scaled]:
        grads = jax.tree.map(lambda g: g / state.scale, grads)
        updates, inner = optimizer.update(grads, state.inner, params)
        return updates, replace(state, inner=inner)

    # optax types both as chex pytrees.
    scaling = optax.GradientTransformation(init, divided)  # pyright: ignore[reportArgumentType]
    algorithm = build(scaling)

    def update(
        loss: LossFn[Models, Batch], key: KeyArray, state: TrainState[Models], batch: Batch
    ) -> tuple[TrainState[Models], Metrics]:
        before: Scaled = state.opt_state.inner

        def multiplied(key: KeyArray, models: Models, batch: Batch) -> tuple[Terms, Metrics]:
            terms, metrics = loss(key, models, batch)
            return {name: term.times(before.scale) for name, term in terms.items()}, metrics

        state, metrics = algorithm.update(multiplied, key, state, batch)
        now = jmp.DynamicLossScale(before.scale, before.counter, period, factor, jnp.float32(1))
        with jax.numpy_dtype_promotion("standard"):
            now = now.adjust(metrics["skipped"].total == 0)
        own = {n: x for n, x in metrics.items() if n in ("loss", "grad_norm") or "loss/" in n}
        metrics |= {name: x.times(1 / before.scale) for name, x in own.items()}
        inner = Scaled(now.loss_scale, now.counter, state.opt_state.inner.inner)
        return replace(state, opt_state=OptState(state.opt_state.master, inner)), metrics

    return replace(algorithm, update=update)
