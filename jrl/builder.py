"""The parts of the five-line program: describe environments, policy and buffer, then bind them.

Groups are descriptions, names and config, so that a worker elsewhere can be told what to build;
`build_engine` binds them to one another in this process.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from jrl import config as configs
from jrl import host, loops, registry, rollout
from jrl.checks import ConfigError
from jrl.config import Config
from jrl.engine import Engine, Film
from jrl.parts import Part
from jrl.types import Agent, Buffer, Env, HostAgent, HostEnv, Key, Spec, Tree


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
    def on_host(self) -> bool:
        """Whether the task is a simulator that is not JAX."""
        return self.task.on_host

    def simulator(self, num_envs: int) -> HostEnv:
        """A simulator on the host with robots that restart by themselves."""
        if not self.on_host:
            return host.from_env(self.vector(num_envs), num_envs)
        for field in ("action_repeat", "frame_stack", "episode_length"):
            if getattr(self.section, field) > (field == "action_repeat"):
                raise ConfigError(
                    f"env.{field} is for environments in JAX; {self.section.name} is a simulator "
                    "on the host, which has to bring that itself."
                )
        return self.task.make(self.section, num_envs=num_envs)

    @property
    def task(self) -> Part:
        """What makes one robot."""
        return registry.load("env", self.section.name)


@dataclass(frozen=True)
class PolicyGroup:
    """An algorithm: the section `agent` of a config, whose `name` says which."""

    section: Any

    def agent(self, spec: Spec) -> Agent | HostAgent:
        """The algorithm, bound to a robot."""
        return registry.load("agent", self.section.name).make(self.section, spec)


def build_env_group(config: Config) -> EnvGroup:
    """Describe the environments of `config.env`."""
    return EnvGroup(config.env)


def build_policy_group(
    policy_cls: ModuleType | Callable[..., Agent] | None, config: Config
) -> PolicyGroup:
    """Describe the algorithm.

    Args:
        policy_cls: an agent module such as `jrl.agents.ppo`, or the function that makes the agent;
            None for the one that the config names.
        config: whose section `agent` names and sets up the same one.

    Raises:
        ConfigError: the config names another algorithm than `policy_cls`.
    """
    _named("agent", policy_cls, config.agent.name)
    return PolicyGroup(config.agent)


def build_data_buffer(
    buffer_cls: ModuleType | Callable[..., Buffer] | None, config: Config
) -> Buffer:
    """Make the store of experience.

    Args:
        buffer_cls: a function such as `jrl.buffers.rollout`, or a module with `make`; None for the
            one that the config names.
        config: whose section `buffer` names and sets up the same one.

    Raises:
        ConfigError: the config names another buffer than `buffer_cls`.
    """
    return _named("buffer", buffer_cls, config.buffer.name).make(config.buffer)


def _named(kind: str, chosen: ModuleType | Callable[..., Any] | None, name: str) -> Part:
    """The part that the config names, which must be the one that the program has chosen, if any."""
    part = registry.load(kind, name)
    if chosen is None:
        return part
    if isinstance(chosen, ModuleType):
        function, path = getattr(chosen, "make", None), registry.tidy(chosen.__name__)
    else:
        function, path = chosen, f"{chosen.__module__}:{getattr(chosen, '__qualname__', chosen)}"
    if function is not part.function:
        raise ConfigError(
            f"this program uses {path!r}, but the config says {kind}.name: {name!r} ({part.path}). "
            f"Change one of the two. A part of yours is named by its path, such as {kind}.name: "
            f"my_pkg.my_{kind}."
        )
    return part


def build(config: Config) -> Engine:
    """The five lines, with the parts that the config names."""
    return build_engine(
        build_env_group(config),
        build_policy_group(None, config),
        build_data_buffer(None, config),
        config,
    )


def open_run(
    run: str | Path, *, step: int | None = None, args: Sequence[str] = ()
) -> tuple[Engine, list[str]]:
    """The engine of a run in its folder, with the trained policy, to evaluate and film it.

    Args:
        run: the folder.
        step: updates after which the checkpoint was taken; the newest whole one by default.
        args: flags that change the run's config, such as `["--eval.episodes", "100"]`.

    Returns:
        The engine, and what people should know, such as that a damaged checkpoint was passed over.

    Raises:
        FileNotFoundError: no checkpoint.
        ValueError: no run there, or its checkpoints are damaged.
    """
    engine = build(configs.load(None, ["--resume", str(run), *args]))
    return engine, engine.restore(step, policy_only=True)


def build_engine(
    env_group: EnvGroup, policy_group: PolicyGroup, buffer: Buffer, config: Config
) -> Engine:
    """Bind environments, algorithm and buffer into a run.

    Raises:
        ValueError: where the parts don't fit: kinds of data, sizes that don't divide.
    """
    train = config.train
    if env_group.on_host:
        return _on_host(env_group, policy_group, buffer, config)
    env = env_group.vector(train.num_envs)
    agent = policy_group.agent(env.spec)
    if isinstance(agent, HostAgent):
        return _on_host(env_group, policy_group, buffer, config)
    if train.pipeline_stages > 1:
        raise ConfigError(
            "train.pipeline_stages is for simulators and policies that are not JAX; here they are "
            "compiled into one program. Leave it 1."
        )
    loop = loops.on_policy(
        agent, env, num_steps=train.num_steps, buffer=buffer, final_slots=train.final_slots
    )
    played = env_group.vector(config.eval.episodes, auto_reset=False)

    @jax.jit
    def evaluate(policy: Tree, key: Key) -> dict[str, jax.Array]:
        return rollout.evaluate(agent, played, policy, key)

    return Engine(loop, agent.policy, evaluate, _film(env_group, agent), config)


def _on_host(
    env_group: EnvGroup, policy_group: PolicyGroup, buffer: Buffer, config: Config
) -> Engine:
    """Bind parts of which one, simulator or algorithm, is not JAX."""
    train, tests = config.train, list[HostEnv]()

    def opened(num_envs: int) -> HostEnv:
        env = env_group.simulator(num_envs)
        closing.callback(env.close)
        return env

    def evaluate(policy: Tree, key: Key) -> dict[str, np.ndarray]:
        if not tests:  # a simulator of its own, opened when it is needed
            tests.append(opened(config.eval.episodes))
            closing.callback(tests.clear)
        return host.evaluate(agent, act, tests[0], policy, key)

    with contextlib.ExitStack() as closing:
        envs = [
            opened(train.num_envs // train.pipeline_stages) for _ in range(train.pipeline_stages)
        ]
        agent = policy_group.agent(envs[0].spec)
        act = host.actor(agent)
        loop = loops.on_policy_host(
            agent, envs, num_steps=train.num_steps, buffer=buffer, final_slots=train.final_slots
        )
        film = _film(env_group, agent)
        closing = closing.pop_all()  # nothing failed: from here on, the engine closes them
    return Engine(loop, agent.policy, evaluate, film, config, closing.close)


def _film(env_group: EnvGroup, agent: Agent | HostAgent) -> Film | None:
    """How to film a policy; None for tasks without a MuJoCo model."""
    model = env_group.task.model
    if model is None:
        return None
    render = importlib.import_module("jrl.envs.render")
    env = env_group.vector(1, auto_reset=False)
    show: Any = host.play if isinstance(agent, HostAgent) else rollout.play
    play: Any = functools.partial(
        show, agent, env, look=render.qpos, num_steps=env.spec.episode_length
    )
    if isinstance(agent, Agent):
        play = jax.jit(play)

    def positions(policy: Tree, key: Key) -> np.ndarray:
        qpos, alive = jax.device_get(play(policy, key))
        return qpos[alive[:, 0], 0]

    return Film(
        lambda policy, key, path: render.video(
            model(env_group.section), positions(policy, key), path, fps=1.0 / env.spec.dt
        ),
        lambda policy, key: render.watch(
            model(env_group.section), positions(policy, key), fps=1.0 / env.spec.dt
        ),
    )
