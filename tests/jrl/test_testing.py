"""The contract checks pass what is right, and name what is broken."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import buffers, envs
from jrl.envs import wrappers
from jrl.probes import probes
from jrl.testing import (
    check_agent,
    check_buffer,
    check_env,
    count_traces,
    fake_rollout,
    fake_transitions,
    random_values,
)
from jrl.types import Agent, Box, Buffer, Discrete, Env, Spec, TimeStep

SPEC = Spec(Box((2,)), Box((1,), low=-1.0, high=1.0))


def timestep(obs, reward=0.0, **info):
    flag = jnp.zeros((), bool)
    return TimeStep(obs, jnp.float32(reward), flag, flag, obs, info)


def good() -> Env:
    def reset(params, key, where=True):
        obs = jax.random.normal(key, (2,)) * params
        return obs, timestep(obs)

    def step(state, action):
        obs = 0.9 * state + 0.1 * action
        return obs, timestep(obs, 1.0)

    return Env(reset, step, np.ones(2, np.float32), SPEC)


def change(**fields):
    """The good environment with fields of each step's timestep replaced."""

    def step(state, action):
        state, ts = good().step(state, action)
        return state, dataclasses.replace(ts, **{k: f(ts) for k, f in fields.items()})

    return good()._replace(step=step)


def forgets_where():
    return good()._replace(reset=lambda params, key: good().reset(params, key))


def always_starts_alike():
    return good()._replace(reset=lambda p, k, where=True: (jnp.ones(2), timestep(jnp.ones(2))))


def uses_a_key_twice():
    def reset(params, key, where=True):
        obs = jax.random.normal(key, (2,)) + jax.random.uniform(key, (2,))
        return obs, timestep(obs)

    return good()._replace(reset=reset)


def weakly_typed_state():
    return good()._replace(
        reset=lambda p, k, where=True: ((good().reset(p, k)[0], 0.0), good().reset(p, k)[1]),
        step=lambda s, a: ((s[0], s[1] + jnp.float32(1)), good().step(s[0], a)[1]),
    )


def draws_from_numpy():
    rng = np.random.default_rng(0)

    def step(state, action):
        noise = jax.pure_callback(
            lambda _: rng.normal(size=2).astype(np.float32),
            jax.ShapeDtypeStruct((2,), jnp.float32),
            state,
            vmap_method="sequential",
        )
        return state + noise, timestep(state + noise)

    return good()._replace(step=step)


def remembers_in_python():
    seen = []

    def step(state, action):
        seen.append(state)
        obs = state + len(seen)
        return obs, timestep(obs)

    return good()._replace(step=step)


def writes_to_params():
    env = good()

    def reset(params, key, where=True):
        env.params[0] += 1
        return good().reset(params, key)

    return env._replace(reset=reset)


def robots_depend_on_one_another():
    @jax.custom_batching.custom_vmap
    def centre(x):
        return x - 1

    @centre.def_vmap
    def _(size, batched, x):
        return x - x.mean(), True

    return good()._replace(step=lambda s, a: (centre(s), timestep(centre(s))))


