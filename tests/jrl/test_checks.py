"""What the errors say."""

import jax
import jax.numpy as jnp
import pytest

from jrl import checks


def test_expect_names_the_leaf_and_both_shapes():
    tree = {"reward": jnp.zeros((4, 3)), "obs": [jnp.zeros((4, 3, 2)), jnp.zeros((3, 4))]}
    with pytest.raises(ValueError, match=r"rollout\['obs'\]\[1\].*\(4, 3\).*\(3, 4\)"):
        checks.expect(tree, (4, 3), "rollout")
    checks.expect(tree["reward"], (4,), "rollout")
    checks.expect({}, (4,), "nothing")


def test_expect_refuses_too_few_axes():
    with pytest.raises(ValueError, match=r"got shape \(4,\)"):
        checks.expect(jnp.zeros(4), (4, 3), "reward")


def test_unknown_guesses_and_lists():
    error = checks.unknown("agent", "poo", ["sac", "ppo"])
    assert isinstance(error, ValueError)
    assert str(error) == "unknown agent 'poo'. Did you mean 'ppo'? Known: ppo, sac."
    far = str(checks.unknown("agent", "zzzz", ["sac", "ppo"], " More at home."))
    assert far == "unknown agent 'zzzz'. Known: ppo, sac. More at home."


@pytest.mark.parametrize("value", [0, -1, -0.5, float("nan")])
def test_positive_refuses(value):
    with pytest.raises(ValueError, match=f"epochs must be greater than 0, got {value}"):
        checks.positive(fine=1, epochs=value)


def test_positive_lets_traced_values_pass():
    def f(x: jax.Array) -> jax.Array:
        checks.positive(x=x)
        return x

    assert float(jax.jit(f)(-1.0)) == -1.0


def test_divides_says_the_numbers_and_the_nearest_that_work():
    # 80 = 2^4 * 5: its divisors nearest to 7 are 8 (1 off), 5 (2 off) and 4 (3 off, like 10).
    with pytest.raises(ValueError, match=r"num_envs = 80 .* num_minibatches = 7 .*: 4, 5, 8\."):
        checks.divides(80, 7, "num_envs", "num_minibatches")
    for n in (5, 8):
        checks.divides(80, n, "num_envs", "num_minibatches")


def test_divides_more_parts_than_there_are():
    with pytest.raises(ValueError, match=r"num_envs = 3 .* num_minibatches = 4 .*would: 1, 3\."):
        checks.divides(3, 4, "num_envs", "num_minibatches")


def test_divides_into_no_parts():
    with pytest.raises(ValueError, match="num_minibatches must be greater than 0, got 0"):
        checks.divides(80, 0, "num_envs", "num_minibatches")
