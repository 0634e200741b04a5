import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lit_data import app as commands
from lit_data.app.configuration import names
from lit_data.app.configuration.compose import check_run, compose, take_composed
from lit_data.app.configuration.tree import open_hydra
from lit_data.core.errors import ConfigError

CONF = Path(commands.__file__).parents[1] / "conf"
HYDRA_GROUPS = ("", "/hydra_logging", "/job_logging", "/launcher")
OWN_GROUPS = ["debug", "hparams_search", "logger", "paths", "trainer"]
OWN_GROUPS += [f"hydra{group}" for group in HYDRA_GROUPS]

LAUNCHER = "hydra._internal.core_plugins.basic_launcher"
CONSOLE = "hydra.job_logging.handlers.console"
SWEEPER = "+hydra.sweeper"
QUEUE = "logging.handlers.QueueHandler"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file of the user's own config folder and returns that folder."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return tmp_path / "own"

    return write_file


@pytest.mark.parametrize("command", list(commands.COMMANDS))
def test_every_command_has_a_configuration(command: str) -> None:
    cfg = compose(command)
    assert cfg.command == command
    assert "hydra" not in cfg
    assert {"data", "model", "callbacks", "trainer", "logger", "paths"} <= set(cfg)
    assert {"name", "seed", "ckpt"} <= set(cfg)


@pytest.mark.parametrize("word", ["experiment=stripe", "debug=fast"])
def test_plus_before_an_optional_group_may_be_left_out(word: str) -> None:
    assert compose("fit", [word]) == compose("fit", [f"+{word}"])


@pytest.mark.parametrize(
    "words",
    [
        ["trainer=cpu", "trainer.max_epochs=3", "hydra.job.env_copy=[HOME]"],
        ["+experiment=stripe", "+trainer.limit_val_batches=2", "~callbacks.memory", "name=a b"],
        ["data.loader={batch_size: 3}", "+experiment=ct", "hydra.run.dir=x", "++seed=7"],
        ["hydra.job.config.override_dirname.kv_sep=_", "data=segmentation", "seed=1"],
    ],
)
def test_files_and_typed_values_give_what_hydra_composes(words: list[str]) -> None:
    with open_hydra() as hydra:
        cfg, completed = check_run(hydra, "fit", words)
        expected = hydra.compose_config("fit", completed, RunMode.RUN)
        take_composed(hydra, cfg, [])
    expected.hydra.mode = RunMode.RUN
    assert OmegaConf.to_yaml(cfg) == OmegaConf.to_yaml(expected)
    assert cfg._get_flag("struct") is expected._get_flag("struct") is True


