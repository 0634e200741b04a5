import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lit_data.app.configuration import names
from lit_data.app.configuration.names import allow_packages, check_targets, resolve_target
from lit_data.app.configuration.targets import instantiate
from lit_data.app.configuration.words import escape_references
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.grid import PatchGrid

SIZES = {"heights_px": 976, "widths_px": 176, "patch_px": 128, "stride_px": 112}
GRID = {"_target_": "lit_data.core.grid.PatchGrid", **SIZES}

HOSTILE_NAMES = [
    # run programs or Python text
    "os.system",
    "posix.system",
    "subprocess.Popen",
    "subprocess.check_output",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "runpy.run_path",
    "importlib.import_module",
    "ctypes.CDLL",
    "webbrowser.open",
    # unpickle
    "pickle.loads",
    "torch.load",
    "torch.hub.load",
    "torch.jit.load",
    "numpy.load",
    # write, delete, talk
    "shutil.rmtree",
    "pathlib.Path.unlink",
    "builtins.open",
    "socket.socket",
    # find any of these by another name
    "logging.os.system",
    "functools.partial",
    "operator.methodcaller",
    "hydra.utils.get_method",
    "hydra.utils.instantiate",
    "hydra._internal.utils._locate",
    "lit_data.app.configuration.targets.instantiate",
    "lit_data.app.configuration.targets.sys.modules",
    "lit_data.app.cli.main",
    "lit_data.app.cli.sys.modules",
    "torch.nn.Module.__init__.__globals__",
    "torch.optim.__builtins__.eval",
    "lightning.pytorch.cli.LightningCLI",
    "lightning.pytorch.core.saving.pl_load",
    "lightning.fabric.utilities.cloud_io._load",
    # look like an allowed name
    "lit_data",
    "lit_datax.module.Class",
    "torch.nnx.Class",
    ".lit_data.grid.PatchGrid",
    "..lit_data.grid.PatchGrid",
    "lit_data..grid.PatchGrid",
    "lit_data.core.grid.PatchGrid.",
    " lit_data.core.grid.PatchGrid",
    "lit_data.core.grid.PatchGrid\n",
    "lit_data .grid.PatchGrid",
    "lit_data/grid.PatchGrid",
    "lit_data:grid.PatchGrid",
    "l\u0456t_data.grid.PatchGrid",  # Cyrillic i
    "lit_data\u2024grid.PatchGrid",  # one dot leader
    "\uff4cit_data.grid.PatchGrid",  # full-width l, which Python itself would read as l
    "",
    # no name at all
    None,
    3,
    True,
    ["os.system"],
    {"name": "os.system"},
]


@pytest.fixture
def no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(names, "import_module", refuse)


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize("target", HOSTILE_NAMES)
def test_hostile_name_is_refused_before_import(target: object) -> None:
    for cfg in (
        {"model": {"_target_": target}},
        {"callbacks": [{"deep": {"_target_": target}}]},
        {"model": {"_target_": "lit_data.core.grid.PatchGrid", "inner": {"_target_": target}}},
        {"hydra": {"launcher": {"_target_": target}}},
    ):
        with pytest.raises(ConfigError, match=r"_target_' is .* not allowed"):
            check_targets(OmegaConf.create(cfg))
    with pytest.raises(ConfigError, match=r"_target_' is .* not allowed"):
        instantiate({"_target_": target})
    with pytest.raises(ConfigError, match=r"'model' is .* not allowed"):
        resolve_target(target, "model")  # type: ignore[arg-type]  # a file may hold anything


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize(
    "cfg",
    [
        {"name": "os.system", "model": {"_target_": "${name}"}},
        {"model": {"_target_": "${oc.decode:os.system}"}},
        {"model": {"_target_": "lit_data.${name}", "x": 1}, "name": "app.cli.main"},
        {"model": "${other}", "other": {"_target_": "os.system"}},
        {"model": "${oc.create:'{_target_: os.system}'}"},
    ],
)
def test_target_behind_an_interpolation_is_refused(cfg: dict[str, Any]) -> None:
    tree = OmegaConf.create(cfg)
    with pytest.raises(ConfigError, match="not allowed"):
        check_targets(tree)
    with pytest.raises(ConfigError, match="not allowed"):
        instantiate(tree.model)


