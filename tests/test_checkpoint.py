"""Checkpoints: whole or not at all, never cast, of the right model; manifests; orderly stops."""

import errno
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from jaxtyping import Array, Float

from purepost import TrainState, make_init
from purepost.checkpoint import Checkpoints, make_manifest, stop_on_sigterm
from purepost.checkpoint.digest import digests


class Pair(eqx.Module):
    """A trained matrix and a frozen one."""

    policy: Float[Array, "i o"]
    reference: Float[Array, "i o"]


@dataclass(frozen=True)
class Config:
    """A config with parts of every kind."""

    steps: int = 4
    learning_rate: float = 0.1
    sizes: tuple[int, ...] = (2, 3)
    data: Path = Path("data")


def fresh(*, width: int = 3, dtype=jnp.float32, optimizer=None, reference: float = 1.0):
    models = Pair(
        jnp.arange(2 * width, dtype=dtype).reshape(2, width), jnp.full((2, width), reference, dtype)
    )
    init = make_init(
        optimizer or optax.adam(0.1),
        trainable=lambda models: Pair(True, False),  # pyright: ignore[reportArgumentType]
        extra=lambda models: {"beta": jnp.asarray(0.5, jnp.float32), "weak": jnp.asarray(0.25)},
    )
    return init(jr.key(0), models)


def at(step: int, **changes) -> TrainState:
    """A state some steps on: every number moved by the step."""
    state = fresh(**changes)
    moved = jax.tree.map(lambda x: x + step, (state.params, state.opt_state, state.extra))
    return TrainState(moved[0], state.frozen, moved[1], moved[2], jnp.asarray(step, jnp.int32))


def bits(tree) -> list[tuple]:
    return [
        (np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes(), x.weak_type)
        for x in jax.tree.leaves(tree)
    ]


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    found = sorted(directory.rglob("*"))
    return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in found}


def steps_in(directory: Path) -> list[int]:
    return sorted(int(p.name) for p in directory.iterdir() if p.name.isdigit())


def test_restores_every_bit_type_and_step(tmp_path) -> None:
    saved = at(10, dtype=jnp.bfloat16)
    with Checkpoints(tmp_path / "run", every=10) as checkpoints:
        first = fresh(dtype=jnp.bfloat16)
        assert checkpoints.restore(first) is first
        assert not checkpoints.save(at(5, dtype=jnp.bfloat16))
        assert checkpoints.save(saved)
        assert not checkpoints.save(saved)  # it is there already
    with Checkpoints(tmp_path / "run", every=10) as checkpoints:
        restored = checkpoints.restore(fresh(dtype=jnp.bfloat16))
    assert bits(restored) == bits(saved)
    assert int(restored.step) == 10
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    assert restored.params.policy.committed == saved.params.policy.committed


def test_the_state_may_be_used_up_while_it_is_being_saved(tmp_path) -> None:
    overwrite = jax.jit(lambda x: jax.tree.map(lambda a: a * 0 - 1, x), donate_argnums=0)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        state = fresh(width=500_000)
        checkpoints.restore(state)
        expected = bits(state.params)
        checkpoints.save(state)
        params = overwrite(state.params)
        for _ in range(3):
            params = overwrite(params)
        jax.block_until_ready(params)
    with Checkpoints(tmp_path, every=1) as checkpoints:
        assert bits(checkpoints.restore(fresh(width=500_000)).params) == expected


def test_keeps_the_last_and_every_nth(tmp_path) -> None:
    with Checkpoints(tmp_path, every=1, keep=2, keep_every=4) as checkpoints:
        checkpoints.restore(fresh())
        for step in range(1, 8):
            checkpoints.save(at(step))
    assert steps_in(tmp_path) == [4, 6, 7]