def test_hydra_of_the_caller_is_left_as_it_was(write: Write) -> None:
    folder = write("mine.yaml", "a: 3\n")
    before = HydraConfig.instance().cfg
    with initialize_config_dir(str(folder), version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        compose("fit")
        assert GlobalHydra.instance().hydra is outer
        assert hydra_compose("mine").a == 3
    assert HydraConfig.instance().cfg is before


TRAINERS = "There are: auto, cpu, ddp, ddp_cpu, fsdp, gpu."


@pytest.mark.parametrize(
    ("word", "message"),
    [
        # keys: the nearest last part, in the same node first
        ("data.loader.bacth_size=4", "unknown key 'data.loader.bacth_size'. Did you mean 'data.lo"),
        ("data.bacth_size=4", "unknown key 'data.bacth_size'. Did you mean 'data.loader.batch_siz"),
        ("batch_size=4", "unknown key 'batch_size'. Did you mean 'data.loader.batch_size'?"),
        ("~trainer.max_epoch", "unknown key 'trainer.max_epoch'. Did you mean 'trainer.max_epochs"),
        ("+sed=4", "unknown key 'sed'. Did you mean 'seed'? No command reads it."),
        ("hydra.rum.dir=x", "unknown key 'hydra.rum.dir'. Did you mean 'hydra.run.dir'?"),
        ("zzzzzz=4", "unknown key 'zzzzzz'."),
        # groups and their options
        ("+experimnt=stripe", "unknown key 'experimnt'. Did you mean 'experiment'? No command rea"),
        ("experiment=strpe", "unknown experiment 'strpe'. Did you mean 'stripe'? There are: "),
        ("trainer=gpuu", f"unknown option 'gpuu' of 'trainer'. Did you mean 'gpu'? {TRAINERS}"),
        (
            "data=stripes",
            "unknown option 'stripes' of 'data'. Did you mean 'stripe'? There are: anomaly, classification, ct",
        ),
        ("data=base", "'data' names no class: choose a kind of data, such as data=segmentation."),
        ("hydra/launcher=paralel", "unknown option 'paralel' of 'hydra/launcher'. Did you mean 'p"),
        ("logger=null", "'logger=null': 'logger' is a group; choose one of: comet, csv, default"),
        ("+trainer=cpu", "'+trainer=cpu': 'trainer' has an option already; write trainer=cpu to"),
        # values
        ("trainer=[a", "cannot read the override 'trainer=[a' (no viable alternative at input '["),
        ("seed", "cannot read the override 'seed' (missing EQUAL at '<EOF>'). Write key=value."),
        ("seed=1,2", "'seed=1,2' has several values: add -m to run each, write key=[a,b] for a l"),
        ("seed=???", "'seed' has no value yet: write seed=VALUE."),
        ("ckpt=${sed}", "'ckpt': Interpolation key 'sed' not found. Did you mean 'seed'?"),
        ("ckpt=${ckpt}", "'ckpt': Recursive interpolation detected."),
        ("ckpt=${nothing:}", "'ckpt': Unsupported interpolation type nothing."),
        ("hydra.mode=x", "'hydra.mode': Invalid value 'x', expected one of [RUN, MULTIRUN]"),
        ("+seed=3", "'+seed=3': this key already exists; write seed=3 to replace its value."),
        ("data.loader={bacth_size:4}", "unknown key 'data.loader.bacth_size'. Did you mean 'data"),
        ("model.net.widht=4", "unknown key 'model.net.widht'. Did you mean 'model.net.width'?"),
        ("command=test", "'command' is 'test', but the first word on the command line is 'fit'."),
    ],
)
def test_mistake_is_named_in_one_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("fit", [word])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_text_that_holds_an_equals_sign_is_to_be_quoted() -> None:
    with pytest.raises(
        ConfigError, match=r"""quote a text with characters such as , = \( \[: 'seed="\[a=b\]"'$"""
    ):
        compose("fit", ["seed=[a=b]"])


@pytest.mark.parametrize(
    "word",
    [
        "data=../../etc/passwd",
        "data=/etc/passwd",
        "data='~/data'",
        "+experiment=[stripe,../x]",
        "data@model=../x",
        "hydra/launcher=../x",
        "trainer=a/../../x",
        "trainer=\\\\host\\x",
    ],
)
def test_option_outside_its_group_is_refused(word: str) -> None:
    text = r"an option is a name in the group '.*', without '\.\.' or a leading '/'\.$"
    with pytest.raises(ConfigError, match=text):
        compose("fit", [word])


def test_defaults_list_that_leaves_the_folders_is_refused(write: Write) -> None:
    write("../secret.yaml", "seed: 5\n")
    folder = write("experiment/mine.yaml", "# @package _global_\ndefaults:\n  - /../secret\n")
    text = r"^the defaults list names '.*\.\./secret': '\.\.' leaves the configuration"
    with pytest.raises(ConfigError, match=text):
        compose("fit", ["experiment=mine"], config_dir=folder)


def test_own_folder_joins_the_packaged_groups(write: Write) -> None:
    write("trainer/slow.yaml", "defaults:\n  - auto\n  - _self_\nmax_epochs: 99\n")
    text = "# @package _global_\ndefaults:\n  - override /trainer: slow\nname: mine\n"
    folder = write("experiment/deep/mine.yaml", text)
    by_option = compose("fit", ["experiment=deep/mine"], config_dir=folder)
    by_search_path = compose("fit", [f"hydra.searchpath=[{folder}]", "experiment=deep/mine"])
    assert by_option == by_search_path
    trainer = by_option.trainer
    assert (by_option.name, trainer.max_epochs, trainer.devices) == ("mine", 99, 1)


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config-dir .*gone: there is no such folder\.$"):
        compose("fit", config_dir=tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"path=.*gone is not available\.$"):
        compose("fit", [f"hydra.searchpath=[{tmp_path}/gone]"])


def test_own_file_that_would_never_be_read_is_refused(write: Write) -> None:
    folder = write("trainer/cpu.yaml", "max_epochs: 99\n")
    text = r"trainer/cpu\.yaml would never be read, because lit_data has a file with that name"
    with pytest.raises(ConfigError, match=text):
        compose("fit", config_dir=folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed: 3", r"^unknown key 'sed'\. Did you mean 'seed'\? No command reads it\.$"),
        ("seed: ${sed}", r"^'.*': Interpolation key 'sed' not found\. Did you mean 'seed'\?$"),
        ("seed: [1,", r"expected the node content"),
        ("defaults: [override /trainer: cpuu]", r"'cpuu' of 'trainer'\. Did you mean 'cpu'\?"),
        ("defaults: 3", r"defaults must be a list"),
        ("hydra: {searchpath: [/tmp]}", r"Overriding hydra\.searchpath is only supported"),
        ("model: {_target_: os.system}", r"^'model\._target_' is 'os\.system', which is not"),
    ],
)
def test_mistake_in_an_experiment_is_named(write: Write, text: str, message: str) -> None:
    folder = write("experiment/mine.yaml", f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        compose("fit", ["experiment=mine"], config_dir=folder)
    assert "\n" not in str(caught.value)
    write("experiment/bare.yaml", "seed: 3\n")
    text = r"^the file chosen for 'experiment' must start with the line '# @package _global_'\.$"
    with pytest.raises(ConfigError, match=text):
        compose("fit", ["experiment=bare"], config_dir=folder)


def test_value_that_an_experiment_asks_for_must_be_given(write: Write) -> None:
    folder = write("experiment/mine.yaml", "# @package _global_\ntrainer:\n  max_epochs: ???\n")
    also = "# @package _global_\nepochs: 7\ntrainer:\n  max_epochs: ${epochs}\n"
    write("experiment/also.yaml", also)
    text = r"^'trainer\.max_epochs' has no value yet: write trainer\.max_epochs=VALUE\.$"
    with pytest.raises(ConfigError, match=text):
        compose("fit", ["experiment=mine"], config_dir=folder)
    given = compose("fit", ["experiment=mine", "trainer.max_epochs=5"], config_dir=folder)
    assert given.trainer.max_epochs == 5
    given = compose("fit", ["experiment=[mine,also]"], config_dir=folder)
    assert given.trainer.max_epochs == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # plugins and callbacks, which Hydra instantiates
        ("hydra.launcher._target_=os.system", r"'hydra\.launcher\._target_' is 'os\.system'"),
        ("hydra.sweeper._target_=hydra_plugins", r"_target_' is 'hydra_plugins'.* there is no|not"),
        ("+hydra.callbacks.x._target_=hydra.utils.get_method", r"'hydra\.callbacks\.x\._target_'"),
        (f"+hydra.callbacks.x._target_={LAUNCHER}.log.info", "neither a class nor"),
        (f"+hydra.callbacks.x._target_={LAUNCHER}.Path", "is really 'pathlib"),
        # log handlers, which logging.config instantiates
        (f"{CONSOLE}.class=subprocess.Popen", "'subprocess.Popen', which is not allowed"),
        (f"{CONSOLE}.stream=ext://os.environ", "'ext://os.environ', which is not allowed"),
        # lines of a shell script
        ('hydra/launcher=slurm hydra.launcher.comment="a\nid"', r"'hydra\.launcher\.comment' is"),
        # what a sweeper imports, and groups that it would choose from unseen
        (
            f"{SWEEPER}.custom_search_space=os.system",
            r"custom_search_space' is 'os\.system', which is not",
        ),
        (f"{SWEEPER}.sampler._target_=os.system", r"'hydra\.sweeper\.sampler\._target_'"),
        (
            f"{SWEEPER}.sampler._target_=optuna.samplers._cmaes.CmaEsSampler",
            r"_cmaes\.CmaEsSampler', which is not allowed",
        ),
    ],
)
def test_hydra_node_is_checked(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("fit", words.split(" "))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("job_logging: {handlers: {x: {'()': os.system, command: id}}}", "os.system"),
        ("hydra_logging: {filters: {x: {'()': numpy.load}}}", "numpy.load"),
        (f"job_logging: {{handlers: {{x: {{class: {QUEUE}}}}}}}", QUEUE),
        ("job_logging: {handlers: {x: {class: logging.StreamHandler, queue: a.b}}}", "a.b"),
        ("job_logging: {loggers: {x: {handlers: ['cfg://handlers']}}}", "cfg://handlers"),
    ],
)
def test_log_handlers_of_a_file_are_checked(write: Write, text: str, name: str) -> None:
    folder = write("experiment/mine.yaml", f"# @package _global_\nhydra:\n  {text}\n")
    with pytest.raises(ConfigError, match=f"'{name}', which is not allowed"):
        compose("fit", ["experiment=mine"], config_dir=folder)