def test_refusal_names_key_target_and_what_is_allowed() -> None:
    text = r"^'a\.b\[0\]\._target_' is 'os\.system', .* Allowed are names below .*--package NAME\.$"
    with pytest.raises(ConfigError, match=text):
        check_targets(OmegaConf.create({"a": {"b": [{"_target_": "os.system"}]}}))


@pytest.mark.parametrize(
    "target",
    [
        # modules reached through another module
        "lit_data.core.grid.np.load",
        "lit_data.core.rng.np.save",
        "torch.nn.functional.torch.load",
        "lightning.pytorch.callbacks.model_checkpoint.os.system",
        "lightning.pytorch.callbacks.model_checkpoint.shutil.rmtree",
        # objects that live elsewhere
        "lit_data.core.grid.dataclass",
        "torch.nn.functional.handle_torch_function",
        # methods, of which some unpickle
        "lightning.pytorch.demos.boring_classes.BoringModel.load_from_checkpoint",
        "lightning.pytorch.Trainer.fit",
        # neither class nor function
        "lit_data.core.grid.PatchGrid.count",
        "lit_data.core.types.Stage",
    ],
)
def test_alias_is_refused_and_not_called(target: str) -> None:
    text = r"is another name of|is really|neither a class nor a function"
    with pytest.raises(ConfigError, match=text):
        instantiate({"_target_": target})


@pytest.mark.parametrize(
    "target",
    [
        # functions of ours, of which some run or delete
        "lit_data.core.temp.remove_folder",
        "lit_data.wings.volumes.files.volume.import_medical",
        "lit_data.augment.stage_augmentations",
        # classes of ours that are made for no configuration
        "lit_data.core.shared_arrays.SharedMemory",
        "lit_data.images.store.store.DecodedStore",
        "lit_data.loading.processes.ProcessWorkers",
        "lit_data.callbacks.memory.post_mortem.PostMortems",
        "lit_data.core.errors.DataError",
        # functions of libraries
        "torch.nn.init.normal_",
        "torch.nn.utils.rnn.pad_sequence",
        "torch.distributed.fsdp.wrap.always_wrap_policy",
        "lightning.pytorch.loggers.utilities._version",
        "kornia.augmentation.utils.random_generator",
    ],
)
def test_only_public_classes_that_are_made_for_it_are_allowed(target: str) -> None:
    with pytest.raises(ConfigError, match=r"not allowed|neither a class nor|there is no"):
        instantiate({"_target_": target, "_partial_": True})


@pytest.mark.usefixtures("no_import")
@pytest.mark.parametrize(
    "target",
    [
        "lit_data.wings.volumes.files.sparse_store._remove_stale",
        "torch.nn.utils._deprecation_utils.lazy_deprecated_import",
        "lightning.fabric.plugins.precision.utils._ClassReplacementContextManager",
        "torchmetrics.text.BERTScore",
        "torch.optim._functional.adam",
    ],
)
def test_private_names_and_loaders_of_models_are_refused_before_import(target: str) -> None:
    with pytest.raises(ConfigError, match="not allowed"):
        check_targets({"model": {"_target_": target}})


REFERENCES = (
    "${oc.create:'{_target_: a.b}'}",
    "${oc.decode:'{_target_: os.system, _args_: [false]}'}",
    "${.x}",
    "\\${seed}",
)


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize("text", REFERENCES)
def test_text_that_looks_like_an_interpolation_stays_text(text: str) -> None:
    width = {"a": [escape_references(text)]}
    node = {"_target_": "own_targets.Model", "width": width}
    with allow_packages(["own_targets"]):
        built = instantiate(OmegaConf.create({"seed": 3, "node": node}).node)
        (other,) = instantiate(OmegaConf.create([node]))
        assert built.width == other.width == {"a": [text]}
        assert instantiate({"_target_": "own_targets.Model"}, text).width == text


@pytest.mark.parametrize("special", [{}, {"_recursive_": False}, {"_convert_": "none"}])
@pytest.mark.parametrize("where", ["node", "list", "dict", "args", "partial"])
def test_a_nested_name_is_refused_however_deep_it_lies(
    where: str, special: dict[str, object]
) -> None:
    evil: dict[str, object] = {"_target_": "os.system", "command": "false"} | special
    nested = {
        "node": {"inner": evil},
        "list": {"inner": [[evil]]},
        "dict": {"inner": {"a": {"b": evil}}},
        "args": {"_args_": [evil]},
        "partial": {"inner": evil | {"_partial_": True}},
    }
    with pytest.raises(ConfigError, match=r"_target_' is 'os\.system', which is not allowed"):
        instantiate(GRID | special | nested[where])


