"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347), feed-forward or recurrent.

A feed-forward agent is the recurrent one with an empty memory: its rollout is cut into sequences
of one step, the recurrent one's stays whole, and minibatches are always drawn over sequences.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from jrl import checks, observations, optim
from jrl.mesh import pmean, psum, vary
from jrl.nn import ACTIVATIONS, ActorCritic, apply
from jrl.observations import Vectors
from jrl.ops import losses, returns
from jrl.ops.distributions import Categorical, Normal, bound_log_std
from jrl.ops.moments import Moments
from jrl.rollout import first_steps, successor_values
from jrl.types import Agent, Box, Discrete, Key, Metrics, Rollout, Spec, Tree, record

SCHEDULES = ("constant", "linear", "adaptive")


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyper-parameters of PPO."""

    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers, of the policy and of the critic alike."""
    activation: str = "swish"
    """Non-linearity between layers: elu, gelu, relu, swish or tanh."""
    shared_trunk: bool = False
    """Policy and critic share their hidden layers instead of having their own."""
    memory: int = 0
    """Units of a GRU that remembers the observations of an episode; 0 for a feed-forward agent."""
    init_std: float = 0.6
    """Standard deviation of the actions at the start, in units of half the action range."""
    normalize_obs: bool = True
    """Whiten observations by their running mean and standard deviation."""
    reward_scale: float = 1.0
    """Factor on rewards as the learner sees them; logged returns are unscaled."""
    discount: float = 0.99
    """Discount γ per step."""
    gae_lambda: float = 0.95
    """λ of generalised advantage estimation."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 8
    """Minibatches per pass; divides num_envs x num_steps (recurrent: num_envs)."""
    clip_eps: float = 0.2
    """Half-width ε of the trust interval on the probability ratio."""
    value_clip_eps: float | None = None
    """Half-width of the trust interval on the value, None for none."""
    value_cost: float = 0.5
    """Weight of the value loss."""
    entropy_cost: float = 0.0
    """Weight of the entropy bonus."""
    normalize_advantage: bool = True
    """Give the advantages of each minibatch mean 0 and standard deviation 1."""
    learning_rate: float = 3e-4
    """Step size of Adam, at the start."""
    schedule: str = "constant"
    """How the learning rate goes on: constant, linear (to 0) or adaptive (holds the KL)."""
    decay_updates: int = 0
    """Updates until a linear schedule reaches 0."""
    target_kl: float = 0.01
    """Divergence per update that an adaptive learning rate aims at."""
    stop_kl: float | None = None
    """Divergence above which the rest of an update is skipped, None for never."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this global norm."""

    def __post_init__(self) -> None:
        checks.positive(
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            init_std=self.init_std,
            discount=self.discount,
            clip_eps=self.clip_eps,
            max_grad_norm=self.max_grad_norm,
        )
        if self.activation not in ACTIVATIONS:
            raise checks.unknown("activation", self.activation, ACTIVATIONS)
        if self.schedule not in SCHEDULES:
            raise checks.unknown("learning-rate schedule", self.schedule, SCHEDULES)
        if self.schedule == "linear" and self.decay_updates < 1:
            raise checks.ConfigError(
                "a linear schedule needs decay_updates, the updates until it ends."
            )


@record
class Policy:
    """What an actor needs."""

    params: Tree
    obs_stats: dict[str, Moments]


@record
class State:
    """What training goes on from."""

    params: Tree
    opt: Tree
    obs_stats: dict[str, Moments]
    updates: jax.Array  # int32 []


@record
class Batch:
    """N sequences of L steps to learn from; fields lead with [L, N], `carry` with [1, N]."""

    x: Vectors  # whitened
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array
    is_first: jax.Array
    carry: Tree


def network(cfg: Config, spec: Spec) -> ActorCritic:
    """The network for a robot's spec."""
    action = spec.action
    return ActorCritic(
        action_size=action.n if isinstance(action, Discrete) else action.shape[0],
        hidden=cfg.hidden,
        activation=cfg.activation,
        memory=cfg.memory,
        shared_trunk=cfg.shared_trunk,
        continuous=isinstance(action, Box),
    )


