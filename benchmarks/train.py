"""How fast PPO trains, end to end: beside other libraries, and beside bare physics.

1. Humanoid-v5 as Gymnasium defines it (348 observations), networks of 3 x 256 units on both sides,
   the same rollout size, epochs and minibatches, whitened observations; over the best of the peers.
2. A pinned model (Gymnasium's humanoid, Euler, Newton with 8 iterations, 5 substeps of 3 ms) with
   the task of `humanoid_fast`: 256 environments x 32 steps, 4 epochs x 8 minibatches;
   over `Batch.step` with restarts on the same model.
"""

import functools
import hashlib
import os
import statistics
from collections.abc import Callable

import jax
import measure
import mujoco
import peers
import raw

from jrl import envs, loops
from jrl.agents import ppo
from jrl.envs import humanoid_fast, task
from jrl.types import Env

BOUNDS = {"over_best_peer": (1.8, 2.5), "train_over_raw": (0.38, 0.5)}
HIDDEN, EPOCHS, MINIBATCHES, NUM_STEPS, SUBSTEPS = (256, 256, 256), 4, 8, 32, 5
PEER_ENVS = 8
CORES = len(os.sched_getaffinity(0))
PINNED = "453d7dde"  # the first digits of the SHA-256 of the pinned model's XML


def ours(env: Env, num_envs: int, learning_rate: float = 3e-4) -> Callable[[], int]:
    """A function that takes one rollout and one update as the engine does, and counts steps."""
    cfg = ppo.Config(
        hidden=HIDDEN,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        learning_rate=learning_rate,
    )
    loop = loops.on_policy(ppo.make(cfg, env.spec), env, num_steps=NUM_STEPS)
    rollout = jax.jit(loop.rollout, donate_argnums=0)
    train = jax.jit(loop.train, donate_argnums=0)
    state = jax.jit(loop.init)(jax.random.key(0))

    def work() -> int:
        nonlocal state
        state, metrics = train(*rollout(state))
        jax.block_until_ready((state, metrics))
        return NUM_STEPS * num_envs

    return work


def theirs(
    peer: str, rollout: int, *, processes: bool = False, threads: int = CORES
) -> Callable[[], int]:
    """The same work by "sb3" or "sbx"; `threads` are torch's."""
    env = peers.vector("Humanoid-v5", PEER_ENVS, processes=processes, norm_reward=False)
    model = peers.trainer(
        peer,
        env,
        nets=HIDDEN,
        act="swish",
        n_steps=rollout // PEER_ENVS,
        batch_size=rollout // MINIBATCHES,
        n_epochs=EPOCHS,
    )
    update = peers.updates(model)

    def work() -> int:
        if peer == "sb3":
            peers.limit_torch(threads)
        return update()

    return work


def recommended(peer: str) -> Callable[[], int]:
    """The library's defaults: 2048 steps of one environment, batches of 64, 10 epochs."""
    env = peers.vector("Humanoid-v5", 1, processes=False)
    return peers.updates(peers.trainer(peer, env, nets=HIDDEN, act="swish"))


def pinned_model() -> mujoco.MjModel:
    """The model that `train_over_raw` is defined on.

    Raises:
        RuntimeError: if it is no longer the one earlier figures were measured on.
    """
    spec = mujoco.MjSpec.from_file(str(task.asset("humanoid.xml")))
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_EULER
    spec.option.solver = mujoco.mjtSolver.mjSOL_NEWTON
    spec.option.iterations = 8
    spec.option.timestep = 0.003
    model = spec.compile()
    found = hashlib.sha256(spec.to_xml().encode()).hexdigest()
    if not found.startswith(PINNED):
        raise RuntimeError(
            f"the pinned humanoid changed: its XML hashes to {found[:8]}, not {PINNED}. Gymnasium "
            "or MuJoCo was updated; figures are not comparable with earlier ones. Set PINNED anew."
        )
    return model


def pinned_env(model: mujoco.MjModel) -> Env:
    """The walking task of `humanoid_fast` on another model."""
    cfg = humanoid_fast.Config()
    engine = task.engine(model, cfg, substeps=SUBSTEPS, fields=humanoid_fast.FIELDS)
    return task.make(
        engine,
        start=functools.partial(task.uniform_start, model, cfg.reset_noise),
        observe=humanoid_fast.observe,
        reward=functools.partial(humanoid_fast.reward, cfg, engine.dt),
        terminated=functools.partial(humanoid_fast.terminated, cfg),
        episode_length=cfg.episode_length,
    )


def beside_peers(*, quick: bool) -> float:
    """Ours over the best peer, on Humanoid-v5."""
    num_envs = 64 if quick else 256
    rollout = num_envs * NUM_STEPS
    sides = {"jrl": ours(envs.vector("humanoid", num_envs), num_envs)}
    for peer in ("sb3", "sbx"):
        if peer in peers.missing():
            continue
        sides[f"{peer}, DummyVecEnv"] = theirs(peer, rollout)
        if peer == "sb3":
            sides["sb3, DummyVecEnv, one torch thread"] = theirs(peer, rollout, threads=1)
        if not quick:
            sides[f"{peer}, SubprocVecEnv"] = theirs(peer, rollout, processes=True)
            sides[f"{peer}, recommended"] = recommended(peer)
    print(f"PPO on Humanoid-v5, {rollout} steps per rollout, env-steps/s")
    rates = measure.interleave(sides, reps=3 if quick else 7, seconds=0.0 if quick else 4.0)
    measure.show(rates)
    others = {name: statistics.median(each) for name, each in rates.items() if name != "jrl"}
    if not others:
        raise SystemExit("no peer is installed: pip install '.[bench]'")
    return measure.ratio(rates, "jrl", max(others, key=lambda name: others[name]))


def beside_raw(*, quick: bool) -> float:
    """Ours over bare physics, on the pinned model."""
    num_envs, model = 256, pinned_model()
    sides = {
        "raw Batch.step": raw.humanoids(model, num_envs, substeps=SUBSTEPS),
        # Rate 0: a humanoid that learns to stand has more contacts, so its physics costs more.
        "jrl": ours(envs.vector(pinned_env(model), num_envs), num_envs, learning_rate=0.0),
    }
    print("PPO on the pinned model, env-steps/s")
    rates = measure.interleave(sides, reps=7 if quick else 21, seconds=0.8 if quick else 2.0)
    measure.show(rates)
    return measure.ratio(rates, "jrl", "raw Batch.step")


def main(*, quick: bool) -> None:
    figures = {
        "over_best_peer": beside_peers(quick=quick),
        "train_over_raw": beside_raw(quick=quick),
    }
    measure.report("train", figures, BOUNDS, quick=quick)


if __name__ == "__main__":
    main(quick=measure.arguments(__doc__).quick)
