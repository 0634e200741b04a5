"""A value of the wrong kind under any key of any experiment is taken, or refused in one line, soon."""

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lit_data.app.build import build_any_datamodule
from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.targets import instantiate
from lit_data.core.errors import LitDataError
from tests.outputs import EXPERIMENTS

SLOW = [
    pytest.param(kind, marks=pytest.mark.slow)
    for kind in ("stripe", "segmentation", "classification", "detection", "watermark", "gan")
]
VALUES = (None, True, "abc", "", -1, 0, 1.5, float("inf"))
VALUES += ([], ["a", "b"], [1, 2, 3, 4, 5], {"a": 1})

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.timeout(200),
]


def _read(cfg: DictConfig) -> None:
    data = build_any_datamodule(cfg)
    data.prepare_data()
    data.setup("fit")
    for stage in ("train", "val"):
        data.transform(next(iter(data.make_loader(stage))), stage)


def _build_rest(cfg: DictConfig) -> None:
    instantiate(cfg.model)
    instantiate({name: node for name, node in cfg.callbacks.items() if node is not None})
    instantiate(cfg.trainer, callbacks=None, logger=False)


def _list_keys(node: Any, key: str) -> Iterator[str]:
    for name in node:
        yield f"{key}.{name}"
        if OmegaConf.is_dict(node) and OmegaConf.is_dict(node[name]):
            yield from _list_keys(node[name], f"{key}.{name}")


def _try_all(cfg: DictConfig, parts: list[str], use: Callable[[DictConfig], None]) -> int:
    use(cfg)
    refused = 0
    for key in (
        key for part in parts for key in _list_keys(cfg[part], part) if not key.endswith("_target_")
    ):
        value = random.Random(key).choice(VALUES)
        changed = copy.deepcopy(cfg)
        OmegaConf.update(changed, key, value, merge=False, force_add=True)
        try:
            use(changed)
        except LitDataError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{key}={value!r}: {type(error).__name__}: {error}")
    return refused


@pytest.mark.parametrize("kind", ["ct", *SLOW])
def test_a_wrong_value_is_refused_in_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIT_DATA_CACHE", str(tmp_path / "cache"))
    words = [f"experiment={kind}", *EXPERIMENTS[kind], "paths.run=run", "trainer.accelerator=cpu"]
    cfg = compose("fit", [*words, "data.loader.num_workers=0", "data.loader.batch_size=2"])
    OmegaConf.set_struct(cfg, value=False)
    assert _try_all(cfg, ["data"], _read) > 15
    assert _try_all(cfg, ["model", "callbacks", "trainer"], _build_rest) > 15