def see(cfg: Config, stats: dict[str, Moments], obs: Tree, leading: int) -> Vectors:
    """Observations as the network sees them, whitened as far as is known."""
    x = observations.vectors(obs, leading)
    return observations.whiten(stats, x) if cfg.normalize_obs else x


def distribution(numbers: tuple[jax.Array, ...]) -> Normal | Categorical:
    """The distribution that the network's numbers describe."""
    if len(numbers) == 1:
        return Categorical(*numbers)
    mean, log_std = numbers
    return Normal(mean, bound_log_std(log_std))


def init(cfg: Config, net: ActorCritic, spec: Spec, key: Key) -> State:
    """A fresh state."""
    x = jax.tree.map(lambda v: v[None, None], observations.example(spec))
    params = net.init(key, carry(cfg, 1), x, jnp.zeros((1, 1), bool))
    if net.continuous:
        start = jnp.log(jnp.asarray(cfg.init_std, jnp.float32))
        params["params"]["log_std"] = jnp.full(net.action_size, start)
    return State(
        params=params,
        opt=optimizer(cfg).init(params),
        obs_stats=observations.statistics(spec),
        updates=jnp.zeros((), jnp.int32),
    )


def optimizer(cfg: Config) -> optax.GradientTransformation:
    """Adam, whose state owns the learning rate."""
    return optim.adam(cfg.learning_rate, max_grad_norm=cfg.max_grad_norm)


def policy(state: State) -> Policy:
    """The slice of the state an actor needs."""
    parts = {k: v for k, v in state.params["params"].items() if k != "critic"}
    stats = {"policy": state.obs_stats["policy"]}
    return Policy({"params": parts}, stats)


def carry(cfg: Config, num_envs: int) -> Tree:
    """An empty memory for `num_envs` robots."""
    return jnp.zeros((num_envs, cfg.memory), jnp.float32) if cfg.memory else ()


def act(
    cfg: Config,
    net: ActorCritic,
    policy: Policy,
    carry: Tree,
    obs: Tree,
    key: Key,
    *,
    explore: bool = True,
) -> tuple[Tree, jax.Array, dict[str, jax.Array]]:
    """Choose actions for B robots; without exploration the distribution's mode."""
    x = see(cfg, policy.obs_stats, jax.tree.map(lambda v: v[None], obs), leading=2)
    first = jnp.zeros(x["policy"].shape[:2], bool)
    carry, known = apply(net, policy.params, carry, x, first, method="remember")
    dist = distribution(apply(net, policy.params, known[0], method="policy"))
    action = dist.sample(key) if explore else dist.mode()
    return carry, action, {"log_prob": dist.log_prob(action)}


def prepare(cfg: Config, net: ActorCritic, state: State, rollout: Rollout) -> Batch:
    """Turn a rollout into sequences with advantages and targets, under the statistics it saw."""
    rollout = dataclasses.replace(rollout, reward=rollout.reward * cfg.reward_scale)
    x = see(cfg, state.obs_stats, rollout.obs, leading=2)
    is_first = first_steps(rollout)
    _, known = apply(net, state.params, rollout.carry, x, is_first, method="remember")
    value = apply(net, state.params, known, x, method="value")
    last = final_values(cfg, net, state, rollout, known)
    next_value = successor_values(rollout, value, last, cfg.discount)
    advantage = returns.gae(
        rollout.reward,
        value[:-1],
        next_value,
        rollout.terminated,
        rollout.truncated,
        discount=cfg.discount,
        lam=cfg.gae_lambda,
    )
    batch = Batch(
        x=jax.tree.map(lambda v: v[:-1], x),
        action=rollout.action,
        log_prob=rollout.aux["log_prob"],
        value=value[:-1],
        advantage=advantage,
        target=advantage + value[:-1],
        is_first=is_first[:-1],
        carry=jax.tree.map(lambda c: c[None], rollout.carry),
    )
    if cfg.memory:
        return batch
    return jax.tree.map(lambda v: v.reshape(1, -1, *v.shape[2:]), batch)


