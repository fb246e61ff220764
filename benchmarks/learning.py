"""How long until a robot can do something: wall time from the start of the process.

Hopper-v5 to a return of 1000 and HalfCheetah-v5 to 2000, ours beside PPO of SB3 and SBX with the
settings of the RL Zoo where they apply. After every `EVERY` steps training pauses, and a judge
that is the same for all plays 10 episodes in Gymnasium's own environments without exploration. Its
time counts for nobody; imports, compilation and everything else do. Nothing is cached from run to
run. Each run is a process of its own, and no two run at a time.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

BOUNDS = {"hopper_speedup": (4.0, 8.0)}
TASKS = {"hopper": ("Hopper-v5", 1000.0), "halfcheetah": ("HalfCheetah-v5", 2000.0)}
DISCOUNT = {"hopper": 0.999, "halfcheetah": 0.98}  # on all sides; those of the RL Zoo
SIDES = ("jrl", "sb3", "sb3:1", "sbx")  # torch on all cores, and on one: small networks prefer it
EVERY, EPISODES = 8192, 10
FIRST_SEED = 10  # ours was tuned on lower ones
NUM_ENVS, NUM_STEPS = 64, 32  # ours
SETTINGS: dict[str, Any] = {
    "hidden": (64, 64),
    "activation": "tanh",
    "init_std": 1.0,
    "learning_rate": 1e-3,
    "num_epochs": 8,
    "num_minibatches": 16,
    "reward_scale": 0.1,
}

Policy = Callable[[np.ndarray], np.ndarray]  # obs [B, D] -> actions [B, A] in the task's units


@dataclasses.dataclass(frozen=True)
class Limits:
    """How far a benchmark goes."""

    seeds: int
    share: float  # of the return to reach
    steps: int  # at most
    seconds: float  # at most


FULL = Limits(seeds=3, share=1.0, steps=2_000_000, seconds=900.0)
QUICK = Limits(seeds=1, share=0.2, steps=100_000, seconds=18.0)


def judge(name: str, policy: Policy) -> float:
    """The mean return of `EPISODES` episodes, the same starts every time."""
    import gymnasium

    envs = [gymnasium.make(name) for _ in range(EPISODES)]
    obs = [env.reset(seed=1000 + i)[0] for i, env in enumerate(envs)]
    returns, alive = np.zeros(EPISODES), np.ones(EPISODES, bool)
    while alive.any():
        actions = policy(np.asarray(obs, np.float32))
        for i in np.flatnonzero(alive):
            obs[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += float(reward)
            alive[i] = not (terminated or truncated)
    return float(returns.mean())


def ours(name: str, seed: int) -> Iterator[tuple[int, Policy]]:
    """Train with jrl: after every update, the steps so far and the policy."""
    import jax

    from jrl import envs, loops
    from jrl.agents import ppo

    env = envs.vector(name, NUM_ENVS)
    cfg = ppo.Config(discount=DISCOUNT[name], **SETTINGS)
    agent = ppo.make(cfg, env.spec)
    loop = loops.on_policy(agent, env, num_steps=NUM_STEPS)
    key = jax.random.key(seed)
    init, rollout, train = compiled(loop, key)
    act = jax.jit(lambda params, obs: agent.act(params, (), obs, key, explore=False)[1])
    state, steps = init(key), 0
    while True:
        state, _ = jax.block_until_ready(train(*rollout(state)))
        steps += NUM_ENVS * NUM_STEPS
        yield steps, functools.partial(unit, act, agent.policy(state.agent))


def compiled(loop: Any, key: Any) -> list[Callable[..., Any]]:
    """`init`, `rollout` and `train` of a loop, compiled at the same time: one thread each."""
    import jax

    state = jax.eval_shape(loop.init, key)
    _, data = jax.eval_shape(loop.rollout, state)
    parts = [(loop.train, (state, data)), (loop.rollout, (state,)), (loop.init, (key,))]
    lowered = [jax.jit(function).lower(*args) for function, args in parts]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda program: program.compile(), lowered))[::-1]


def unit(act: Callable[..., Any], params: Any, obs: np.ndarray) -> np.ndarray:
    """Both tasks' own actions are unit actions; an agent's are not clipped yet."""
    return np.clip(act(params, obs), -1.0, 1.0)


def theirs(side: str, name: str, seed: int) -> Iterator[tuple[int, Policy]]:
    """Train with SB3 or SBX: after every update, the steps so far and the policy."""
    import peers

    peer, _, threads = side.partition(":")
    if threads:
        peers.limit_torch(int(threads))

    env = peers.vector(TASKS[name][0], 8, processes=False, gamma=DISCOUNT[name])
    model = peers.trainer(
        peer,
        env,
        nets=(64, 64),
        act="tanh",
        n_steps=256,
        batch_size=64,
        n_epochs=10,
        gamma=DISCOUNT[name],
        seed=seed,
    )
    update = peers.updates(model)
    steps = 0
    while True:
        steps += update()
        yield steps, lambda obs: model.predict(env.normalize_obs(obs), deterministic=True)[0]


def worker(side: str, name: str, seed: int, begun: float, limits: Limits) -> dict[str, Any]:
    """Train until the judge is satisfied; `begun` is when the process was started."""
    title, goal = TASKS[name]
    run = ours(name, seed) if side == "jrl" else theirs(side, name, seed)
    spared, due, score, curve = 0.0, EVERY, -np.inf, []
    for steps, policy in run:
        used = time.time() - begun - spared
        if steps >= due:
            score, due = judge(title, policy), due + EVERY
            spared += time.time() - begun - spared - used
            curve.append((steps, round(used, 2), round(score, 1)))
        reached = score >= goal * limits.share
        if reached or steps >= limits.steps or used >= limits.seconds:
            break
    return {"reached": bool(reached), "steps": steps, "seconds": used, "curve": curve}


def play(side: str, name: str, seed: int, *, quick: bool) -> dict[str, Any]:
    """A worker in a process of its own."""
    command = [sys.executable, __file__, "--worker", side, name, str(seed), repr(time.time())]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
    )
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, *, quick: bool, sides: list[str]) -> tuple[float, dict[str, Any]]:
    """The best peer's median time over ours, and every run; one cut off counts up to there."""
    limits = QUICK if quick else FULL
    title, goal = TASKS[name]
    print(f"{title} to a return of {goal * limits.share:g}")
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for seed in range(FIRST_SEED, FIRST_SEED + limits.seeds):
        for side in sides:
            run = play(side, name, seed, quick=quick)
            runs[side].append(run)
            said = "" if run["reached"] else "  NOT REACHED"
            print(f"  {side} seed {seed}: {run['steps']:,} steps, {run['seconds']:.1f} s{said}")
    seconds = {s: statistics.median(run["seconds"] for run in each) for s, each in runs.items()}
    best = min(value for side, value in seconds.items() if side != "jrl")
    return best / seconds["jrl"], runs


def main(*, quick: bool, tasks: list[str]) -> None:
    import measure
    import peers

    sides = [side for side in SIDES if side.partition(":")[0] not in peers.missing()]
    if len(sides) < 2:
        raise SystemExit("no peer is installed: pip install '.[bench]'")
    figures, runs = {}, {}
    for name in tasks[:1] if quick else tasks:
        figures[f"{name}_speedup"], runs[name] = compare(name, quick=quick, sides=sides)
    bounds = {} if quick else BOUNDS
    measure.report("learning", figures, bounds, quick=quick, runs=runs)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, a fifth of the return")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--worker", nargs=4, metavar=("SIDE", "TASK", "SEED", "BEGUN"))
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    if args.worker:
        side, name, seed, begun = args.worker
        limits = QUICK if args.quick else FULL
        print(json.dumps(worker(side, name, int(seed), float(begun), limits)))
    else:
        main(quick=args.quick, tasks=args.tasks)
