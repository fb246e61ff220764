"""Names to parts: ours, registered ones, and paths."""

import functools
import itertools
import pathlib
import sys
import textwrap

import pytest

import jrl
from jrl import buffers, builder, config, envs, registry
from jrl.agents import ppo
from jrl.checks import ConfigError
from jrl.parts import NoConfig
from jrl.types import Buffer, Env

ROOT = pathlib.Path(jrl.__file__).parent
REGISTER = {
    "env": jrl.register_env,
    "agent": jrl.register_agent,
    "buffer": jrl.register_buffer,
}
TASK = """
    import dataclasses
    from jrl.envs import cartpole

    @dataclasses.dataclass(frozen=True)
    class Config:
        episode_length: int = 5

    @dataclasses.dataclass(frozen=True)
    class Slow:
        speed: float = 0.5

    def make(cfg: Config):
        return cartpole.make(cartpole.Config(episode_length=cfg.episode_length))

    def slow(cfg: Slow):
        return cartpole.make(cartpole.Config(dt=0.02 * cfg.speed))

    def plain():
        return cartpole.make(cartpole.Config())

    def untold(cfg):
        return make(cfg)
"""
numbers = itertools.count()


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in registry.OURS})


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write a module that can be imported, in a package of its own; returns its path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = f"parts_{next(numbers)}"
    (tmp_path / package).mkdir()

    def module(text, name="part"):
        (tmp_path / package / f"{name}.py").write_text(textwrap.dedent(text))
        return f"{package}.{name}"

    yield module
    for name in [n for n in sys.modules if n.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)


# --- ours ---------------------------------------------------------------------------------------


def test_a_name_and_a_path_reach_the_same_part():
    for name in ("ppo", "jrl.agents.ppo", "jrl.agents.ppo:make"):
        part = registry.load("agent", name)
        assert (part.Config, part.function, part.module) == (ppo.Config, ppo.make, ppo)


@pytest.mark.parametrize("kind", registry.OURS)
def test_every_name_of_ours_can_be_loaded(kind):
    for name, path in registry.OURS[kind].items():
        part = registry.load(kind, name)
        assert (part.kind, part.name, part.path) == (kind, name, path)
        assert part.module.__name__ == path.partition(":")[0]


def test_every_agent_file_has_a_name():
    files = {path.stem for path in (ROOT / "agents").glob("*.py")} - {"__init__"}
    assert files == set(registry.AGENTS)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown environment 'cart_pole'.*'cartpole'.*ant,"):
        registry.load("env", "cart_pole")
    with pytest.raises(ConfigError, match=r"unknown buffer 'rolout'.*Did you mean 'rollout'"):
        registry.load("buffer", "rolout")
    for name in ("", "3", "..", "a..b", "a b", "jrl.agents.ppo:", "jrl/agents"):
        with pytest.raises(ConfigError, match="unknown agent"):
            registry.load("agent", name)


def test_make_passes_options_and_refuses_unknown_ones():
    env = registry.make("env", "cartpole", episode_length=7)
    assert isinstance(env, Env)
    assert env.spec.episode_length == 7
    with pytest.raises(ConfigError, match=r"'cartpole': 'episode_lenght'.*'episode_length'"):
        registry.make("env", "cartpole", episode_lenght=7)
    assert isinstance(registry.make("buffer", "rollout"), Buffer)


def test_only_a_module_can_be_filmed(write):
    path = write(TASK + "\n    def model(cfg):\n        return 'a model'\n")
    assert registry.load("env", path).model(None) == "a model"
    assert registry.load("env", f"{path}:make").model(None) == "a model"
    assert registry.load("env", f"{path}:slow").model is None
    assert registry.load("env", "cartpole").model is None


# --- paths --------------------------------------------------------------------------------------


