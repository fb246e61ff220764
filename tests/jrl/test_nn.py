"""Networks against NumPy, step by step against all at once, and who sees what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.nn import GRU, MLP, ActorCritic
from jrl.types import Tree

KEY = jax.random.key(0)


def size(tree: Tree) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))


# --- MLP ------------------------------------------------------------------------------------------


def test_mlp_is_affine_tanh_affine():
    x = jax.random.normal(KEY, (5, 3))
    net = MLP((4, 2), "tanh")
    params = net.init(KEY, x)
    one, two = params["params"]["Dense_0"], params["params"]["Dense_1"]
    hidden = np.tanh(np.asarray(x) @ one["kernel"] + one["bias"])
    np.testing.assert_allclose(net.apply(params, x), hidden @ two["kernel"] + two["bias"], 1e-5)


def test_mlp_can_end_in_its_activation():
    x = jax.random.normal(KEY, (50, 3))
    assert (MLP((4, 2), "relu").init_with_output(KEY, x)[0] < 0).any()
    last = MLP((4, 2), "relu", activate_last=True).init_with_output(KEY, x)[0]
    assert (last >= 0).all()
    assert (last > 0).any()


def test_mlp_starts_with_the_gain_it_says():
    # Uniform in ±limit has standard deviation limit / √3; with gain g and n inputs it is g / √n.
    # n = 400: √2 / 20 = 0.0707 for a hidden layer, 0.01 / 20 = 0.0005 for the last.
    params = MLP((400, 400), last_scale=0.01).init(KEY, jnp.zeros((1, 400)))["params"]
    assert float(jnp.std(params["Dense_0"]["kernel"])) == pytest.approx(2**0.5 / 20, rel=0.02)
    assert float(jnp.std(params["Dense_1"]["kernel"])) == pytest.approx(0.01 / 20, rel=0.02)
    assert float(jnp.abs(params["Dense_0"]["kernel"]).max()) <= 6**0.5 / 20 + 1e-6
    assert not params["Dense_0"]["bias"].any()


def test_mlp_without_layers_passes_its_input():
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(MLP(()).apply({}, x), x)


def test_an_unknown_activation_is_named():
    with pytest.raises(ValueError, match=r"unknown activation 'swsh'. Did you mean 'swish'"):
        MLP((2,), "swsh")


def test_networks_are_hashable_values():
    assert hash(ActorCritic(2, (8,))) == hash(ActorCritic(2, (8,)))
    assert ActorCritic(2, (8,)) == ActorCritic(2, (8,))
    assert ActorCritic(2, (8,)) != ActorCritic(2, (9,))


# --- GRU ------------------------------------------------------------------------------------------


@functools.cache
def gru() -> tuple[GRU, Tree, jax.Array]:
    x = jax.random.normal(jax.random.key(1), (6, 2, 3))
    net = GRU(4)
    return net, jax.jit(net.init)(KEY, jnp.zeros((2, 4)), x, jnp.zeros((6, 2), bool)), x


def test_gru_cell_against_numpy():
    net, params, x = gru()
    cell = jax.tree.map(np.asarray, params["params"]["cell"])
    h = np.asarray(jax.random.normal(jax.random.key(2), (2, 4)))
    x0 = np.asarray(x[0])

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    def inside(name):
        return x0 @ cell[name]["kernel"] + cell[name].get("bias", 0)

    def recurrent(name):
        return h @ cell[name]["kernel"] + cell[name].get("bias", 0)

    reset = sigmoid(inside("ir") + recurrent("hr"))
    keep = sigmoid(inside("iz") + recurrent("hz"))
    new = np.tanh(inside("in") + reset * recurrent("hn"))
    wanted = (1 - keep) * new + keep * h
    got, seen = net.apply(params, jnp.asarray(h), x[:1], jnp.zeros((1, 2), bool))
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    np.testing.assert_allclose(seen[0], wanted, atol=1e-6)


def test_gru_starts_afresh_where_an_episode_begins():
    net, params, x = gru()
    run = jax.jit(net.apply)
    first = jnp.zeros((6, 2), bool).at[3, 0].set(True).at[0, 1].set(True)
    carry = jnp.ones((2, 4))
    last, seen = run(params, carry, x, first)
    none = jnp.zeros((3, 2), bool)
    # Robot 0 starts again at step 3 with no memory, robot 1 already at step 0, then goes on.
    before = run(params, carry, x[:3], none)[1]
    after = run(params, jnp.zeros((2, 4)), x[3:], none)[1]
    np.testing.assert_allclose(seen[:3, 0], before[:, 0], atol=1e-6)
    np.testing.assert_allclose(seen[3:, 0], after[:, 0], atol=1e-6)
    whole = run(params, jnp.zeros((2, 4)), x, jnp.zeros((6, 2), bool))[1]
    np.testing.assert_allclose(seen[:, 1], whole[:, 1], atol=1e-6)
    np.testing.assert_allclose(last, seen[-1], atol=1e-6)


def test_gru_in_two_pieces_is_the_gru_in_one():
    net, params, x = gru()
    run = jax.jit(net.apply)
    first = jnp.zeros((6, 2), bool).at[4, 1].set(True)
    last, seen = run(params, jnp.ones((2, 4)), x, first)
    half, one = run(params, jnp.ones((2, 4)), x[:2], first[:2])
    end, two = run(params, half, x[2:], first[2:])
    np.testing.assert_allclose(seen, jnp.concatenate([one, two]), atol=1e-6)
    np.testing.assert_allclose(last, end, atol=1e-6)


def test_gru_lets_no_gradient_through_an_episodes_end():
    net, params, x = gru()
    first = jnp.zeros((6, 2), bool).at[3].set(True)
    fifth = lambda x: net.apply(params, jnp.ones((2, 4)), x, first)[1][4].sum()
    slope = jax.jit(jax.grad(fifth))(x)
    assert not slope[:3].any()
    assert slope[3:5].all()
    assert not slope[5:].any()


# --- observations ---------------------------------------------------------------------------------


# --- the actor-critic -----------------------------------------------------------------------------


def shapes(**kwargs) -> tuple[Tree, Tree]:
    """The shapes of what a network returns, and of its parameters."""
    net = ActorCritic(2, (8, 8), **kwargs)
    x = {"policy": jnp.zeros((4, 3, 5))}
    arguments = (jnp.zeros((3, net.memory)), x, jnp.zeros((4, 3), bool))
    out, params = jax.eval_shape(net.init_with_output, KEY, *arguments)
    return jax.tree.map(lambda s: s.shape, out, is_leaf=lambda s: hasattr(s, "shape")), params


def test_actor_critic_shapes_and_parts():
    (_, numbers, value), params = shapes()
    assert numbers == ((4, 3, 2), (2,))
    assert value == (4, 3)
    assert set(params["params"]) == {"actor", "critic", "log_std"}
    # 5 -> 8 -> 8 -> 2 and 5 -> 8 -> 8 -> 1: 48 + 72 + 18 and 48 + 72 + 9 numbers, 2 for log_std
    assert size(params) == 138 + 129 + 2


def test_a_shared_trunk_is_shared():
    (_, numbers, value), params = shapes(shared_trunk=True)
    assert (numbers[0], value) == ((4, 3, 2), (4, 3))
    assert set(params["params"]) == {"trunk", "actor", "critic", "log_std"}
    # trunk 5 -> 8 -> 8, heads 8 -> 2 and 8 -> 1: 120 + 18 + 9 + 2
    assert size(params) == 149


def test_discrete_numbers_are_logits_alone():
    (_, numbers, _), params = shapes(continuous=False)
    assert numbers == ((4, 3, 2),)
    assert set(params["params"]) == {"actor", "critic"}


def test_a_memory_is_what_the_policy_and_the_critic_see():
    (carry, numbers, value), params = shapes(memory=6)
    assert (carry, numbers[0], value) == ((3, 6), (4, 3, 2), (4, 3))
    assert set(params["params"]) == {"gru", "actor", "critic", "log_std"}
    # 6 -> 8 -> 8 -> 2 and 6 -> 8 -> 8 -> 1
    assert size(params["params"]["actor"]) == 56 + 72 + 18
    assert size(params["params"]["critic"]) == 56 + 72 + 9


@pytest.mark.parametrize("memory", [0, 6])
def test_only_the_critic_sees_the_critics_part(memory):
    net = ActorCritic(2, (8, 8), memory=memory)
    first = jnp.zeros((4, 3), bool)
    x = {
        "policy": jax.random.normal(KEY, (4, 3, 5)),
        "critic": jax.random.normal(jax.random.key(3), (4, 3, 7)),
    }
    params = jax.jit(net.init)(KEY, jnp.zeros((3, memory)), x, first)

    @jax.jit
    def run(x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, numbers, value = net.apply(params, jnp.zeros((3, memory)), x, first)
        return numbers[0], value

    mean, value = run(x)
    assert 0 < float(jnp.abs(mean).max()) < 0.1  # the policy starts near its middle
    changed = run({**x, "critic": x["critic"] + 1})
    np.testing.assert_array_equal(changed[0], mean)
    assert (changed[1] != value).all()
    # and, with no memory to share, the critic doesn't see the policy's part
    other = run({**x, "policy": x["policy"] + 1})
    assert (other[0] != mean).all()
    assert bool((other[1] != value).all()) is bool(memory)
