"""When volumes are indexed, and where they are kept."""

import logging
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.errors import ConfigError, DataError
from lit_data.io.volumes import IndexOptions, VolumeBank, banks, find_volumes, open_bank, preload
from lit_data.types import Array

SHAPE = (5, 8, 9)
OPTIONS = IndexOptions(low_hu=500)


def _write(folder: Path, count: int = 3) -> list[Array]:
    folder.mkdir()
    rng = np.random.default_rng(0)
    volumes = [rng.integers(-1000, 1000, SHAPE, dtype=np.int16) for _ in range(count)]
    for number, volume in enumerate(volumes):
        np.save(folder / f"v{number}.npy", volume)
    return volumes


def _open(tmp_path: Path, **arguments: Any) -> VolumeBank:
    return open_bank(
        find_volumes(tmp_path / "ct"), tmp_path / "cache", options=OPTIONS, **arguments
    )


def _check(bank: VolumeBank, volumes: list[Array]) -> None:
    assert len(bank) == len(volumes)
    for number, volume in enumerate(volumes):
        np.testing.assert_array_equal(bank[number].coords(), np.argwhere(volume > 500))
        np.testing.assert_array_equal(bank[number].values, volume[volume > 500])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the dense volumes that are indexed from here on."""
    names: list[str] = []

    def watch(module: Any, name: str) -> None:
        real = getattr(module, name)

        def watched(source: Any, *rest: Any) -> Any:
            names.append(source.name)
            return real(source, *rest)

        monkeypatch.setattr(module, name, watched)

    watch(banks, "write_volume")
    watch(banks, "index_source")
    watch(preload, "index_source")
    monkeypatch.setattr("lit_data.io.volumes.sparse_build.write_volume", banks.write_volume)
    return names


@pytest.mark.parametrize("preload", [False, True, "auto"])
@pytest.mark.parametrize("cache_data", [False, True])
@pytest.mark.parametrize("precompute", [True, "lazy", False])
def test_every_way_gives_the_same_volumes_also_in_a_copy(
    tmp_path: Path, precompute: Any, cache_data: bool, preload: Any
) -> None:
    volumes = _write(tmp_path / "ct")
    bank = _open(
        tmp_path, precompute=precompute, cache_data=cache_data, preload=preload, preload_bytes=10**6
    )
    _check(bank, volumes)
    _check(pickle.loads(pickle.dumps(bank)), volumes)
    assert bank.name(2) == str(tmp_path / "ct" / "v2.npy")
    assert bank.skipped == ()


@pytest.mark.parametrize(
    ("arguments", "before", "each_time"),
    [
        ({"precompute": True}, ["v0", "v1", "v2"], []),
        ({"precompute": "lazy"}, [], []),
        ({"precompute": "lazy", "preload": True}, ["v0", "v1", "v2"], []),
        ({"precompute": False}, [], ["v0", "v1", "v2"]),
        ({"precompute": False, "cache_data": True}, [], []),
        ({"precompute": False, "preload": True}, ["v0", "v1", "v2"], []),
        (
            {"precompute": False, "preload": "auto", "preload_bytes": 3 * 6 * 360},
            ["v0", "v1", "v2"],
            [],
        ),
        (
            {"precompute": False, "preload": "auto", "preload_bytes": 3 * 6 * 360 - 1},
            [],
            ["v0", "v1", "v2"],
        ),
    ],
)
def test_dense_volumes_are_read_when_they_should_be(
    tmp_path: Path,
    reads: list[str],
    arguments: dict[str, Any],
    before: list[str],
    each_time: list[str],
) -> None:
    volumes = _write(tmp_path / "ct")
    bank = _open(tmp_path, **arguments)
    assert reads == before
    for number in range(3):
        bank[number]
    assert sorted({*reads}) == ["v0", "v1", "v2"]
    reads.clear()
    for number in range(3):
        bank[number]
    assert reads == each_time
    _check(bank, volumes)


def test_points_are_counted_as_soon_as_all_are_known(tmp_path: Path) -> None:
    volumes = _write(tmp_path / "ct")
    counts = [int((volume > 500).sum()) for volume in volumes]
    for arguments in ({"precompute": "lazy"}, {"precompute": False, "cache_data": True}):
        bank = _open(tmp_path, **arguments)
        assert bank.counts is None
        for number in range(3):
            assert bank.counts is None
            bank[number]
        assert bank.counts is not None
        assert bank.counts.tolist() == counts
    stored = _open(tmp_path)
    assert stored.counts is not None
    assert stored.counts.tolist() == counts
    assert _open(tmp_path, precompute=False).counts is None


def test_a_set_is_preloaded_only_if_it_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _write(tmp_path / "ct")
    caplog.set_level(logging.INFO)
    size_bytes = sum(path.stat().st_size for path in _open(tmp_path).path.glob("*.voxels/*.npy"))  # type: ignore[attr-defined]
    for limit, expected in [(size_bytes, 1), (size_bytes - 1, 0)]:
        caplog.clear()
        _open(tmp_path, preload_bytes=limit)
        assert caplog.text.count("preloaded 3 sparse volumes") == expected
    monkeypatch.setattr(banks, "PRELOAD_VOLUMES", 2)
    caplog.clear()
    _open(tmp_path, preload_bytes=size_bytes)
    assert "preloaded 3 sparse volumes" not in caplog.text


@pytest.mark.parametrize("precompute", ["lazy", False])
def test_bad_headers_are_found_before_the_first_epoch(tmp_path: Path, precompute: Any) -> None:
    volumes = _write(tmp_path / "ct")
    (tmp_path / "ct" / "a.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"a\.npy: not a NumPy(.|\n)*1 of 4 volumes are bad"):
        _open(tmp_path, precompute=precompute)
    bank = _open(tmp_path, precompute=precompute, on_bad="skip")
    _check(bank, volumes)
    assert [Path(path).name for path, _ in bank.skipped] == ["a.npy"]


def test_processes_share_what_was_preloaded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "ct").mkdir()
    np.save(tmp_path / "ct" / "v.npy", rng.integers(501, 1000, (40, 40, 40), dtype=np.int16))
    bank = _open(tmp_path, precompute=False, preload=True)
    blob = pickle.dumps(bank)
    assert len(blob) < 4000 < bank[0].nbytes
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_sum_positions, (blob,)) == int(bank[0].positions.sum(dtype=np.int64))


def _sum_positions(blob: bytes) -> int:
    return int(pickle.loads(blob)[0].positions.sum(dtype=np.int64))


@pytest.mark.parametrize("arguments", [{"precompute": "now"}, {"preload": "lazy"}])
def test_arguments_that_are_not_allowed(tmp_path: Path, arguments: dict[str, Any]) -> None:
    _write(tmp_path / "ct", 1)
    with pytest.raises(ConfigError, match="give true, false"):
        _open(tmp_path, **arguments)