def test_leftovers_of_a_killed_save_are_ignored_and_saved_over(tmp_path) -> None:
    with Checkpoints(tmp_path, every=10, keep=1) as checkpoints:
        checkpoints.restore(fresh())
        checkpoints.save(at(10))
    torn = tmp_path / "20.orbax-checkpoint-tmp" / "state"
    torn.mkdir(parents=True)
    (torn / "junk").write_bytes(b"half")
    with Checkpoints(tmp_path, every=10, keep=1) as checkpoints:
        assert bits(checkpoints.restore(fresh())) == bits(at(10))
        checkpoints.save(at(20))
        checkpoints.wait()
        assert steps_in(tmp_path) == [20]
        assert not torn.exists()
    with Checkpoints(tmp_path, every=10) as checkpoints:
        assert bits(checkpoints.restore(fresh())) == bits(at(20))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            dict(dtype=jnp.bfloat16),
            r"params.policy: expected bfloat16\[2, 3\], got float32\[2, 3\]",
        ),
        (dict(width=4), r"params.policy: expected float32\[2, 4\], got float32\[2, 3\]"),
        (
            dict(optimizer=optax.sgd(0.1, momentum=0.9)),
            r"opt_state.inner.0.count: expected nothing, got int32\[\]",
        ),
        (dict(reference=1.5), "the frozen weights that the run .* began with"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error_and_stays(tmp_path, other, message) -> None:
    with Checkpoints(tmp_path, every=1, store_frozen="^$" if "reference" in other else ".") as c:
        c.restore(fresh())
        c.save(at(1))
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    before = listing(tmp_path)
    with Checkpoints(tmp_path, every=1) as checkpoints, pytest.raises(ValueError, match=message):
        checkpoints.restore(fresh(**other))
    assert listing(tmp_path) == before


def test_frozen_leaves_that_changed_are_stored(tmp_path) -> None:
    size = {}
    for name, reference in (("same", 1.0), ("moved", 7.0)):
        state = at(3)
        models = Pair(state.frozen.policy, jnp.full((2, 3), reference, jnp.float32))
        moved = replace_frozen(state, models)
        with Checkpoints(tmp_path / name, every=1) as checkpoints:
            checkpoints.restore(fresh())
            checkpoints.save(moved)
        with Checkpoints(tmp_path / name, every=1) as checkpoints:
            restored = checkpoints.restore(fresh())
            assert bits(restored) == bits(moved)
            checkpoints.save(replace_frozen(at(4), restored.frozen))
        with Checkpoints(tmp_path / name, every=1) as checkpoints:
            assert bits(checkpoints.restore(fresh()).frozen) == bits(models)
        meta = json.loads((tmp_path / name / "4" / "meta" / "metadata").read_text())
        size[name] = meta["stored"]
    assert size == {"same": [], "moved": ["reference"]}


def replace_frozen(state: TrainState, frozen) -> TrainState:
    return TrainState(state.params, frozen, state.opt_state, state.extra, state.step)


def test_keys_and_python_numbers_are_refused(tmp_path) -> None:
    for extra in (jr.key(0), 0.5):
        state = fresh()
        state = TrainState(state.params, state.frozen, state.opt_state, extra, state.step)
        with (
            Checkpoints(tmp_path / "run", every=1) as checkpoints,
            pytest.raises(TypeError, match="an array, and no key, got extra"),
        ):
            checkpoints.restore(state)
    assert not (tmp_path / "run").exists()


def test_bad_settings_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="expected every ≥ 1, got 0"):
        Checkpoints(tmp_path, every=0)
    with pytest.raises(ValueError, match="expected keep ≥ 1"):
        Checkpoints(tmp_path, every=1, keep=0)
    with pytest.raises(ValueError, match="before the first save"):
        Checkpoints(tmp_path, every=1).save(fresh())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "bool", "uint16"])
def test_digests_tell_every_bit_and_place(dtype) -> None:
    x = jnp.asarray([[0, 1, 1], [1, 0, 1]], dtype)
    same = digests({"x": x, "y": [x]})
    assert same["x"] == same["y.0"] == digests({"x": jnp.array(x, copy=True)})["x"]
    others = [x[::-1], x.T, x.at[0, 0].set(x[0, 1]), x[:, :2], x.reshape(3, 2), x.reshape(6)]
    found = {digests(other)[""] for other in others} | {same["x"]}
    assert len(found) == len(others) + 1