BROKEN = {
    "third argument": forgets_where,
    "two keys gave the same start": always_starts_alike,
    "key is used twice": uses_a_key_twice,
    r"\[1\] is float32\[\] \(weakly typed\)": weakly_typed_state,
    "the same key gives other results": draws_from_numpy,
    "running without jit gives other results": remembers_in_python,
    "env.params were changed": writes_to_params,
    "vmap gives other results": robots_depend_on_one_another,
    r"\.info\['extra'\] is missing at first": lambda: change(info=lambda ts: {"extra": ts.reward}),
    r"reward must be a float32 scalar, not float32\[1\]": lambda: change(
        reward=lambda ts: ts.reward[None]
    )._replace(
        reset=lambda p, k, where=True: (
            good().reset(p, k)[0],
            dataclasses.replace(good().reset(p, k)[1], reward=jnp.zeros(1)),
        )
    ),
    r"\.terminated is bool\[\] at first and int32\[\]": lambda: change(
        terminated=lambda ts: ts.terminated.astype(jnp.int32)
    ),
    r"timestep\.reward is not finite": lambda: change(reward=lambda ts: ts.reward / 0),
    "both terminated and truncated": lambda: change(
        terminated=lambda ts: ~ts.terminated, truncated=lambda ts: ~ts.truncated
    ),
    "obs and final_obs differ": lambda: change(final_obs=lambda ts: ts.obs + 1),
    r"observation in spec.obs .* float32\[3\] at first": lambda: good()._replace(
        spec=dataclasses.replace(SPEC, obs=Box((3,)))
    ),
    "leaves the bounds in spec.obs": lambda: good()._replace(
        spec=dataclasses.replace(SPEC, obs=Box((2,), high=-5.0))
    ),
    "must be hashable": lambda: good()._replace(
        spec=dataclasses.replace(SPEC, action=Box((1,), low=np.zeros(1)))  # type: ignore[arg-type]
    ),
}


def test_a_good_env_passes():
    check_env(good())


