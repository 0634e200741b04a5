from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import OmegaConf

from lit_data import commands
from lit_data.commands.configuration import hydra_node
from lit_data.commands.configuration import loader as loading
from lit_data.commands.configuration.compose import check_run, compose
from lit_data.commands.configuration.targets import instantiate
from lit_data.commands.configuration.tree import open_hydra
from lit_data.errors import ConfigError

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


@pytest.mark.slow
@pytest.mark.parametrize("group", OWN_GROUPS)
def test_every_option_composes(group: str) -> None:
    paths = sorted((CONF / group).glob("*.yaml"))
    assert paths
    for path in paths:
        assert compose("fit", [f"{group}={path.stem}"]).command == "fit"


@pytest.mark.parametrize("word", ["experiment=stripe", "debug=fast"])
def test_plus_before_an_optional_group_may_be_left_out(word: str) -> None:
    assert compose("fit", [word]) == compose("fit", [f"+{word}"])


def test_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    load = OmegaConf.load
    for kept in ("FILES", "CHOICES"):
        monkeypatch.setattr(loading, kept, {})
    monkeypatch.setattr(
        OmegaConf, "load", lambda file: (read.append(str(file.name)), load(file))[1]
    )
    first = compose("fit", ["experiment=stripe", "paths.run=r"])
    count = len(read)
    assert count == len(set(read)) > 10
    second = compose("fit", ["experiment=stripe", "paths.run=r"])
    assert OmegaConf.to_yaml(first) == OmegaConf.to_yaml(second)
    assert len(read) == count


@pytest.mark.parametrize(
    "words",
    [
        ["trainer=cpu", "trainer.max_epochs=3", "hydra.job.env_copy=[HOME]"],
        ["+experiment=stripe", "+trainer.limit_val_batches=2", "~callbacks.memory", "name=a b"],
        ["data.loader={batch_size: 3}", "+experiment=ct", "hydra.run.dir=x", "++seed=7"],
        ["hydra.job.config.override_dirname.kv_sep=_", "data=segmentation", "seed=1"],
    ],
)
def test_what_is_kept_and_what_is_typed_give_what_hydra_composes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_hydra() as hydra:
        loader = hydra.config_loader
        assert isinstance(loader, loading.KeepingLoader)
        loader.load_configuration("fit", words, RunMode.RUN).trainer = None  # is nobody's
        monkeypatch.chdir(tmp_path)
        cfg = loader.load_configuration("fit", words, RunMode.RUN)
        expected = ConfigLoaderImpl.load_configuration(loader, "fit", words, RunMode.RUN)
    assert OmegaConf.to_yaml(cfg) == OmegaConf.to_yaml(expected)
    for flag in ("struct", "readonly"):
        assert cfg._get_flag(flag) == expected._get_flag(flag)
        assert cfg.hydra._get_flag(flag) == expected.hydra._get_flag(flag)


def test_times_of_a_kept_composition_are_those_of_each_run() -> None:
    with open_hydra() as hydra:
        words = ["hydra.run.dir=${now:%f}"]
        load = partial(hydra.config_loader.load_configuration, "fit", words, RunMode.RUN)
        assert load().hydra.run.dir != load().hydra.run.dir


