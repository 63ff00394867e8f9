"""Sharding by placement: rules say by path how the leaves of a tree lie on a mesh of devices.

Models and algorithms contain no mesh axis. What is placed decides what is computed where: the
batch over `data` and `fsdp`, the parameters (and with them gradients and moments) over `fsdp` and
`tensor`; the compiler adds the communication.

    mesh = make_mesh(data=2, fsdp=4)
    algorithm = sharded(sft(optimizer), mesh, FSDP)
    state = algorithm.init(key, models)

Source: Xu et al., GSPMD, 2105.04663; Rajbhandari et al., ZeRO, 1910.02054, §5 (`fsdp`); Shoeybi
et al., Megatron-LM, 1909.08053, §3 (`tensor`).
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from .algorithm import Algorithm, Batch, Data, Models, TrainState
from .mean import Metrics, Terms
from .models.layers import AttentionFn
from .tree import named_leaves
from .types import KeyArray, Rows

T = TypeVar("T")

# A pattern, and one spec or more: the first rule whose pattern is found in a leaf's path is its
# rule, and the first of the rule's specs that divides it is its spec. A spec names the leaf's
# *last* axes, [..., in, out]: the layer axis of a stack stays whole. A rule that ends in P()
# allows a leaf that does not divide to be replicated.
Rules = Sequence[tuple[str, *tuple[P, ...]]]

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = AXES[:-1]


_QUANTIZED = r"\.(codes|scales(\.codes)?)$"


def matrix(pattern: str, inner: str | None, outer: str | None) -> Rules:
    """The rules of the weights [..., in, out] whose path ends in `pattern`, adapters included.

    An adapter's A [in, r] and B [r, o] are cut as their base is, along its own in and out; the
    rank stays whole, and the side that does not divide is replicated. So are codes and scales of
    a quantised weight.
    """
    return (
        (rf"(^|\.){pattern}\.a$", P(inner, None), P()),
        (rf"(^|\.){pattern}\.b$", P(None, outer), P()),
        (rf"(^|\.){pattern}(\.base)*$", P(inner, outer)),
        (rf"(^|\.){pattern}(\.base)*{_QUANTIZED}", P(inner, outer), P(None, outer), P()),
    )


# Norms, biases and the like are vectors: small, and needed whole.
_VECTORS: Rules = ((r"(norm|bias)\w*$|(^|\.)scale$|magnitude$|scales\.(outer|offset)$", P()),)

# The batch is divided, every leaf is replicated.
DATA_PARALLEL: Rules = ((r"", P()),)

# Every matrix of any model is divided along its in axis, or else along its out axis.
FSDP: Rules = (
    *_VECTORS,
    (r"\.a$", P("fsdp", None), P()),
    (r"\.b$", P(None, "fsdp"), P()),
    (_QUANTIZED, P("fsdp", None), P(None, "fsdp"), P()),
    (r"", P("fsdp", None), P(None, "fsdp")),
)

# Heads and features of the MLP over `tensor` (out axes, then in axes: one sum per half block),
# the vocabulary too; what is left over `fsdp`. For the decoder and what is built around it.
TENSOR_PARALLEL: Rules = (
    *_VECTORS,
    *matrix(r"(attention\.[qkv]|mlp\.(gate|up))", "fsdp", "tensor"),
    *matrix(r"(attention\.o|mlp\.down)", "tensor", "fsdp"),
    *matrix(r"(layer_inputs\.project|input\.(gate|out))", "fsdp", None),
    # All of it along the vocabulary: a lookup then moves the table or its rows, never the batch.
    # A vocabulary that does not divide stays whole, and so does the one number of a scalar head.
    (r"(^|\.)embed$", P(("tensor", "fsdp"), None), P(None, "fsdp")),
    (r"(^|\.)head$", P("fsdp", "tensor"), P("fsdp", None)),
    (r"mlp\.router$", P("fsdp", None), P()),
    (_QUANTIZED, P("fsdp", None), P()),  # of embeddings and head
)


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of the axes `data`, `fsdp` and `tensor`, sizes in devices; all devices by default.

    Sampler and trainer may lie on different meshes: `devices` takes some of the machine's.
    """
    sizes = dict(data=data, fsdp=fsdp, tensor=tensor)
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"expected {name} ≥ 1, got {size}")
    devices = jax.devices() if devices is None else devices
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"expected data · fsdp · tensor = {len(devices)}, the number of devices, got "
            f"{data} · {fsdp} · {tensor} = {math.prod(sizes.values())}; change a size, or name the "
            "devices to use in `devices`"
        )
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds, devices=devices)


