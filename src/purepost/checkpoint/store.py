"""Checkpoints of a run, by Orbax: asynchronous, committed whole or not at all, kept by policy.

A checkpoint holds what a step changes: parameters, optimizer state, `extra`, the step. Frozen
leaves are what the models were made of, so a checkpoint holds their digests only, and restoring
checks that the models it is given are the same. Frozen leaves that changed since the run began (an
EMA teacher, a refreshed reference) are stored. No key is stored: the seed is in the manifest, and
keys are arithmetic.

The run that is resumed is bit-equal to the run never stopped, given the same versions, devices and
data.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast, final

import jax
import jax.numpy as jnp
import numpy as np

from .. import tree
from ..algorithm import TrainState
from ..mean import Metrics
from .digest import digests
from .manifest import Manifest, check_manifest, record
from .signals import Stop

Models = TypeVar("Models")
STATE, META = "state", "meta"  # the two items of a checkpoint
FROZEN = "frozen."
SHOWN = 10  # differences listed in an error


@final
class Checkpoints:
    """The checkpoints of one run in one directory; a context manager.

    with Checkpoints(directory, every=10, manifest=manifest) as checkpoints:
        state = checkpoints.restore(algorithm.init(key, models))
        for step, state, metrics in checkpoints.saving(train(algorithm, state, ...)):
            tracker.write(step, metrics)
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int,
        keep: int = 3,
        keep_every: int | None = None,
        manifest: Manifest | None = None,
        allow: Collection[str] = (),
        store_frozen: str | None = None,
    ) -> None:
        """Checkpoints every `every` steps, of which the last `keep` stay, and of those every
        `keep_every` steps all.

        If the directory holds a run whose manifest differs in config, seed or data, that is a
        ValueError, unless `allow` names the difference ("config.steps"). `store_frozen` is a
        regular expression on the paths of frozen leaves to store always.
        """
        for name, n in dict(every=every, keep=keep, keep_every=keep_every).items():
            if n is not None and n < 1:
                raise ValueError(f"expected {name} ≥ 1, got {n}")
        self.directory = Path(directory).absolute()
        self.every, self.keep, self.keep_every = every, keep, keep_every
        self.manifest = manifest
        self.store_frozen = store_frozen
        if manifest is not None:
            check_manifest(self.directory, manifest, allow)
        self._manager: Any = None
        self._initial: dict[str, str] | None = None

    def restore(self, state: TrainState[Models]) -> TrainState[Models]:
        """The latest committed state, placed as `state` is; `state` itself if there is none yet.

        To be called once, with the state that `init` gave. Raises ValueError, before anything is
        written, if the checkpoint is of another model: names, shapes or types that differ, or
        other frozen weights. Nothing is cast.
        """
        _named_arrays(state, {})
        initial = digests(state.frozen)
        step = None
        if self.directory.is_dir():
            self._manager = self._open()
            step = self._manager.latest_step()
        if step is not None:
            state = self._read(step, state, initial)
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._manager is None:
            self._manager = self._open()
        if self.manifest is not None:
            record(self.directory, self.manifest, step or 0)
        self._initial = initial
        return state

    def save(self, state: TrainState[Models], *, force: bool = False) -> bool:
        """Begin to save if the state's step is a multiple of `every`, or if forced.

        Returns whether it did. The state may be used up at once. An error of the save before, such
        as a full disk, is raised here or by `wait`; older checkpoints are deleted only once the
        new one is committed.
        """
        if self._initial is None:
            raise ValueError("expected `restore(state)` before the first save; call it")
        step = int(state.step)
        if not (force or step % self.every == 0) or self._manager.latest_step() == step:
            return False
        import orbax.checkpoint as ocp

        now = digests(state.frozen)
        stored = {
            name: value
            for name, value in now.items()
            if value != self._initial.get(name)
            or (self.store_frozen is not None and re.search(self.store_frozen, name))
        }
        arrays = _named_arrays(state, stored)
        if any(d.platform == "cpu" for x in arrays.values() for d in x.devices()):
            # There the host's view of an array is the array, which the next step overwrites.
            arrays = tree.copy(arrays)
        meta = {
            "frozen": self._initial,
            "stored": sorted(stored),
            "weak": sorted(name for name, x in arrays.items() if x.weak_type),
        }
        items = {STATE: ocp.args.StandardSave(arrays), META: ocp.args.JsonSave(meta)}
        with self._recovering() as manager:
            manager.save(step, args=ocp.args.Composite(**items), force=True)
        return True

    def saving(
        self,
        steps: Iterator[tuple[int, TrainState[Models], Metrics]],
        stop: Stop | None = None,
    ) -> Iterator[tuple[int, TrainState[Models], Metrics]]:
        """Pass on what `train` yields, saving every state after its step was dealt with.

        The last state is saved as well. When `stop` is requested, the state is saved and the loop
        ends. A step's metrics are thus written before its checkpoint: a killed run finds no gap.
        """
        last: TrainState[Models] | None = None
        for step, state, metrics in steps:
            yield step, state, metrics
            last = state
            if stop is not None and stop.requested:
                break
            self.save(state)
        if last is not None:
            self.save(last, force=True)
        self.wait()

    def wait(self) -> None:
        """Until the save that was begun is committed; its error, if it failed, is raised."""
        if self._manager is not None:
            with self._recovering() as manager:
                manager.wait_until_finished()
                manager.check_for_errors()

    def close(self) -> None:
        """Wait, and give back what saving took."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    @contextmanager
    def _recovering(self) -> Iterator[Any]:
        """The manager; after an error a new one, which tells the error no second time and can save
        again, once there is room.
        """
        try:
            yield self._manager
        except Exception:
            with suppress(Exception):
                self._manager.close()
            self._manager = self._open()
            raise

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(self) -> Any:
        """Orbax's manager of the directory, which must exist; opening changes nothing in it."""
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        kept: list[Any] = [policies.preservation_policy.LatestN(self.keep)]
        if self.keep_every is not None:
            kept.append(policies.preservation_policy.EveryNSteps(self.keep_every))
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={
                STATE: ocp.StandardCheckpointHandler(),
                META: ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                create=False,
                preservation_policy=policies.AnyPreservationPolicy(kept),
            ),
        )

    def _read(
        self, step: int, state: TrainState[Models], initial: dict[str, str]
    ) -> TrainState[Models]:
        import orbax.checkpoint as ocp

        args: dict[str, Any] = {META: ocp.args.JsonRestore()}
        meta = self._manager.restore(step, args=ocp.args.Composite(**args))[META]
        found = {
            name: (np.dtype(x.dtype).name, tuple(x.shape))
            for name, x in self._manager.item_metadata(step)[STATE].items()
        }
        stored = meta["stored"]
        where = f"{self.directory} at step {step}"
        _check_frozen(where, initial, meta["frozen"], stored)
        template = _named_arrays(state, stored)
        _check_arrays(where, template, found)
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in template.items()
        }
        args = {STATE: ocp.args.StandardRestore(abstract)}
        arrays = self._manager.restore(step, args=ocp.args.Composite(**args))[STATE]
        return _replace(
            state, {n: _like(arrays[n], x, n in meta["weak"]) for n, x in template.items()}
        )