def test_run_folder_and_logging_follow_the_command() -> None:
    with open_hydra() as hydra:
        cfg, words = check_run(hydra, "show", ["name=mine", "paths.runs=/out", "experiment=stripe"])
        node = OmegaConf.to_container(cfg.hydra, resolve=False)
        assert cfg.hydra.run.dir.startswith("/out/show/mine/")
        assert cfg.hydra.sweep.dir.startswith("/out/show/mine/")
    assert isinstance(node, dict)
    assert words == ["name=mine", "paths.runs=/out", "+experiment=stripe"]
    assert node["job"]["chdir"] is False
    assert node["output_subdir"] == ".hydra"
    assert node["job_logging"]["root"] == {"level": "INFO", "handlers": ["console", "file"]}
    assert node["job_logging"]["formatters"]["terminal"]["format"] == "%(message)s"


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
        ("logger=null", "'logger=null': 'logger' is a group; choose one of: csv, default, mlflow"),
        ("+trainer=cpu", "'+trainer=cpu': 'trainer' has an option already; write trainer=cpu to"),
        # values
        ("trainer=[a", "cannot read the override 'trainer=[a' (no viable alternative at input '["),
        ("seed", "cannot read the override 'seed' (missing EQUAL at '<EOF>'). Write key=value."),
        ("seed=1,2", "'seed=1,2' has several values: add -m to run each, write key=[a,b] for a l"),
        ("seed=???", "'seed' has no value yet: write seed=VALUE."),
        ("ckpt=${sed}", "'ckpt': Interpolation key 'sed' not found. Did you mean 'seed'?"),
        ("ckpt=${ckpt}", "'ckpt': Recursive interpolation detected."),
        ("ckpt=${nothing:}", "'ckpt': Unsupported interpolation type nothing."),
        ("hydra.mode=x", "'hydra.mode': Error merging override hydra.mode=x Invalid value 'x', ex"),
        ("command=test", "'command' is 'test', but the first word on the command line says 'fit'."),
    ],
)
def test_mistake_is_named_in_one_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose("fit", [word])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_text_that_holds_an_equals_sign_is_to_be_quoted() -> None:
    with pytest.raises(
        ConfigError, match=r"""signs such as , = \( \[ is quoted: 'seed="\[a=b\]"'$"""
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
    text = r"an option is a name of the group '.*', without '\.\.' or a leading '/'\.$"
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
    text = r"trainer/cpu\.yaml would never be read, for lit_data has a file of that name"
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
            r"_target_' is 'os\.system', which is not",
        ),
        (f"{SWEEPER}.sampler._target_=os.system", r"'hydra\.sweeper\.sampler\._target_'"),
        (
            f"{SWEEPER}.sampler._target_=optuna.samplers._cmaes.CmaEsSampler",
            r"_cmaes\.CmaEsSampler', which is not allowed",
        ),
        (f"{SWEEPER}.search_space={{trainer:{{}}}}", r"search_space' is outdated: write"),
        # what child processes load
        ("+hydra.job.env_set.LD_PRELOAD=/x.so", r"env_set\.LD_PRELOAD' is not allowed"),
        ("+hydra.job.env_set.PYTHONPATH=/x", r"env_set\.PYTHONPATH' is not allowed"),
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


@pytest.mark.parametrize("name", ["OPENSSL_CONF", "AWS_CONFIG_FILE", "HOME", "BASH_ENV"])
def test_variables_are_set_by_the_command_line_alone(write: Write, name: str) -> None:
    text = f"# @package _global_\nhydra:\n  job:\n    env_set: {{{name}: /x}}\n"
    folder = write("experiment/mine.yaml", text)
    text = rf"'hydra\.job\.env_set\.{name}' is not allowed in a file"
    with pytest.raises(ConfigError, match=text):
        compose("fit", ["experiment=mine"], config_dir=folder)
    assert compose("fit", [f"+hydra.job.env_set.{name}=/x"]).command == "fit"


@pytest.mark.parametrize(
    "text",
    [
        "job_logging: {handlers: {file: {filename: /root/.bashrc}}}",
        "job_logging: {handlers: {file: {filename: '${hydra.runtime.output_dir}/../../x.log'}}}",
        "job_logging: {handlers: {file: {filename: '${hydra.runtime.output_dir}/.profile.log'}}}",
        "job_logging: {handlers: {file: {filename: '${hydra.runtime.output_dir}/sitecustomize.py'}}}",
        "hydra_logging: {handlers: {x: {class: logging.FileHandler, filename: /tmp/x.log}}}",
        "job: {name: ../../x}",
        "output_subdir: ../../.ssh",
    ],
)
def test_a_file_does_not_lead_logs_out_of_the_run_folder(write: Write, text: str) -> None:
    folder = write("experiment/mine.yaml", f"# @package _global_\nhydra:\n  {text}\n")
    text = r"may only name a \.log in the run folder|must be a plain name"
    with pytest.raises(ConfigError, match=text):
        compose("fit", ["experiment=mine"], config_dir=folder)


OUTSIDE = [
    "callbacks.checkpoint.dirpath=/out",
    "callbacks.checkpoint.dirpath=elsewhere",
    "callbacks.checkpoint.filename=../../out",
    "callbacks.memory.path=/out",
    "logger.csv.save_dir=/out",
    "trainer.default_root_dir=/out",
    "trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler, dirpath: /out}",
    "logger.x={_target_: lightning.pytorch.loggers.MLFlowLogger, tracking_uri: 'http://a.b'}",
    "logger.x={_target_: lightning.pytorch.loggers.MLFlowLogger, tracking_uri: 'sqlite:////out/x.db'}",
    "logger.x={_target_: lightning.pytorch.loggers.WandbLogger, settings: {base_url: 'https://a.b'}}",
    "logger.x={_target_: lightning.pytorch.loggers.CometLogger, workspace: theirs}",
    "logger.x={_target_: lightning.pytorch.loggers.NeptuneLogger, api_key: abc}",
    "model.x={_target_: lightning.pytorch.loggers.CSVLogger, _args_: [/out]}",
    "prepare.shards=/out/a.shards",
    "prepare.export=/out",
    "hydra.run.dir=/out",
    "hydra.sweep.dir=/out",
    "hydra.sweep.subdir=../../../../../out",
    "paths.run=/out",
    "paths.runs=/out",
]


