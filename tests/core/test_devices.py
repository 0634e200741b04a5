"""Memory of the CPU serves again, and never while somebody holds it; and what a processor is fast in."""

import threading
from pathlib import Path

import pytest
import torch

from lit_data.core import devices
from lit_data.core.devices import exact_products, has_fast_bf16, read_cpu_flags, reused

SHAPE = (3, 512, 512)


@pytest.fixture(autouse=True)
def nothing_is_free() -> None:
    devices.free_memory.clear()
    devices.returned_memory.clear()


def test_memory_serves_again_when_the_last_reference_is_gone() -> None:
    first = reused(SHAPE)
    place, part = first.data_ptr(), first[1:2]
    del first
    other = reused(SHAPE)
    assert other.data_ptr() != place  # a part of the first is still held
    del part
    assert reused(SHAPE).data_ptr() == place
    assert reused((2, 512, 512)).shape == (2, 512, 512)


def test_threads_never_share_memory() -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(50):
            tensor = reused(SHAPE).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [
        # torch would emulate it
        ({"avx512_f": True, "avx512_bf16": False, "cpu_name": "bf16"}, False),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"amx_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({}, False),
    ],
)
def test_a_cpu_is_fast_in_bf16_with_instructions_and_convolutions_for_it(
    capabilities: dict[str, bool], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_fast_bf16("cpu") is fast
    assert has_fast_bf16("mps") is False
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # as on macOS
    assert has_fast_bf16("cpu") is False


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("model name\t: AMD\nflags\t\t: fpu avx512_bf16\n\nflags\t: fpu\n", {"fpu", "avx512_bf16"}),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", {"fp", "asimd", "bf16"}),
        ("\xff\x00 nothing of the kind", set()),
        (None, set()),
    ],
)
def test_an_older_torch_leaves_the_flags_to_linux(
    text: str | None, flags: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    if text is not None:
        (tmp_path / "cpuinfo").write_bytes(text.encode("latin-1"))
    assert read_cpu_flags(tmp_path / "cpuinfo") == flags


def test_products_are_exact_on_a_gpu_whatever_the_run_allows() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        for name, inside in (("cuda", "ieee"), ("cpu", "tf32")):
            with exact_products(torch.device(name)):
                assert torch.backends.cuda.matmul.fp32_precision == inside
            assert torch.get_float32_matmul_precision() == "high"
        with pytest.raises(ZeroDivisionError), exact_products(torch.device("cuda")):
            _ = 1 // 0
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
