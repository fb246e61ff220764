"""The parts of the five-line program: describe environments, policy and buffer, then bind them.

Groups are descriptions, names and config, so that a worker elsewhere can be told what to build;
`build_engine` binds them to one another in this process.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from jrl import loops, registry, rollout
from jrl.checks import ConfigError
from jrl.config import Config
from jrl.engine import Engine, Film
from jrl.types import Agent, Buffer, Env, Key, Spec, Tree


@dataclass(frozen=True)
class EnvGroup:
    """Robots of one kind: the section `env` of a config, whose `name` says which task."""

    section: Any

    def vector(self, num_envs: int, *, auto_reset: bool = True) -> Env:
        """A batch of robots: for training, or (not restarting by themselves) for evaluation."""
        envs = importlib.import_module("jrl.envs")
        return envs.vector(
            self.task.make(self.section),
            num_envs,
            auto_reset=auto_reset,
            action_repeat=self.section.action_repeat,
            frame_stack=self.section.frame_stack,
            episode_length=self.section.episode_length,
        )

    @property
    def task(self) -> ModuleType:
        """The module of the task."""
        return registry.load("environment", self.section.name, registry.ENVS)


@dataclass(frozen=True)
class PolicyGroup:
    """An algorithm: the section `agent` of a config, whose `name` says which."""

    section: Any

    def agent(self, spec: Spec) -> Agent:
        """The algorithm, bound to a robot."""
        module = registry.load("agent", self.section.name, registry.AGENTS)
        return module.make(self.section, spec)


def build_env_group(config: Config) -> EnvGroup:
    """Describe the environments of `config.env`."""
    return EnvGroup(config.env)


def build_policy_group(policy_cls: ModuleType, config: Config) -> PolicyGroup:
    """Describe the algorithm.

    Args:
        policy_cls: an agent module such as `jrl.agents.ppo`.
        config: whose section `agent` sets it up.

    Raises:
        ValueError: where the config names another algorithm than `policy_cls`.
    """
    named = registry.load("agent", config.agent.name, registry.AGENTS)
    if policy_cls is not named:
        raise ConfigError(
            f"this program trains {policy_cls.__name__!r}, but the config says agent.name: "
            f"{config.agent.name!r} ({named.__name__!r}). Change one of the two."
        )
    return PolicyGroup(config.agent)


def build_data_buffer(buffer_cls: Callable[[], Buffer], config: Config) -> Buffer:
    """Make the store of experience, such as `jrl.buffers.rollout`."""
    del config
    return buffer_cls()


def build_engine(
    env_group: EnvGroup, policy_group: PolicyGroup, buffer: Buffer, config: Config
) -> Engine:
    """Bind environments, algorithm and buffer into a run.

    Raises:
        ValueError: where the parts don't fit: kinds of data, sizes that don't divide.
    """
    train = config.train
    env = env_group.vector(train.num_envs)
    agent = policy_group.agent(env.spec)
    loop = loops.on_policy(
        agent, env, num_steps=train.num_steps, buffer=buffer, final_slots=train.final_slots
    )
    played = env_group.vector(config.eval.episodes, auto_reset=False)

    def evaluate(policy: Tree, key: Key) -> dict[str, jax.Array]:
        return rollout.evaluate(agent, played, policy, key)

    return Engine(loop, agent.policy, evaluate, _film(env_group, agent), config)


def _film(env_group: EnvGroup, agent: Agent) -> Film | None:
    """How to film a policy; None for tasks without a MuJoCo model."""
    if not hasattr(env_group.task, "model"):
        return None
    render = importlib.import_module("jrl.envs.render")
    env = env_group.vector(1, auto_reset=False)
    num_steps = env.spec.episode_length

    @jax.jit
    def play(policy: Tree, key: Key) -> tuple[Tree, jax.Array]:
        return rollout.play(agent, env, policy, key, render.qpos, num_steps=num_steps)

    def film(policy: Tree, key: Key, path: Path) -> str:
        qpos, alive = jax.device_get(play(policy, key))
        try:
            render.video(
                env_group.task.model(env_group.section),
                qpos[alive[:, 0], 0],
                path,
                fps=1.0 / env.spec.dt,
            )
        except render.RenderError as error:
            return f"no video: {error}"
        return f"video: {path}"

    return film