def _parts(state: TrainState) -> dict[str, Any]:
    return {
        "params": state.params,
        "opt_state": state.opt_state,
        "extra": state.extra,
        "step": state.step,
        "frozen": state.frozen,
    }


def _named_arrays(state: TrainState, stored: Collection[str]) -> dict[str, jax.Array]:
    """The leaves of a state that a checkpoint holds, by name."""
    arrays = {}
    for name, leaf in tree.named_leaves(_parts(state)):
        if name.startswith(FROZEN) and name.removeprefix(FROZEN) not in stored:
            continue
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise TypeError(
                f"expected every leaf that a step changes to be an array, and no key, got {name}: "
                f"{leaf!r:.80}; make it jnp.asarray(..., dtype), or derive keys from the step"
            )
        if leaf.weak_type and leaf.ndim:
            raise TypeError(
                f"expected an array with a dtype of its own, got a weakly typed one in {name}; "
                "name the dtype where it is made: jnp.full(shape, value, dtype)"
            )
        arrays[name] = leaf
    return arrays


def _replace(state: TrainState[Models], arrays: dict[str, jax.Array]) -> TrainState[Models]:
    new = tree.map_named(lambda name, x: arrays.get(name, x), _parts(state))
    return cast(
        TrainState[Models],
        TrainState(new["params"], new["frozen"], new["opt_state"], new["extra"], new["step"]),
    )


def _like(x: jax.Array, template: jax.Array, weak: bool) -> jax.Array:
    """What was read, bound to its devices only if the template is, and typed as weakly as what was
    saved: jit tells these apart.
    """
    if weak:
        return jnp.asarray(x.item())
    return x if template.committed else jnp.array(np.asarray(x), copy=True)


def _listed(faults: list[str]) -> str:
    more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return "; ".join(faults[:SHOWN]) + more


def _check_arrays(
    where: str, template: dict[str, jax.Array], found: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    def show(kind: tuple[str, tuple[int, ...]] | None) -> str:
        return "nothing" if kind is None else f"{kind[0]}{list(kind[1])}"

    expected = {name: (x.dtype.name, x.shape) for name, x in template.items()}
    faults = [
        f"{name}: expected {show(expected.get(name))}, got {show(found.get(name))}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if faults:
        raise ValueError(
            f"expected a checkpoint of this model and optimizer in {where}, got another's: "
            f"{_listed(faults)}; take another directory, or the model it was made with"
        )


def _check_frozen(
    where: str, initial: dict[str, str], saved: dict[str, str], stored: Collection[str]
) -> None:
    faults = [
        f"{name}: expected {saved.get(name, 'nothing')}, got {initial.get(name, 'nothing')}"
        for name in sorted(initial.keys() | saved.keys())
        if initial.get(name) != saved.get(name) and name not in stored
    ]
    if faults:
        raise ValueError(
            f"expected the frozen weights that the run in {where} began with, got others: "
            f"{_listed(faults)}; load the same base model, with the same key"
        )