def _axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a spec names."""
    match entry:
        case None:
            return ()
        case str():
            return (entry,)
        case tuple():
            return entry
    raise ValueError(f"expected a mesh axis, a tuple of them, or None in a spec, got {entry!r}")


def _check_axes(mesh: Mesh, rules: Rules) -> None:
    for rule in rules:
        pattern, *specs = rule
        if not specs:
            raise ValueError(f"expected a spec after the pattern {pattern!r}; add P() to replicate")
        for spec in specs:
            for axis in (axis for entry in spec for axis in _axes(entry)):
                if axis not in mesh.axis_names:
                    raise ValueError(
                        f"expected axes of the mesh, {', '.join(mesh.axis_names)}, got {axis!r} "
                        f"in the rule {pattern!r}, {spec}; mend the rule, or make a mesh that has "
                        "the axis"
                    )


def _fit(shape: tuple[int, ...], spec: P, mesh: Mesh) -> P | str:
    """The spec counted from the leaf's first axis, or why it does not fit."""
    whole = len(shape) - len(spec)
    if whole < 0:
        return f"{spec} names {len(spec)} axes, the leaf has {len(shape)}"
    for axis, entry in enumerate(spec, whole):
        parts = math.prod(mesh.shape[name] for name in _axes(entry))
        if shape[axis] % parts:
            names = "·".join(_axes(entry))
            return f"axis {axis} of size {shape[axis]} does not divide by {names} = {parts}"
    # Written as jit writes it, so that the next step compiles nothing: no axes of one device, no
    # whole axes at the end.
    used = [tuple(name for name in _axes(entry) if mesh.shape[name] > 1) for entry in spec]
    while used and not used[-1]:
        used.pop()
    if not used:
        return P()
    return P(*[None] * whole, *((names[0] if len(names) == 1 else names or None) for names in used))


def _is_placed(x: Any) -> bool:
    """Whether a leaf is one that lies on devices: numbers, or the shape of some."""
    if isinstance(x, np.ndarray):
        return x.dtype.kind not in "OSUMm"
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct)


def _sharding(name: str, shape: tuple[int, ...], mesh: Mesh, rules: Rules) -> NamedSharding:
    """Where one leaf lies; a number without axes is replicated."""
    if not shape:
        return NamedSharding(mesh, P())
    for pattern, *specs in rules:
        if re.search(pattern, name):
            fits = [_fit(shape, spec, mesh) for spec in specs]
            for fit in fits:
                if not isinstance(fit, str):
                    return NamedSharding(mesh, fit)
            raise ValueError(
                f"expected {name} of shape {shape} to divide by its rule {pattern!r}, got: "
                + "; ".join(map(str, fits))
                + ". Change the mesh, or end the rule in P() to allow replication"
            )
    raise ValueError(
        f"expected a rule for {name} of shape {shape}, got none; add one, such as ({name!r}, P()) "
        "to replicate it"
    )