def test_disk_full_raises_and_the_older_checkpoint_stays(tmp_path) -> None:
    """Files may not grow beyond a limit, in a process of their own."""
    script = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_checkpoint import Checkpoints, at, fresh
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
big = dict(width=300_000)
with Checkpoints({str(tmp_path)!r}, every=10, keep=1) as checkpoints:
    checkpoints.restore(fresh(**big))
    checkpoints.save(at(10, **big))
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        checkpoints.save(at(20, **big))
        checkpoints.wait()
    except Exception as error:
        print("raised", type(error).__name__, error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    print([path.name for path in checkpoints.directory.iterdir() if path.name.isdigit()])
    checkpoints.save(at(30, **big))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert os.strerror(errno.EFBIG) in run.stdout, run.stdout
    assert run.stdout.endswith("['10']\n")
    big = dict(width=300_000)
    with Checkpoints(tmp_path, every=10) as checkpoints:  # there was room for 30 again
        assert bits(checkpoints.restore(fresh(**big))) == bits(at(30, **big))


def test_restores_onto_the_shards_it_is_given(tmp_path) -> None:
    """Saved whole, restored on 4 devices, saved from there, restored whole: in its own process."""
    script = f"""
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax
from jax.sharding import NamedSharding, PartitionSpec
from test_checkpoint import Checkpoints, at, bits, digests, fresh
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split = NamedSharding(mesh, PartitionSpec(None, "data"))
def shard(state):
    return jax.tree.map(lambda x: jax.device_put(x, split) if x.ndim == 2 else x, state)
def run(step, template):
    with Checkpoints({str(tmp_path)!r}, every=1) as checkpoints:
        restored = checkpoints.restore(template)
        assert step == 0 or bits(restored) == bits(at(step, width=8))
        for got, wanted in zip(*map(jax.tree.leaves, (restored, template)), strict=True):
            assert got.sharding == wanted.sharding and got.committed == wanted.committed
        later = at(step + 1, width=8)
        checkpoints.save(shard(later) if template.params.policy.committed else later)
assert digests(fresh(width=8)) == digests(shard(fresh(width=8)))
whole, sharded = fresh(width=8), shard(fresh(width=8))
assert len(sharded.params.policy.devices()) == 4 and not sharded.step.committed
run(0, whole), run(1, sharded), run(2, sharded), run(3, whole)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def manifest(config=None, seed: int = 1, data: str = "d"):
    return make_manifest(config or Config(), seed=seed, data_hash=data)


def test_manifest_says_what_ran_where(tmp_path) -> None:
    with Checkpoints(tmp_path, every=1, manifest=manifest()) as checkpoints:
        checkpoints.restore(fresh())
        checkpoints.save(at(1))
    content = json.loads((tmp_path / "manifest.json").read_text())
    config = {"steps": 4, "learning_rate": 0.1, "sizes": [2, 3], "data": "data"}
    assert content["config"] == config
    assert content["seed"] == 1 and content["data_hash"] == "d" and content["resumed"] == []
    assert content["versions"]["jax"] == jax.__version__
    assert content["versions"]["python"] == sys.version.split()[0]
    assert content["device"] == {"kind": jax.devices()[0].device_kind, "count": len(jax.devices())}
    with Checkpoints(tmp_path, every=1, manifest=manifest()) as checkpoints:
        checkpoints.restore(fresh())
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert [(r["step"], r["config"]) for r in content["resumed"]] == [(1, config)]


def test_another_run_in_the_same_place_is_an_error_that_lists_the_differences(tmp_path) -> None:
    with Checkpoints(tmp_path, every=1, manifest=manifest()) as checkpoints:
        checkpoints.restore(fresh())
        checkpoints.save(at(1))
    before = listing(tmp_path)
    other = manifest(replace(Config(), steps=8, sizes=(2, 4)), seed=2, data="e")
    with pytest.raises(ValueError) as caught:
        Checkpoints(tmp_path, every=1, manifest=other)
    for part in (
        "config.steps: 4 then, 8 now",
        "config.sizes: [2, 3] then, [2, 4] now",
        "seed: 1 then, 2 now",
        "data_hash: d then, e now",
    ):
        assert part in str(caught.value)
    longer = manifest(replace(Config(), steps=8))
    with pytest.raises(ValueError, match="config.steps"):
        Checkpoints(tmp_path, every=1, manifest=longer, allow=["config.step", "seed"])
    assert listing(tmp_path) == before
    with Checkpoints(tmp_path, every=1, manifest=longer, allow=["config.steps"]) as checkpoints:
        assert int(checkpoints.restore(fresh()).step) == 1
    Checkpoints(tmp_path, every=1, manifest=longer)  # what it last ran with
    Checkpoints(tmp_path, every=1, manifest=other, allow=["config", "seed", "data_hash"])


def test_manifest_knows_the_git_revision(tmp_path) -> None:
    def git(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ("git", "-C", str(tmp_path), *identity, *command)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert make_manifest({}, seed=0, data_hash="", source=tmp_path).git is None
    git("init", "-q")
    (tmp_path / "experiment.py").write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    source = tmp_path / "experiment.py"
    revision = git("rev-parse", "HEAD")
    clean = make_manifest({}, seed=0, data_hash="", source=source)
    assert clean.git == {"revision": revision, "dirty": False}
    source.write_text("2")
    dirty = make_manifest({}, seed=0, data_hash="", source=source)
    assert dirty.git == {"revision": revision, "dirty": True}


def test_manifest_of_a_config_that_is_none() -> None:
    with pytest.raises(TypeError, match="a dataclass or a mapping, got 3"):
        make_manifest(3, seed=0, data_hash="")


def test_sigterm_ends_the_loop_after_its_step_with_a_checkpoint(tmp_path) -> None:
    seen = []

    def steps():
        for step in range(1, 100):
            yield step, at(step), {}

    with Checkpoints(tmp_path, every=1000) as checkpoints, stop_on_sigterm() as stop:
        checkpoints.restore(fresh())
        for step, _, _ in checkpoints.saving(steps(), stop):
            seen.append(step)
            if step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second one kills
    assert seen == [1, 2, 3]
    with Checkpoints(tmp_path, every=1000) as checkpoints:
        assert bits(checkpoints.restore(fresh())) == bits(at(3))


def test_the_last_state_is_saved(tmp_path) -> None:
    with Checkpoints(tmp_path, every=4) as checkpoints:
        checkpoints.restore(fresh())
        for _ in checkpoints.saving((step, at(step), {}) for step in range(1, 7)):
            pass
        assert steps_in(tmp_path) == [4, 6]
