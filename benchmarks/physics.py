"""How much of native physics' speed is left once it runs inside a jitted rollout with a policy.

Raw: `Batch.step`, random controls, restarts of the fallen, on the model of `humanoid_fast`.
Rollout: `rollout.unroll` of PPO with three layers of 256 units, on the same model, substeps and
bound fields, restarts included.
"""

import os
from collections.abc import Callable

import jax
import measure
import raw

from jrl import envs, rollout
from jrl.agents import ppo
from jrl.envs import humanoid_fast
from jrl.types import Env

BOUNDS = {"rollout_over_raw": (0.85, 0.90)}
NUM_STEPS = 32


def native_rollout(env: Env, num_envs: int, hidden: tuple[int, ...]) -> Callable[[], int]:
    """A function that plays one rollout, and counts its steps."""
    agent = ppo.make(ppo.Config(hidden=hidden, init_std=raw.STD), env.spec)
    key = jax.random.key(0)
    policy = agent.policy(agent.init(key))
    actor = jax.jit(lambda key: rollout.start(agent, env, key))(key)
    unroll = jax.jit(
        lambda actor, key: rollout.unroll(agent, env, policy, actor, key, num_steps=NUM_STEPS),
        donate_argnums=0,
    )

    def work() -> int:
        nonlocal actor, key
        key, now = jax.random.split(key)
        actor, data = unroll(actor, now)
        jax.block_until_ready(data)
        return NUM_STEPS * num_envs

    return work


def main(*, quick: bool) -> None:
    cfg = humanoid_fast.Config()
    model = humanoid_fast.model(cfg)
    cores = len(os.sched_getaffinity(0))
    sizes = (64, 256) if quick else (64, 256, 1024, 4096)
    threads = sorted({1, cores})
    sides = {
        f"raw N={n} threads={t}": raw.humanoids(model, n, substeps=cfg.substeps, threads=t)
        for n in sizes
        for t in threads
    }
    reps, seconds = (3, 0.3) if quick else (5, 1.0)
    print("raw Batch.step, env-steps/s")
    measure.show(measure.interleave(sides, reps=reps, seconds=seconds))

    num_envs = 256
    pair = {
        "raw": raw.humanoids(model, num_envs, substeps=cfg.substeps),
        "rollout": native_rollout(
            envs.vector("humanoid_fast", num_envs), num_envs, (256, 256, 256)
        ),
    }
    reps = 11 if quick else 31
    for work in pair.values():  # past the first falls, which come all at once
        for _ in range(10):
            work()
    rates = measure.interleave(pair, reps=reps, seconds=0.8)
    print(f"a rollout with a 3 x 256 policy beside it, N={num_envs} threads={cores}")
    measure.show(rates)
    figures = {"rollout_over_raw": measure.ratio(rates, "rollout", "raw")}
    measure.report("physics", figures, BOUNDS)


if __name__ == "__main__":
    main(quick=measure.arguments(__doc__).quick)