def test_a_module_and_its_functions_by_path(write):
    path = write(TASK)
    assert envs.make(path, episode_length=3).spec.episode_length == 3
    assert envs.make(f"{path}:slow", speed=0.25).spec.dt == 0.005
    assert envs.make(f"{path}:plain").spec.episode_length == 500
    assert registry.load("env", f"{path}:plain").Config is NoConfig
    # an untold parameter takes the module's Config
    assert registry.load("env", f"{path}:untold").Config is registry.load("env", path).Config


def test_annotations_that_are_text(write):
    path = write("from __future__ import annotations\n" + textwrap.dedent(TASK))
    assert registry.load("env", f"{path}:slow").Config.__name__ == "Slow"
    path = write(
        """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from jrl.envs.cartpole import Config

        def make(cfg: Config): ...
        """,
        "later",
    )
    with pytest.raises(ConfigError, match=r"later.py:7.*'Config' is not defined.*run time"):
        registry.load("env", path)


WRONG = {  # a module, what is asked of it, and what is said
    "no such function": (
        TASK,
        ":mak",
        r"part.py\) has no 'mak'.*It has: make, slow, plain, untold",
    ),
    "no make": ("x = 1", "", r"has no 'make'. Write `make\(cfg\) -> Env` there.*It has: none"),
    "not a function": ("make = 3", "", r"'make' in .*part.py\) is an int, not a function"),
    "an import that fails": (
        "import jrl\nimport no_such_thing",
        "",
        r"importing it failed \(.*part.py:2\): ModuleNotFoundError: .*'no_such_thing'",
    ),
    "a name that fails": (
        "from jrl import no_such_name",
        "",
        r"importing it failed \(.*part.py:1\): ImportError: cannot import name 'no_such_name'",
    ),
    "an error in the code": ("x = 1\n\ny = z", "", r"failed \(.*part.py:3\): NameError: .*'z'"),
    "an error in the text": ("x = 1\ny = (", "", r"failed \(.*part.py:2\): SyntaxError"),
    "too many parameters": (
        "def make(cfg, spec): ...",
        "",
        r"make \(.*part.py:1\) must take \(cfg\), but it takes \(cfg, spec\)",
    ),
    "no telling which config": (
        "def make(cfg): ...",
        "",
        r"make \(.*part.py:1\) takes \(cfg\), but there is no telling which Config",
    ),
    "a number where a config goes": (
        "def make(size: int = 3): ...",
        "",
        r"takes \(size: int = 3\), but there is no telling which Config",
    ),
    "a config that is none": ("Config = dict\ndef make(cfg): ...", "", "a frozen dataclass, not"),
    "a config that can change": (
        TASK.replace("(frozen=True)", ""),
        "",
        r"part.Config must be frozen: write @dataclass\(frozen=True\)",
    ),
    "a field without a default": (
        TASK.replace("episode_length: int = 5", "episode_length: int\n        dt: float"),
        "",
        r"part.Config needs a default .* not for \['episode_length', 'dt'\]",
    ),
    "a field called name": (
        TASK.replace("episode_length: int = 5", "name: str = ''"),
        "",
        "part.Config has a field 'name'.*Call yours something else",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_with_a_module_is_said(write, wrong):
    text, function, sentence = WRONG[wrong]
    path = write(text) + function
    with pytest.raises(ConfigError, match=sentence) as error:
        registry.load("env", path)
    assert str(error.value).startswith(f"environment '{path}':")


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("jrl.agents.nothing", "jrl.agents.nothing"),
        ("no_such_package.agents.mine", "no_such_package"),
        ("jrl.agents.ppo.mine:make", "jrl.agents.ppo.mine"),
        ("no_such_module:make", "no_such_module"),
    ],
)
def test_a_module_that_is_not_there(path, missing):
    with pytest.raises(ConfigError, match=rf"'{path}': there is no module '{missing}'.*PYTHONPATH"):
        registry.load("agent", path)