@pytest.mark.parametrize("name", ["LD_PRELOAD", "OPENSSL_CONF", "BASH_ENV"])
def test_variables_are_set_by_the_command_line_alone(write: Write, name: str) -> None:
    text = f"# @package _global_\nhydra:\n  job:\n    env_set: {{{name}: /x}}\n"
    folder = write("experiment/mine.yaml", text)
    with pytest.raises(ConfigError, match=r"'hydra\.job\.env_set' runs code: give it on the comm"):
        compose("fit", ["experiment=mine"], config_dir=folder)
    assert compose("fit", [f"+hydra.job.env_set.{name}=/x"]).command == "fit"


@pytest.mark.parametrize("text", ["setup: [id]", "additional_parameters: {wrap: id}"])
def test_shell_commands_are_taken_from_the_command_line_alone(write: Write, text: str) -> None:
    key, _, value = text.partition(": ")
    swept = f"sweeper: {{params: {{hydra.launcher.{key}: '{value}'}}}}"
    defaults = "defaults: [override /hydra/launcher: slurm]"
    experiment = f"{defaults}\nhydra:\n  launcher: {{{text}}}\n  {swept}\n"
    folder = write("experiment/mine.yaml", f"# @package _global_\n{experiment}")
    refusal = rf"'hydra\.launcher\.{key}' runs code: give it on the command line"
    with pytest.raises(ConfigError, match=refusal):
        compose("fit", ["experiment=mine"], config_dir=folder)
    words = ["experiment=mine", f"hydra.launcher.{key}={value}"]
    assert compose("fit", words, config_dir=folder).command == "fit"