def shardings(tree: PyTree, mesh: Mesh, rules: Rules) -> PyTree:
    """The tree with a `NamedSharding` for every array (or `ShapeDtypeStruct`).

    Other leaves stay. Errors: an axis the mesh lacks; a leaf without a rule; a leaf that none of
    its rule's specs divides (path, shape and axis are named).
    """
    _check_axes(mesh, rules)
    leaves = [
        _sharding(name, tuple(x.shape), mesh, rules) if _is_placed(x) else x
        for name, x in named_leaves(tree)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _put(tree: T, places: PyTree) -> T:
    """Every array moved to its place (None: left), arrays that are shared staying shared."""
    moved: dict[tuple[int, Any], Any] = {}

    def put(x: Any, place: Any) -> Any:
        if not isinstance(place, NamedSharding):
            return x
        if (id(x), place) not in moved:
            moved[id(x), place] = jax.device_put(x, place)
        return moved[id(x), place]

    return jax.tree.map(put, tree, places)


def place(tree: T, mesh: Mesh, rules: Rules) -> T:
    """The tree with its arrays on the mesh as the rules say.

    Nothing moves if any leaf has an error (those of `shardings`). To place onto another mesh is
    how a trainer hands its weights to a sampler.
    """
    return _put(tree, shardings(tree, mesh, rules))


def place_batch(batch: T, mesh: Mesh) -> T:
    """The batch with the leading axis of its arrays, the rows, over `data` and `fsdp`.

    Inside jit it constrains. Rows that do not divide are an error. For an update that splits
    them further, rows / (minibatches · microbatches) should divide too.
    """
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def rows(name: str, x: Any) -> NamedSharding | None:
        if not _is_placed(x):
            return None
        if x.ndim and x.shape[0] % parts:
            raise ValueError(
                f"expected the rows of {name or 'the batch'} of shape {x.shape} to divide by "
                f"{'·'.join(axes)} = {parts}, got {x.shape[0]}; pad them with tree.pad_rows, or "
                "change the batch or the mesh"
            )
        return NamedSharding(mesh, P(axes) if x.ndim else P())

    places = [rows(name, x) for name, x in named_leaves(batch)]
    return _put(batch, jax.tree.unflatten(jax.tree.structure(batch), places))


def _replicate_rest(tree: T, mesh: Mesh) -> T:
    """The arrays that do not lie on the mesh yet, replicated on it."""

    def place(x: Any) -> NamedSharding | None:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer):
            return None
        at_home = isinstance(x.sharding, NamedSharding) and x.sharding.mesh == mesh
        return None if at_home else NamedSharding(mesh, P())

    return _put(tree, jax.tree.map(place, tree))


def sharded(
    algorithm: Algorithm[Models, Data, Batch],
    mesh: Mesh,
    rules: Rules,
    *,
    rollout_rules: Rules | None = None,
) -> Algorithm[Models, Data, Batch]:
    """The same algorithm on a mesh.

    Its init places the models by the rules, so that the optimizer's moments lie as their
    parameters do; its rollout divides the rows of the data and of the batch; in rollout and loss
    the models learn of the mesh. `rollout_rules` places the models anew for each rollout:
    `DATA_PARALLEL`, where a device holds them whole, gathers them once instead of once per
    sampled token. Error: a mesh that `make_mesh` did not make.
    """
    if mesh.axis_names != AXES:
        raise ValueError(
            f"expected a mesh of the axes {', '.join(AXES)}, got {', '.join(mesh.axis_names)}; "
            "make it with make_mesh"
        )
    known = partial(jax.sharding.use_abstract_mesh, mesh.abstract_mesh)

    def init(key: KeyArray, models: Models) -> TrainState[Models]:
        return _replicate_rest(algorithm.init(key, place(models, mesh, rules)), mesh)

    def rollout(key: KeyArray, state: TrainState[Models], data: Data) -> tuple[Batch, Metrics]:
        if rollout_rules is not None:
            params, frozen = place((state.params, state.frozen), mesh, rollout_rules)
            state = TrainState(params, frozen, state.opt_state, state.extra, state.step)
        with known():
            batch, metrics = algorithm.rollout(key, state, place_batch(data, mesh))
        return place_batch(batch, mesh), metrics

    def loss(key: KeyArray, models: Models, batch: Batch) -> tuple[Terms, Metrics]:
        with known():
            return algorithm.loss(key, models, batch)

    return dataclasses.replace(algorithm, init=init, rollout=rollout, loss=loss)


@dataclasses.dataclass(frozen=True)
class PerDevice:
    """A kernel of attention that each device runs on its own rows and heads: the compiler, which
    divides other work as the arrays lie, cannot look into one.

    `with_attention(model, PerDevice(FlashAttention(), mesh))`. Error: rows that do not divide by
    `data` · `fsdp`, or key heads that do not by `tensor`.
    """

    attention: AttentionFn
    mesh: Mesh

    def __call__(
        self,
        q: Float[Array, "b t h k"],
        k: Float[Array, "b t n k"],
        v: Float[Array, "b t n k"],
        rows: Rows,
        window: int | Int[Array, ""] | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Float[Array, "b t h k"]:
        """As `layers.attention`."""
        heads, whole = P(BATCH_AXES, None, "tensor"), P(BATCH_AXES)
        told = (window,) if isinstance(window, jax.Array) else ()

        def own(q: Array, k: Array, v: Array, rows: Rows, *told: Array) -> Array:
            seen = told[0] if told else window
            return self.attention(q, k, v, rows, seen, scale=scale, softcap=softcap)

        return jax.shard_map(
            own,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, whole, *(P() for _ in told)),
            out_specs=heads,
            check_vma=False,
        )(q, k, v, rows, *told)
