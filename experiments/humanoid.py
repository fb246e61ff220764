"""Train a humanoid to walk: `python experiments/humanoid.py [--help] [--seed 1 ...]`."""

from pathlib import Path

from jrl import buffers, builder, launch
from jrl.agents import ppo
from jrl.config import Config


def main(config: Config) -> None:
    env_group = builder.build_env_group(config)
    policy_group = builder.build_policy_group(ppo, config)
    buffer = builder.build_data_buffer(buffers.rollout, config)
    engine = builder.build_engine(env_group, policy_group, buffer, config)
    engine.run()


if __name__ == "__main__":
    launch(main, Path(__file__).parent / "conf" / "humanoid.yaml")