@pytest.mark.parametrize("sentence", BROKEN)
def test_a_broken_env_is_named(sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_env(BROKEN[sentence](), steps=3)


def test_a_fixed_start_can_be_allowed():
    check_env(always_starts_alike(), steps=2, fixed_start=True)


@pytest.mark.parametrize("discrete", [True, False])
def test_probes_keep_the_contract_and_pay_what_they_say(discrete):
    for probe in probes(discrete=discrete):
        check_env(probe.env, steps=1, fixed_start=True)
        best = dict(zip(probe.obs, probe.action or [0.0] * len(probe.obs)))
        for seed in range(4):
            state, ts = probe.env.reset((), jax.random.key(seed))
            rewards, seen = [], float(ts.obs[0])
            while not ts.terminated:
                choice = best[float(ts.obs[0])]
                action = jnp.int32(choice) if discrete else jnp.array([choice])
                state, ts = probe.env.step(state, action)
                rewards.append(float(ts.reward))
            assert tuple(rewards) == probe.rewards[probe.obs.index(seen)], probe.name


def test_probe_values():
    by_name = {p.name: p for p in probes(discrete=True)}
    assert by_name["discount"].value(0.5) == (0.5, 1.0)  # 0 + 0.5 * 1, and 1
    assert by_name["obs_value"].value(0.9) == (-1.0, 1.0)
    assert list(by_name) == ["value", "obs_value", "discount", "action", "obs_action"]


# --- agents -------------------------------------------------------------------------------------


def linear(spec: Spec = SPEC) -> Agent:
    """A linear policy that regresses its actions towards what was rewarded."""
    size = spec.obs.shape[0]

    def init(key):
        w = jax.random.normal(key, (size, 1))
        return {"w": w, "momentum": jnp.zeros_like(w), "steps": jnp.zeros((), jnp.int32)}

    def act(policy, carry, obs, key, *, explore=True):
        action = obs @ policy["w"]
        noise = jax.random.normal(key, action.shape) if explore else 0.0
        return carry, action + noise, {"mean": action}

    def update(state, data, key):
        del key

        def loss(w):
            return ((data.obs[: len(data.action)] @ w - data.action) ** 2).mean()

        value, grad = jax.value_and_grad(loss)(state["w"])
        momentum = 0.9 * state["momentum"] + grad
        new = {
            "w": state["w"] - 0.1 * momentum,
            "momentum": momentum,
            "steps": state["steps"] + 1,
        }
        return new, {"loss/action": value}

    return Agent(init, lambda s: {"w": s["w"]}, lambda n: (), act, update, "rollout")


def with_update(**changes):
    """The linear agent with its update's (state, metrics) changed."""

    def update(state, data, key):
        new, metrics = linear().update(state, data, key)
        return {**new, **changes.get("state", lambda s: {})(new)}, changes.get(
            "metrics", lambda m: m
        )(metrics)

    return linear()._replace(update=update)


def with_act(fn):
    def act(policy, carry, obs, key, *, explore=True):
        return fn(*linear().act(policy, carry, obs, key, explore=explore))

    return linear()._replace(act=act)


BROKEN_AGENTS = {
    "agent.data must be one of": lambda: linear()._replace(data="rollouts"),
    "no part of the agent's state": lambda: linear()._replace(policy=lambda s: {"w": 2 * s["w"]}),
    "true slice of the state": lambda: linear()._replace(policy=lambda s: s),
    "depends on the key": lambda: linear()._replace(
        act=lambda p, c, o, k, explore=True: linear().act(p, c, o, k, explore=True)
    ),
    r"actions float32\[8, 1\], not float32\[8\]": lambda: with_act(
        lambda c, a, aux: (c, a[:, 0], aux)
    ),
    "aux.'mean'. must lead with": lambda: with_act(lambda c, a, aux: (c, a, {"mean": a.mean()})),
    "the carry before and after act": lambda: with_act(lambda c, a, aux: (a, a, aux)),
    "state before and after update.*'steps'": lambda: with_update(
        state=lambda s: {"steps": s["steps"] + 0.5}
    ),
    "left the policy as it was": lambda: linear()._replace(
        update=lambda s, d, k: (s, {"loss/none": jnp.zeros(())})
    ),
    "must be named": lambda: with_update(metrics=lambda m: {"loss": m["loss/action"]}),
    "'loss/all' must be a scalar": lambda: with_update(metrics=lambda m: {"loss/all": jnp.ones(2)}),
    "'loss/action' is not finite": lambda: with_update(
        metrics=lambda m: jax.tree.map(lambda x: x / 0, m)
    ),
}


@pytest.mark.parametrize("data", ["rollout", "batch"])
def test_a_good_agent_passes(data):
    check_agent(linear()._replace(data=data), SPEC)


@pytest.mark.parametrize("sentence", BROKEN_AGENTS)
def test_a_broken_agent_is_named(sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_agent(BROKEN_AGENTS[sentence](), SPEC)


# --- buffers ------------------------------------------------------------------------------------


def replay(capacity: int = 24, size: int = 5) -> Buffer:
    """A ring of the newest transitions, of which `size` are drawn."""

    def init(example):
        rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype), example)
        return {"rows": rows, "at": jnp.int32(0), "filled": jnp.int32(0)}

    def add(state, data):
        n = len(data.reward)
        slots = (state["at"] + jnp.arange(n)) % capacity
        rows = jax.tree.map(lambda all_, x: all_.at[slots].set(x), state["rows"], data)
        filled = jnp.minimum(state["filled"] + n, capacity)
        return {"rows": rows, "at": (state["at"] + n) % capacity, "filled": filled}

    def sample(state, key):
        chosen = jax.random.randint(key, (size,), 0, state["filled"])
        return jax.tree.map(lambda x: x[chosen], state["rows"])

    return Buffer(init, add, sample, lambda state: state["filled"] >= size, "batch")


PIXELS = Spec({"image": Box((2, 2), "uint8"), "joint": Box((2,))}, Box((1,), low=-1.0, high=1.0))


def example_transitions():
    return fake_transitions(PIXELS, jax.random.key(3), 10)  # 4 adds of 10 overflow 24 slots


def example_rollout():
    agent = linear()._replace(carry=lambda n: jnp.arange(n, dtype=jnp.float32))
    policy = agent.policy(agent.init(jax.random.key(1)))
    return fake_rollout(agent, policy, SPEC, jax.random.key(0), 8, 4)


def with_init(**fields):
    """The replay with parts of its fresh state replaced."""
    return replay()._replace(init=lambda x: replay().init(x) | {k: f() for k, f in fields.items()})


def with_sample(change):
    def sample(state, key):
        return change(replay().sample(state, key), state, key)

    return replay()._replace(sample=sample)