def final_values(
    cfg: Config, net: ActorCritic, state: State, rollout: Rollout, known: jax.Array
) -> jax.Array:
    """V of the observations at which episodes were cut off, [M]."""
    x = see(cfg, state.obs_stats, jax.tree.map(lambda v: v[None], rollout.final.obs), leading=2)
    memory: Tree = ()
    if cfg.memory:
        memory = known[:-1].reshape(-1, cfg.memory).at[rollout.final.index].get(mode="clip")
    first = jnp.zeros(x["policy"].shape[:2], bool)
    _, known = apply(net, state.params, memory, x, first, method="remember")
    return apply(net, state.params, known, x, method="value")[0]


def loss(
    cfg: Config, net: ActorCritic, params: Tree, batch: Batch, *, axis: str | None = None
) -> tuple[jax.Array, Metrics]:
    """The clipped objective (eq. 9 of the paper) of one minibatch, and what to log of it."""
    carry = jax.tree.map(lambda c: c[0], batch.carry)
    _, numbers, value = apply(net, params, carry, batch.x, batch.is_first)
    dist = distribution(numbers)
    advantage = batch.advantage
    if cfg.normalize_advantage:
        advantage = losses.normalize(advantage, axis=axis)
    policy_loss, seen = losses.ppo_clip(
        dist.log_prob(batch.action), batch.log_prob, advantage, clip_eps=cfg.clip_eps
    )
    value_loss = losses.value_loss(value, batch.target, batch.value, clip_eps=cfg.value_clip_eps)
    entropy = jnp.mean(dist.entropy())
    total = policy_loss + cfg.value_cost * value_loss - cfg.entropy_cost * entropy
    seen = {f"policy/{name}": x for name, x in seen.items()}
    return total, seen | {
        "loss/policy": policy_loss,
        "loss/value": value_loss,
        "policy/entropy": entropy,
    }


@record
class Learner:
    """What changes from minibatch to minibatch."""

    params: Tree
    opt: Tree
    stopped: jax.Array  # bool: the rest of this update is skipped


def learn(
    cfg: Config, net: ActorCritic, learner: Learner, batch: Batch, *, axis: str | None = None
) -> tuple[Learner, Metrics]:
    """One gradient step on one minibatch; a non-finite gradient changes nothing and is counted."""
    grad = jax.grad(functools.partial(loss, cfg, net, axis=axis), has_aux=True)
    grads, seen = pmean(grad(vary(learner.params, axis), batch), axis)
    params, opt, skipped = optim.apply(optimizer(cfg), grads, learner.opt, learner.params)
    kl, stopped = seen["policy/approx_kl"], learner.stopped
    if cfg.stop_kl is not None:
        stopped = stopped | (kl > cfg.stop_kl)
        params, opt = jax.tree.map(
            lambda new, old: jnp.where(stopped, old, new),
            (params, opt),
            (learner.params, learner.opt),
        )
    if cfg.schedule == "adaptive":
        rate = optim.learning_rate(opt)
        fitting = optim.adaptive_kl(rate, kl, cfg.target_kl)
        opt = optim.set_learning_rate(opt, jnp.where(learner.stopped, rate, fitting))
    return Learner(params, opt, stopped), seen | {"update/skipped": skipped}


