"""Contract checks, for our parts and yours: `check_env`, `check_agent`, `check_buffer`.

They raise an AssertionError whose sentence says what is broken and how to mend it.
"""

from jrl.testing.agents import check_agent
from jrl.testing.buffers import check_buffer
from jrl.testing.environments import check_env
from jrl.testing.values import (
    count_traces,
    expect,
    fake_rollout,
    fake_transitions,
    random_values,
)

__all__ = [
    "check_agent",
    "check_buffer",
    "check_env",
    "count_traces",
    "expect",
    "fake_rollout",
    "fake_transitions",
    "random_values",
]
