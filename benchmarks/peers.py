"""PPO of other libraries, set up to do a stated amount of work per update."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

MODULES = {"sb3": "stable_baselines3", "sbx": "sbx"}


def missing() -> list[str]:
    """The peers that aren't installed here."""
    return [name for name, module in MODULES.items() if importlib.util.find_spec(module) is None]


def algorithm(peer: str) -> Any:
    """The PPO class of "sb3" or "sbx", which share one interface."""
    return importlib.import_module(MODULES[peer]).PPO


def activation(peer: str, name: str) -> Any:
    """A non-linearity as the peer's networks take it."""
    if peer == "sb3":
        import torch

        return {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "swish": torch.nn.SiLU}[name]
    import flax.linen as nn

    return {"tanh": nn.tanh, "relu": nn.relu, "swish": nn.swish}[name]


def limit_torch(threads: int) -> None:
    """Let torch use that many cores; with small networks its threads mostly wait for each other."""
    import torch

    torch.set_num_threads(threads)


def vector(task: str, num_envs: int, *, processes: bool, **normalize: Any) -> Any:
    """`num_envs` of Gymnasium's environments, whitened by VecNormalize (its options follow)."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize

    kind = SubprocVecEnv if processes else DummyVecEnv
    return VecNormalize(make_vec_env(task, num_envs, seed=0, vec_env_cls=kind), **normalize)


def trainer(peer: str, env: Any, *, nets: tuple[int, ...], act: str, **options: Any) -> Any:
    """PPO of "sb3" or "sbx" on `env`, on the CPU, actor and critic of the same widths."""
    policy = {
        "net_arch": {"pi": list(nets), "vf": list(nets)},
        "activation_fn": activation(peer, act),
    }
    return algorithm(peer)(
        "MlpPolicy", env, policy_kwargs=policy, device="cpu", verbose=0, **options
    )


def updates(model: Any) -> Callable[[], int]:
    """A function that takes one rollout and one update, and counts environment steps."""
    steps = model.n_steps * model.n_envs

    def work() -> int:
        model.learn(total_timesteps=steps, reset_num_timesteps=False)
        return steps

    return work