def test_hydra_names_are_allowed_below_hydra_alone() -> None:
    launcher = {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"}
    check_targets(OmegaConf.create({"hydra": {"launcher": launcher}}))
    with pytest.raises(ConfigError, match=r"'model._target_'"):
        check_targets(OmegaConf.create({"model": launcher}))
    with pytest.raises(ConfigError, match=r"'hydra.launcher._target_'"):
        check_targets(OmegaConf.create({"hydra": {"launcher": GRID}}))


def test_instantiate_builds_nested_nodes_and_hands_out_plain_data() -> None:
    node = {"first": [GRID | {"widths_px": "${size}"}], "rest": {"a": [1, "x"]}}
    made = instantiate(OmegaConf.create({"size": 176, "node": node}).node)
    assert isinstance(made["first"][0], PatchGrid)
    assert made["rest"] == {"a": [1, "x"]}
    assert type(made) is dict
    assert type(made["rest"]["a"]) is list
    assert instantiate(None) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"strid_px": 3},
            r"^unknown key 'grid\.strid_px': PatchGrid has no .*'grid\.stride_px'\?$",
        ),
        ({"zzz": 3}, r"^unknown key 'grid\.zzz': PatchGrid has no such argument\.$"),
        ({"_args_": "xy"}, r"^'grid\._args_' is 'xy'; it must be a list\.$"),
        ({"_partial_": "yes"}, r"^'grid\._partial_' is 'yes'; it must be true or false\.$"),
        ({"_recursive_": 0}, r"^'grid\._recursive_' is 0; it must be true or false\.$"),
        ({"_target_": "lit_data.core.grid.PatchGird"}, r"PatchGird'\. Did you mean 'PatchGrid'\?$"),
        (
            {"_target_": "lit_data.core.gird.PatchGrid"},
            r"'lit_data\.core\.gird'\. Did you mean 'grid'\?$",
        ),
        ({"patch_px": "${nowhere}"}, "Interpolation key 'nowhere' not found"),
    ],
)
def test_instantiate_names_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        instantiate(OmegaConf.create({"grid": GRID | changes}).grid)


def test_arguments_that_a_class_refuses_are_named() -> None:
    with pytest.raises(ConfigError, match="PatchGrid: missing a required argument: 'heights_px'"):
        instantiate({"_target_": "lit_data.core.grid.PatchGrid"})
    with pytest.raises(ConfigError, match=r"Trainer rejects its arguments: .*gpx"):
        instantiate({"_target_": "lightning.pytorch.Trainer", "accelerator": "gpx"})


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_targets.py").write_text(
        "from os import getcwd\n"
        "from lit_data.core.errors import DataError\n"
        "def refuse(): raise DataError('bad image')\n"
        "def divide(): return 1 / 0\n"
        "def needs(): pass\n"
        "class Model:\n    def __init__(self, width): self.width = width\n"
    )
    (tmp_path / "own_needy.py").write_text("import package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_targets", "own_needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own_package")
def test_package_is_allowed_while_asked_for() -> None:
    node = {"_target_": "own_targets.Model", "width": 3}
    with allow_packages(["own_targets"]):
        check_targets(node)
        assert instantiate(node).width == 3
        with pytest.raises(ConfigError, match=r"is really 'posix\.getcwd'|neither a class nor"):
            instantiate({"_target_": "own_targets.getcwd"})
    with pytest.raises(ConfigError, match="not allowed"):
        instantiate(node)


@pytest.mark.usefixtures("own_package")
def test_errors_of_constructors_pass_through() -> None:
    with allow_packages(["own_targets", "own_needy"]):
        with pytest.raises(DataError, match=r"^bad image$"):
            instantiate({"_target_": "own_targets.refuse"})
        with pytest.raises(ZeroDivisionError):
            instantiate({"_target_": "own_targets.divide"})
        with pytest.raises(ConfigError, match="needs the package 'package_that_nobody_has'"):
            instantiate({"_target_": "own_needy.Model"})
    name = "package_that_nobody_has"
    with allow_packages([name]), pytest.raises(ConfigError, match=r"Is it installed\?$"):
        instantiate({"_target_": f"{name}.Model"})


@pytest.mark.parametrize("name", ["", ".", "a b", "../x", "os.", "__main__"])
def test_package_name_is_checked(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a package name"), allow_packages([name]):
        pass