@pytest.mark.parametrize(
    ("word", "package"),
    [
        ("hydra/launcher=parallel", "hydra-joblib-launcher"),
        ("hydra/launcher=slurm_local", "hydra-submitit-launcher"),
        (
            "hydra.sweeper._target_=hydra_plugins.hydra_optuna_sweeper.OptunaSweeper",
            "hydra-optuna-sweeper",
        ),
    ],
)
def test_missing_extra_is_named(word: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> ModuleType:
        if name.startswith("hydra_plugins"):
            raise ModuleNotFoundError(name=name)
        return importlib.import_module(name)

    monkeypatch.setattr(names, "import_module", import_module)
    with pytest.raises(ConfigError, match=rf"comes with a package: pip install {package}\.$"):
        compose("fit", [word])


def test_packages_are_allowed_by_the_caller_alone() -> None:
    words = ["model={_target_: my_project.Model}"]
    assert compose("fit", words, packages=["my_project"]).model._target_ == "my_project.Model"
    with pytest.raises(ConfigError, match=r"'my_project\.Model', which is not allowed"):
        compose("fit", words)


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=stripe,evil"],
        ["experiment=glob(e*)"],
        ["seed=1,2", "experiment=choice(stripe,evil)"],
        ["experiment=sweep"],
    ],
)
def test_every_option_of_a_swept_group_is_checked(write: Write, words: list[str]) -> None:
    logging = "job_logging: {handlers: {console: {class: os.system}}}"
    evil = f"# @package _global_\nhydra:\n  {logging}\n"
    write("trainer/evil.yaml", evil)
    swept = "hydra: {sweeper: {params: {trainer: 'cpu,evil'}}}"
    write("experiment/sweep.yaml", f"# @package _global_\n{swept}\n")
    folder, text = write("experiment/evil.yaml", evil), r"'os\.system', which is not allowed"
    with open_hydra(folder) as hydra, pytest.raises(ConfigError, match=text):
        check_run(hydra, "fit", words, multirun=True)