def with_add(change):
    def add(state, data):
        return change(replay().add(state, data), state)

    return replay()._replace(add=add)


def counts_inits():
    count = iter(range(100))
    return with_init(at=lambda: jnp.int32(next(count)))


def remembers_what_was_added():
    count = iter(range(100))
    return with_add(lambda new, old: new | {"at": new["at"] + next(count)})


def donates():
    return replay()._replace(add=jax.jit(replay().add, donate_argnums=0))


def writes_in_place():
    """A store in NumPy that changes the arrays of its state."""

    def init(example):
        return {"reward": np.zeros(30, np.float32), "filled": np.zeros((), np.int32)}

    def add(state, data):
        state["reward"][:10] = data["reward"]
        return state | {"filled": state["filled"] + np.int32(10)}

    def sample(state, key):
        return {"reward": state["reward"][:10]}

    return Buffer(init, add, sample, lambda state: state["filled"] > 0, "batch")


def shuffles_rewards(sample, state, key):
    return dataclasses.replace(sample, reward=jnp.roll(sample.reward, 1))


def draws_elsewhere():
    rng = np.random.default_rng(0)

    def change(sample, state, key):
        first = jax.random.key(int(rng.integers(1000)))
        return replay().sample(state, first)

    return with_sample(change)


def scales_images(sample, state, key):
    obs = sample.obs | {"image": sample.obs["image"] / 255.0}
    return dataclasses.replace(sample, obs=obs)


def asks_python(new, old):
    return new if old["filled"] < 20 else old


def differs_under_jit(new, old):
    return new | {"at": new["at"] + isinstance(new["at"], jax.core.Tracer)}


