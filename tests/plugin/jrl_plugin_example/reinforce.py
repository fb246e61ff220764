"""REINFORCE with a baseline (Sutton & Barto 2018, section 13.4), on rollouts of many robots.

Each step's log-probability is raised in proportion to how much the return after it exceeds the
baseline. The factor γᵗ of the textbook is left out, as is usual, and a return that the rollout or a
time limit cuts off goes on with the baseline.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jrl import checks, observations, optim
from jrl.mesh import pmean, vary
from jrl.nn import MLP, apply
from jrl.ops import losses, returns
from jrl.ops.distributions import Normal, bound_log_std
from jrl.rollout import successor_values
from jrl.types import Agent, Box, Key, Metrics, Rollout, Spec, Tree, record


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters of REINFORCE."""

    hidden: tuple[int, ...] = (32,)
    """Widths of the hidden layers, of the policy and of the baseline alike."""
    init_std: float = 0.5
    """Standard deviation of the actions at the start."""
    discount: float = 0.97
    """Discount γ per step."""
    learning_rate: float = 1e-2
    """Step size of Adam."""
    baseline_cost: float = 0.5
    """Weight of the baseline's squared error."""


@record
class State:
    """What training goes on from."""

    policy: Tree  # the mean's network, and "log_std" [A]
    baseline: Tree
    opt: Tree


def networks(cfg: Config, action_size: int) -> tuple[MLP, MLP]:
    """The mean of the policy, and the baseline."""
    return MLP((*cfg.hidden, action_size), "tanh", 0.01), MLP((*cfg.hidden, 1), "tanh")


def init(cfg: Config, nets: tuple[MLP, MLP], spec: Spec, key: Key) -> State:
    """A fresh state."""
    keys, x = jax.random.split(key), observations.example(spec)["policy"]
    mean, baseline = (net.init(k, x) for net, k in zip(nets, keys))
    log_std = jnp.full(nets[0].sizes[-1], jnp.log(cfg.init_std), jnp.float32)
    policy = {"mean": mean, "log_std": log_std}
    opt = optim.adam(cfg.learning_rate, max_grad_norm=1.0).init((policy, baseline))
    return State(policy, baseline, opt)


def distribution(nets: tuple[MLP, MLP], policy: Tree, x: jax.Array) -> Normal:
    """How the policy chooses actions, [..., A], when it sees x, [..., n]."""
    return Normal(apply(nets[0], policy["mean"], x), bound_log_std(policy["log_std"]))


def act(
    nets: tuple[MLP, MLP], policy: Tree, carry: Tree, obs: Tree, key: Key, *, explore: bool = True
) -> tuple[Tree, jax.Array, dict[str, jax.Array]]:
    """Choose actions for B robots; without exploration the mean."""
    dist = distribution(nets, policy, observations.vectors(obs, leading=1)["policy"])
    return carry, dist.sample(key) if explore else dist.mode(), {}


def loss(
    cfg: Config, nets: tuple[MLP, MLP], params: tuple[Tree, Tree], rollout: Rollout
) -> tuple[jax.Array, Metrics]:
    """The policy gradient's and the baseline's loss on a rollout [T, B], and what to log."""
    policy, baseline = params
    x = observations.vectors(rollout.obs, leading=2)["policy"]
    last = observations.vectors(rollout.final.obs, leading=1)["policy"]
    value, last_value = (apply(nets[1], baseline, y)[..., 0] for y in (x, last))
    ends = (rollout.terminated, rollout.truncated)
    after = successor_values(rollout, value, last_value, cfg.discount)
    gain = returns.lambda_returns(rollout.reward, after, *ends, discount=cfg.discount, lam=1.0)
    gain = jax.lax.stop_gradient(gain)
    dist = distribution(nets, policy, x[:-1])
    advantage = losses.normalize(jax.lax.stop_gradient(gain - value[:-1]))
    policy_loss = -jnp.mean(dist.log_prob(rollout.action) * advantage)
    baseline_loss = losses.value_loss(value[:-1], gain)
    seen = {"loss/policy": policy_loss, "loss/baseline": baseline_loss}
    seen["policy/std"] = jnp.mean(jnp.exp(dist.log_std))
    return policy_loss + cfg.baseline_cost * baseline_loss, seen


def update(
    cfg: Config,
    nets: tuple[MLP, MLP],
    state: State,
    rollout: Rollout,
    key: Key,
    *,
    axis: str | None = None,
) -> tuple[State, Metrics]:
    """Learn from a rollout [T, B]: one step along the gradient."""
    del key
    params = (state.policy, state.baseline)
    grad = jax.grad(functools.partial(loss, cfg, nets), has_aux=True)
    grads, seen = pmean(grad(vary(params, axis), rollout), axis)
    adam = optim.adam(cfg.learning_rate, max_grad_norm=1.0)
    (policy, baseline), opt, skipped = optim.apply(adam, grads, state.opt, params)
    return State(policy, baseline, opt), seen | {"update/skipped": skipped}


def make(cfg: Config, spec: Spec, *, axis: str | None = None) -> Agent:
    """Bind REINFORCE to a robot.

    Raises:
        ConfigError: its actions are not a flat box.
    """
    if not isinstance(spec.action, Box) or len(spec.action.shape) != 1:
        raise checks.ConfigError(f"reinforce acts in flat boxes, not in {spec.action}.")
    nets = networks(cfg, spec.action.shape[0])
    return Agent(
        init=functools.partial(init, cfg, nets, spec),
        policy=lambda state: state.policy,
        carry=lambda num_envs: (),
        act=functools.partial(act, nets),
        update=functools.partial(update, cfg, nets, axis=axis),
        data="rollout",
    )