def test_an_agent_takes_a_config_and_a_spec(write):
    path = write("def make(spec): ...")
    with pytest.raises(ConfigError, match=r"must take \(cfg, spec\), but it takes \(spec\)"):
        registry.load("agent", path)


@pytest.mark.parametrize(
    ("kind", "spec", "wanted"),
    [("env", (), "an Env"), ("agent", (3,), "an Agent"), ("buffer", (), "a Buffer")],
)
def test_what_is_made_must_be_such_a_part(write, kind, spec, wanted):
    path = write(
        f"""
        from jrl.agents.ppo import Config

        def make(cfg, {"spec" if spec else "*, more=1"}):
            return [cfg]
        """,
        "makes",
    )
    part = registry.load(kind, path)
    with pytest.raises(
        ConfigError, match=rf"make \(.*makes.py:4\) must return {wanted}, but .* a list"
    ):
        part.make(part.Config(), *spec)


# --- registered ---------------------------------------------------------------------------------


def test_a_target_is_a_path_a_module_or_a_function(write):
    path = write(TASK)
    task = registry.load("env", path).module
    for name, target in {
        "text": path,
        "text-make": f"{path}:make",
        "module": task,
        "function": task.make,
    }.items():
        jrl.register_env(name, target)
        assert registry.load("env", name).path == path  # `:make` goes without saying
        assert envs.make(name, episode_length=3).spec.episode_length == 3
    jrl.register_env("slow", task.slow)
    assert envs.make("slow", speed=0.25).spec.dt == 0.005
    assert registry.names("env")["slow"] == f"{path}:slow"


def test_agents_and_buffers_have_tables_of_their_own(write):
    jrl.register_agent("mine", ppo)
    jrl.register_buffer("mine", buffers.rollout)
    assert registry.load("agent", "mine").function is ppo.make
    assert registry.load("buffer", "mine").function is buffers.rollout
    with pytest.raises(ConfigError, match="unknown environment 'mine'"):
        registry.load("env", "mine")


@pytest.mark.parametrize("kind", REGISTER)
def test_a_name_that_is_taken(kind):
    ours = next(iter(registry.OURS[kind]))
    with pytest.raises(ConfigError, match=rf"'{ours}': jrl has it for jrl\..* for a\.b"):
        REGISTER[kind](ours, "a.b")
    REGISTER[kind]("mine", "a.b:c")
    with pytest.raises(ConfigError, match=r"'mine': this program has it for a.b:c.* for a.b:d"):
        REGISTER[kind]("mine", "a.b:d")
    REGISTER[kind]("mine", "a.b:c")  # a notebook's cell may run twice
    REGISTER[kind](ours, registry.OURS[kind][ours])


def test_a_module_at_top_level_keeps_its_function(tmp_path, monkeypatch):
    # a bare word is a name, not a path: the config must hold what another process can read
    (tmp_path / "top_level_task.py").write_text(textwrap.dedent(TASK))
    monkeypatch.syspath_prepend(str(tmp_path))
    jrl.register_env("mine", "top_level_task")
    monkeypatch.delitem(sys.modules, "top_level_task", raising=False)
    assert registry.load("env", "mine").name == "top_level_task:make"
    assert registry.load("env", "top_level_task:make").Config.__name__ == "Config"


def inside():
    def make():
        return None

    return make


class Task:
    def __call__(self):
        return None


LOST = {
    "a lambda has no name": lambda: lambda cfg: cfg,
    "it exists only inside another function": inside,
    r"belongs to the program itself \(__main__\)": lambda: sys.modules["__main__"],
    "importing that gives something else": lambda: functools.partial(envs.make, "cartpole"),
    "importing that gives something": Task,
    "gives something else": lambda: type(sys)("made_up"),
}


@pytest.mark.parametrize("sentence", LOST)
def test_what_another_process_cannot_find_is_refused(sentence):
    with pytest.raises(ConfigError, match=rf"{sentence}.*Write it into a module"):
        jrl.register_env("mine", LOST[sentence]())


