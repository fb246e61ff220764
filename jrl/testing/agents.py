"""The contract of an agent."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.testing.values import (
    check_same_type,
    count_traces,
    equal,
    expect,
    fake_rollout,
    fake_transitions,
    host_copies,
    random_values,
)
from jrl.types import Agent, Key, Spec, Tree, zeros

DATA = ("rollout", "batch", "episodes")


def check_agent(
    agent: Agent,
    spec: Spec,
    key: Key | None = None,
    *,
    data: Tree = None,
    num_envs: int = 8,
    num_steps: int = 16,
) -> None:
    """Check that `agent` keeps the contract of an algorithm, on a small fake data set.

    Args:
        agent: what to check.
        spec: what it was made for.
        key: of its parameters, its actions and the data.
        data: what to update from, for agents whose `data` needs more than `fake_rollout` or
            `fake_transitions` makes up.
        num_envs: robots B in the data.
        num_steps: steps T in the data.

    Raises:
        AssertionError: with a sentence on the first thing that is wrong.
    """
    keys = jax.random.split(jax.random.key(0) if key is None else key, 4)
    expect(agent.data in DATA, f"agent.data must be one of {DATA}, not {agent.data!r}.")
    state = jax.jit(agent.init)(keys[0])
    _check_policy(agent, state)
    _check_act(agent, spec, agent.policy(state), keys[1], num_envs)
    if data is None and agent.data == "batch":
        data = fake_transitions(spec, keys[2], num_steps * num_envs)
    elif data is None:
        data = fake_rollout(agent, agent.policy(state), spec, keys[2], num_steps, num_envs)
    _check_update(agent, state, data, keys[3])


def _check_policy(agent: Agent, state: Tree) -> None:
    policy = agent.policy(state)
    own = host_copies(state)
    for path, leaf in jax.tree_util.tree_leaves_with_path(policy):
        (value,) = host_copies(leaf)
        expect(
            any(value.shape == x.shape and np.array_equal(value, x) for x in own),
            f"policy{jax.tree_util.keystr(path)} is no part of the agent's state: a policy is a "
            "slice of the state, so that a restored state gives the same policy.",
        )
    size = sum(x.size for x in host_copies(policy))
    expect(
        0 < size < sum(x.size for x in own),
        "the policy must be a true slice of the state: what acting needs, without the optimizer.",
    )


def _check_act(agent: Agent, spec: Spec, policy: Tree, key: Key, num_envs: int) -> None:
    obs_key, one, two = jax.random.split(key, 3)
    obs = random_values(spec.obs, obs_key, (num_envs,))
    carry = agent.carry(num_envs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        expect(
            leaf.shape[:1] == (num_envs,),
            f"carry({num_envs}){jax.tree_util.keystr(path)} must lead with [B]: {leaf.shape}.",
        )
    act = jax.jit(agent.act, static_argnames="explore")
    after, action, aux = act(policy, carry, obs, one, explore=True)
    check_same_type("the carry before and after act", carry, after)
    example = zeros(spec.action)
    shape = (num_envs, *example.shape)
    expect(
        (action.shape, action.dtype) == (shape, example.dtype),
        f"act must return actions {example.dtype}{list(shape)}, "
        f"not {action.dtype}{list(action.shape)}.",
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        expect(
            leaf.shape[:1] == (num_envs,),
            f"aux{jax.tree_util.keystr(path)} must lead with [B], but has shape {leaf.shape}.",
        )
    same = act(policy, carry, obs, one, explore=True)[1]
    expect(equal(action, same), "act gave two different actions for the same key.")
    calm = [act(policy, carry, obs, k, explore=False)[1] for k in (one, two)]
    expect(
        equal(*calm),
        "act with explore=False depends on the key; it must return the policy's best action.",
    )


def _check_update(agent: Agent, state: Tree, data: Tree, key: Key) -> None:
    before = host_copies((state, data))
    update, traces = count_traces(agent.update)
    update = jax.jit(update)
    keys = jax.random.split(key)
    once, metrics = update(state, data, keys[0])
    check_same_type("the state before and after update", state, once)
    twice, again = update(once, data, keys[1])
    expect(traces() == 1, f"update was compiled {traces()} times for the same types of input.")
    expect(
        not any(x.is_deleted() for x in jax.tree.leaves((state, data)) if hasattr(x, "is_deleted")),
        "update deleted its inputs: donation is the caller's choice, not the agent's.",
    )
    expect(equal(before, host_copies((state, data))), "update changed the arrays it was given.")
    expect(not equal(agent.policy(state), agent.policy(twice)), "update left the policy as it was.")
    _check_metrics(metrics)
    _check_metrics(again)
    for path, leaf in jax.tree_util.tree_leaves_with_path(twice):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            expect(jnp.isfinite(leaf).all(), f"state{jax.tree_util.keystr(path)} is not finite.")


def _check_metrics(metrics: Any) -> None:
    expect(isinstance(metrics, dict), f"metrics must be a flat dict, not {type(metrics).__name__}.")
    for name, value in metrics.items():
        expect("/" in name, f'metric {name!r} must be named "group/name", such as "loss/policy".')
        expect(
            getattr(value, "shape", None) == (),
            f"metric {name!r} must be a scalar array, not {value}.",
        )
        expect(jnp.isfinite(value), f"metric {name!r} is not finite: {value}.")