BROKEN_BUFFERS = {
    "buffer.data must be one of": lambda: replay()._replace(data="replay"),
    "init gave two different states": counts_inits,
    r"state\['at'\] is of type int": lambda: with_init(at=lambda: 0),
    "must be False before anything was added": lambda: with_init(filled=lambda: jnp.int32(9)),
    "must return a bool scalar array": lambda: replay()._replace(can_sample=lambda s: s["filled"]),
    r"before and after add: \['at'\] is int32\[\] at first and float32": lambda: with_add(
        lambda new, old: new | {"at": new["at"] / 2}
    ),
    r"before and after add: \['more'\] is missing at first": lambda: with_add(
        lambda new, old: new | {"more": jnp.ones(2)}
    ),
    "add gave two different states": remembers_what_was_added,
    "add deleted its inputs": donates,
    "add can't run under jit": lambda: with_add(asks_python),
    "add gives another result under jit: .'at'.": lambda: with_add(differs_under_jit),
    "can_sample is still False after 4 adds": lambda: replay(size=25),
    "sample must return what add takes": lambda: with_sample(lambda x, s, k: x.reward),
    "sample gave two different results": draws_elsewhere,
    r"sample returns .obs\['image'\] as float32; it was added as uint8": lambda: with_sample(
        scales_images
    ),
    "value of .reward that was never added": lambda: with_sample(
        lambda x, s, k: dataclasses.replace(x, reward=x.reward - x.reward.mean())
    ),
    "value of .obs.'image'. that was never added": lambda: replay(capacity=100)._replace(
        sample=lambda s, k: jax.tree.map(lambda x: x[-5:], s["rows"])  # free slots
    ),
    "sample mixes rows": lambda: with_sample(shuffles_rewards),
    "sample can't run under jit": lambda: with_sample(
        lambda x, s, k: jax.tree.map(lambda leaf: leaf[: int(s["filled"]) // 5], x)
    ),
}


def test_good_buffers_pass():
    check_buffer(replay(), example_transitions())
    check_buffer(buffers.rollout(), example_rollout())
    check_buffer(buffers.rollout(), {"reward": jnp.arange(6.0).reshape(3, 2)})


@pytest.mark.parametrize("sentence", BROKEN_BUFFERS)
def test_a_broken_buffer_is_named(sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_buffer(BROKEN_BUFFERS[sentence](), example_transitions())


def test_a_store_in_numpy_is_held_to_the_same_rules():
    good, data = writes_in_place(), {"reward": jnp.arange(10.0)}
    with pytest.raises(AssertionError, match="add changed the arrays it was given"):
        check_buffer(good, data)
    copied = lambda state, data: good.add(jax.tree.map(np.copy, state), data)
    check_buffer(good._replace(add=copied), data)

    def init(example):
        example["reward"][0] = -1.0
        return good.init(example)

    with pytest.raises(AssertionError, match="init changed the example"):
        check_buffer(good._replace(init=init), {"reward": np.arange(10.0)})


def half(rollout, *, carry=True, index=True):
    """The first 2 of 4 robots of a rollout; slots of the others become free."""
    num_steps, num_envs = rollout.reward.shape
    cut = jax.tree.map(lambda x: x[:, :2], dataclasses.replace(rollout, final=(), carry=()))
    t, b = rollout.final.index // num_envs, rollout.final.index % num_envs
    moved = jnp.where((b < 2) & (t < num_steps), t * 2 + b, num_steps * 2).astype(jnp.int32)
    final = dataclasses.replace(rollout.final, index=moved if index else rollout.final.index)
    kept = rollout.carry[:2] if carry else rollout.carry[2:]
    return dataclasses.replace(cut, final=final, carry=kept)


def test_a_part_of_a_rollout_keeps_what_belongs_to_it():
    def halving(**kept):
        whole = buffers.rollout()
        return whole._replace(sample=lambda state, key: half(whole.sample(state, key), **kept))

    check_buffer(halving(), example_rollout())
    with pytest.raises(AssertionError, match=r"sample mixes rows.*\['carry'\]"):
        check_buffer(halving(carry=False), example_rollout())
    with pytest.raises(AssertionError, match=r"final obs'\]"):
        check_buffer(halving(index=False), example_rollout())


# --- made-up data -------------------------------------------------------------------------------


def test_fake_data_has_both_kinds_of_ends():
    agent = linear()
    policy = agent.policy(agent.init(jax.random.key(1)))
    rollout = fake_rollout(agent, policy, SPEC, jax.random.key(0), 16, 4)
    assert rollout.obs.shape == (17, 4, 2)
    assert rollout.terminated.any()
    assert rollout.truncated.any()
    assert not (rollout.terminated & rollout.truncated).any()
    cut = np.flatnonzero(rollout.truncated.reshape(-1))
    np.testing.assert_array_equal(rollout.final.index, [*cut, 64])
    assert rollout.final.obs.shape == (len(cut) + 1, 2)
    batch = fake_transitions(SPEC, jax.random.key(0), 64)
    assert batch.terminated.any()
    assert batch.truncated.any()


def test_random_values_keep_to_the_spec():
    spec = {
        "image": Box((2, 2), "uint8"),
        "joint": Box((2,), low=(-1.0, 2.0), high=(1.0, np.inf)),
        "mode": Discrete(3),
    }
    x = random_values(spec, jax.random.key(0), (500,))
    assert x["image"].dtype == jnp.uint8
    assert x["image"].shape == (500, 2, 2)
    assert x["image"].max() > 200
    assert (jnp.abs(x["joint"][:, 0]) <= 1).all()
    assert (x["joint"][:, 1] >= 2).all()
    assert set(np.unique(x["mode"])) == {0, 1, 2}


def test_count_traces():
    fn, traces = count_traces(lambda x: x + 1)
    fn = jax.jit(fn)
    fn(jnp.zeros(2)), fn(jnp.ones(2))
    assert traces() == 1
    fn(jnp.zeros(3))
    assert traces() == 2


def test_a_wrapped_env_passes():
    env = wrappers.time_limit(wrappers.unit_actions(envs.make("pendulum")), 3)
    check_env(wrappers.auto_reset(wrappers.episode_statistics(env)))