def test_functions_of_the_program_itself_are_refused(monkeypatch):
    monkeypatch.setattr(inside, "__module__", "__main__")
    for target in (inside, "__main__:inside", "__main__"):
        with pytest.raises(ConfigError, match="belongs to the program itself"):
            jrl.register_env("mine", target)


def test_names_and_paths_are_spelt_right():
    for name in ("", "a.b", "a:b", "a b", "a/b"):
        with pytest.raises(ConfigError, match="use letters, digits, _ and -"):
            jrl.register_env(name, "a.b")
    for target in ("", "a b", "a..b", "a.b:", "a.b:c:d", "1a"):
        with pytest.raises(ConfigError, match="is no import path such as my_pkg.my_module:make"):
            jrl.register_env("mine", target)


# --- in configs and in the five-line program ----------------------------------------------------


def test_a_config_holds_the_path_of_a_registered_name(write):
    path = write(TASK)
    jrl.register_env("short", path)
    jrl.register_buffer("mine", "jrl.buffers:rollout")
    for made in (
        config.load(None, ["--env.name", "short", "--env.episode-length=4", "--buffer.name=mine"]),
        config.from_dict(
            {"env": {"name": "short", "episode_length": 4}, "buffer": {"name": "mine"}}
        ),
    ):
        assert (made.env.name, made.env.episode_length) == (path, 4)
        assert made.buffer.name == "jrl.buffers:rollout"
        assert config.from_dict(config.to_dict(made)) == made


def test_a_section_that_is_no_mapping(tmp_path):
    (tmp_path / "a.yaml").write_text("env: hopper")
    with pytest.raises(ValueError, match="env must be a mapping"):
        config.load(tmp_path / "a.yaml", ["--env.name", "cartpole"])


BUFFER = """
    import dataclasses
    from jrl import buffers

    @dataclasses.dataclass(frozen=True)
    class Config:
        capacity: int = 8

    def make(cfg):
        return buffers.rollout()._replace(data=str(cfg.capacity))

    def other():
        return buffers.rollout()
"""


def test_a_buffer_gets_its_section(write):
    path = write(BUFFER)
    made = config.load(None, ["--buffer.name", path, "--buffer.capacity", "3"])
    assert config.to_dict(made)["buffer"] == {"name": path, "capacity": 3}
    module = registry.load("buffer", path).module
    for chosen in (module, module.make, None):
        assert builder.build_data_buffer(chosen, made).data == "3"
    with pytest.raises(ConfigError, match=rf"'jrl.buffers:rollout'.*buffer.name: '{path}'"):
        builder.build_data_buffer(buffers.rollout, made)
    with pytest.raises(ConfigError, match=rf"'{path}:other'.*buffer.name: '{path}'"):
        builder.build_data_buffer(module.other, made)
    assert builder.build_data_buffer(buffers.rollout, config.from_dict({})).data == "rollout"


def test_an_agent_of_ones_own_is_named_by_its_path(write):
    path = write(
        "from jrl.agents.ppo import Config\nfrom jrl.agents import ppo\n"
        "def make(cfg, spec):\n    return ppo.make(cfg, spec)\n"
    )
    made = config.load(None, ["--agent.name", path, "--agent.hidden", "8"])
    mine = registry.load("agent", path).module
    spec = envs.make("pendulum").spec
    for chosen in (mine, mine.make, None):
        assert builder.build_policy_group(chosen, made).agent(spec).data == "rollout"
    with pytest.raises(ConfigError, match=rf"'jrl.agents.ppo'.*agent.name: '{path}'"):
        builder.build_policy_group(ppo, made)
    with pytest.raises(ConfigError, match=rf"'{path}'.*agent.name: 'ppo' \(jrl.agents.ppo\)"):
        builder.build_policy_group(mine, config.from_dict({}))
