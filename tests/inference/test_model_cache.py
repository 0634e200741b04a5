import os
from pathlib import Path

import pytest
import torch
from torch import nn

from lit_data.errors import ConfigError, DataError
from lit_data.inference import ModelCache


class Builder:
    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> nn.Module:
        self.read.append(path.name)
        net = nn.Conv2d(1, 1, 1)
        net.load_state_dict(torch.load(path, weights_only=True))
        return net


def _save(path: Path, value: float) -> Path:
    torch.save({"weight": torch.full((1, 1, 1, 1), value), "bias": torch.zeros(1)}, path)
    return path


def test_a_file_is_read_once(tmp_path: Path) -> None:
    cache, path = ModelCache(build := Builder()), _save(tmp_path / "a.pt", 1)
    assert cache.load(path) is cache.load(str(path))
    assert build.read == ["a.pt"]


def test_a_file_that_was_touched_copied_or_linked_gives_the_same_model(tmp_path: Path) -> None:
    cache, path = ModelCache(build := Builder()), _save(tmp_path / "a.pt", 1)
    model = cache.load(path)
    os.utime(path, ns=(1, 1))
    (tmp_path / "b.pt").write_bytes(path.read_bytes())
    (tmp_path / "c.pt").symlink_to(path)
    assert all(cache.load(tmp_path / name) is model for name in ("a.pt", "b.pt", "c.pt"))
    assert build.read == ["a.pt"]


def test_a_file_with_another_content_is_read_again(tmp_path: Path) -> None:
    cache, path = ModelCache(build := Builder()), _save(tmp_path / "a.pt", 1)
    first = cache.load(path)
    os.utime(_save(path, 2), ns=(1, 1))
    second = cache.load(path)
    assert second.weight.item() == 2  # type: ignore[operator,union-attr]
    os.utime(_save(path, 1), ns=(2, 2))
    assert cache.load(path) is first
    assert build.read == ["a.pt", "a.pt"]


def test_the_least_recently_used_model_goes(tmp_path: Path) -> None:
    cache = ModelCache(build := Builder(), max_models=2)
    paths = [_save(tmp_path / f"{name}.pt", value) for value, name in enumerate("abc")]
    for number in (0, 1, 0, 2, 0, 1):
        cache.load(paths[number])
    assert build.read == ["a.pt", "b.pt", "c.pt", "b.pt"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.pt", 1)

    def build(path: Path) -> nn.Module:
        os.utime(path, ns=(1, 1))
        return nn.Identity()

    cache = ModelCache(build)
    with pytest.raises(DataError, match=r"a\.pt: the file changed while its model was read"):
        cache.load(path)
    assert isinstance(cache.load(path), nn.Identity)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_models=0 must be at least 1"):
        ModelCache(Builder(), max_models=0)
    with pytest.raises(DataError, match=r"none\.pt: the model cannot be read .No such file"):
        ModelCache(Builder()).load(tmp_path / "none.pt")