def update(
    cfg: Config,
    net: ActorCritic,
    state: State,
    rollout: Rollout,
    key: Key,
    *,
    axis: str | None = None,
) -> tuple[State, Metrics]:
    """Learn from a rollout [T, B]: epochs of minibatches, then the statistics of its observations.

    Raises:
        ConfigError: where the sequences don't divide into minibatches.
    """
    batch = prepare(cfg, net, state, rollout)
    num_sequences = batch.advantage.shape[1]
    what = "num_envs" if cfg.memory else "num_envs x num_steps"
    checks.divides(num_sequences, cfg.num_minibatches, what, "num_minibatches")

    minibatch = functools.partial(learn, cfg, net, axis=axis)

    def epoch(learner: Learner, key: Key) -> tuple[Learner, Metrics]:
        order = jax.random.permutation(key, num_sequences)
        return jax.lax.scan(minibatch, learner, minibatches(batch, order, cfg.num_minibatches))

    opt = state.opt
    if cfg.schedule == "linear":
        left = jnp.maximum(1.0 - state.updates / cfg.decay_updates, 0.0)
        opt = optim.set_learning_rate(opt, cfg.learning_rate * left)
    learner = Learner(state.params, opt, jnp.zeros((), bool))
    learner, seen = jax.lax.scan(epoch, learner, jax.random.split(key, cfg.num_epochs))
    stats = state.obs_stats
    if cfg.normalize_obs:
        seen_obs = jax.tree.map(lambda v: v[:-1], rollout.obs)
        stats = observations.observe(stats, observations.vectors(seen_obs, leading=2), axis=axis)
    new = State(learner.params, learner.opt, stats, state.updates + 1)
    return new, summary(new, batch, seen, axis=axis)


def minibatches(batch: Batch, order: jax.Array, parts: int) -> Batch:
    """Deal sequences [L, N] in the given order into [parts, L, N / parts]."""

    def deal(x: jax.Array) -> jax.Array:
        x = x[:, order].reshape(x.shape[0], parts, -1, *x.shape[2:])
        return x.swapaxes(0, 1)

    return jax.tree.map(deal, batch)


def summary(state: State, batch: Batch, seen: Metrics, *, axis: str | None = None) -> Metrics:
    """Means over the minibatches, the state's own numbers, and how much of the data was bad."""

    def variance(x: jax.Array) -> jax.Array:
        return pmean(jnp.mean((x - pmean(jnp.mean(x), axis)) ** 2), axis)

    out = {name: jnp.mean(x) for name, x in seen.items()}
    out["update/skipped"] = jnp.sum(seen["update/skipped"])
    out["update/learning_rate"] = optim.learning_rate(state.opt)
    residual = variance(batch.target - batch.value)
    out["value/explained_variance"] = 1.0 - residual / (variance(batch.target) + 1e-8)
    for name in ("log_prob", "advantage", "target"):
        out[f"nonfinite/{name}"] = psum(jnp.sum(~jnp.isfinite(getattr(batch, name))), axis)
    out["nonfinite/obs_rows"] = jnp.sum(jnp.stack([s.skipped for s in state.obs_stats.values()]))
    if "log_std" in state.params["params"]:
        out["policy/std"] = jnp.mean(jnp.exp(bound_log_std(state.params["params"]["log_std"])))
    return out


def make(cfg: Config, spec: Spec, *, axis: str | None = None) -> Agent:
    """Bind PPO to a robot.

    Raises:
        ConfigError: for an action space PPO can't act in, or a shared trunk where the critic has an
            observation of its own.
    """
    if isinstance(spec.action, Box) and len(spec.action.shape) != 1:
        raise checks.ConfigError(
            f"ppo acts in flat boxes or discrete spaces; this action has shape "
            f"{spec.action.shape}. Flatten it in the environment."
        )
    if cfg.shared_trunk and isinstance(spec.obs, Mapping) and {"policy", "critic"} <= set(spec.obs):
        raise checks.ConfigError(
            "shared_trunk gives policy and critic the same hidden layers, but this robot has an "
            "observation 'critic' that only the critic may see. Turn shared_trunk off."
        )
    net = network(cfg, spec)
    return Agent(
        init=functools.partial(init, cfg, net, spec),
        policy=policy,
        carry=functools.partial(carry, cfg),
        act=functools.partial(act, cfg, net),
        update=functools.partial(update, cfg, net, axis=axis),
        data="rollout",
    )