@pytest.mark.parametrize("word", OUTSIDE)
def test_a_file_neither_writes_outside_nor_chooses_a_server(write: Write, word: str) -> None:
    key, _, value = word.partition("=")
    text = value
    for name in reversed(key.split(".")):
        text = f"{{{name}: {text}}}"
    folder = write("experiment/mine.yaml", f"# @package _global_\n{text}\n")
    with pytest.raises(ConfigError, match=rf"'{key}.*only the command line may.* type {key}"):
        compose("prepare", ["experiment=mine"], config_dir=folder)
    if "{" in word:
        typed = "+" + word.replace(": ", ":")
        assert compose("prepare", [typed]).command == "prepare"


def test_the_command_line_may_write_anywhere() -> None:
    words = ["++" + word for word in OUTSIDE if "{" not in word]
    assert compose("prepare", words).command == "prepare"


def test_a_file_may_write_below_the_runs(write: Write) -> None:
    text = "callbacks: {checkpoint: {dirpath: '${paths.runs}/best'}}\nlogger: {csv: {save_dir: '${paths.run}/a'}}\n"
    folder = write("experiment/mine.yaml", f"# @package _global_\n{text}")
    for words in ([], ["hydra.run.dir=/out"], ["paths.runs=/out"], ["paths.run=/out"]):
        assert compose("fit", ["experiment=mine", *words], config_dir=folder).command == "fit"


@pytest.mark.parametrize("text", ["setup: [id]", "additional_parameters: {wrap: id}"])
def test_shell_commands_are_taken_from_the_command_line_alone(write: Write, text: str) -> None:
    key, _, value = text.partition(": ")
    swept = f"sweeper: {{params: {{hydra.launcher.{key}: '{value}'}}}}"
    defaults = "defaults: [override /hydra/launcher: slurm]"
    experiment = f"{defaults}\nhydra:\n  launcher: {{{text}}}\n  {swept}\n"
    folder = write("experiment/mine.yaml", f"# @package _global_\n{experiment}")
    refusal = rf"'hydra\.launcher\.{key}' goes into a shell script: give it on the command"
    with pytest.raises(ConfigError, match=refusal):
        compose("fit", ["experiment=mine"], config_dir=folder)
    words = ["experiment=mine", f"hydra.launcher.{key}={value}"]
    assert compose("fit", words, config_dir=folder).command == "fit"


@pytest.mark.parametrize(
    ("word", "missing", "package"),
    [
        (
            "hydra/launcher=parallel",
            "hydra_plugins.hydra_joblib_launcher",
            "hydra-joblib-launcher",
        ),
        (
            "hydra/launcher=slurm_local",
            "hydra_plugins.hydra_submitit_launcher",
            "hydra-submitit-launcher",
        ),
        (
            "hydra.sweeper._target_=hydra_plugins.hydra_optuna_sweeper.OptunaSweeper",
            "hydra_plugins.hydra_optuna_sweeper",
            "hydra-optuna-sweeper",
        ),
    ],
)
def test_missing_extra_is_named(
    word: str, missing: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hydra_node, "find_spec", lambda name: None if name == missing else True)
    with pytest.raises(ConfigError, match=rf"needs a package: pip install {package}\.$"):
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


def test_first_job_of_a_sweep_is_returned() -> None:
    words = ["seed=range(4,9)", "trainer.devices=interval(2,3)"]
    with open_hydra() as hydra:
        cfg, checked = check_run(hydra, "fit", words, multirun=True)
        assert (cfg.seed, cfg.trainer.devices) == (4, 2.0)
        assert checked == words
        with pytest.raises(ConfigError, match=r"^'\+experiment=glob\(zzz\)' matches nothing\.$"):
            check_run(hydra, "fit", ["experiment=glob(zzz)"], multirun=True)


@pytest.mark.parametrize(
    "word", ["trainer=auto", "trainer=cpu", "debug=fast", "debug=overfit", "debug=profiler"]
)
def test_trainer_and_loggers_can_be_built(word: str, tmp_path: Path) -> None:
    cfg = compose("fit", [word, "trainer.accelerator=cpu", f"paths.run={tmp_path}"])
    loggers = instantiate(cfg.logger)
    trainer = instantiate(cfg.trainer, logger=list(loggers.values()))
    assert trainer.default_root_dir == str(tmp_path)
    folders = {name: Path(str(logger.log_dir)) for name, logger in loggers.items()}
    assert folders == {name: tmp_path / name for name in ("csv", "tensorboard")}
    assert instantiate(compose("fit", ["logger=none"]).logger) == {}
