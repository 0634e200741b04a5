"""Calls of the net, from stored pixels to a value for each pixel, and the threads that make them."""

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError
from lit_data.core.value_range import find_unit_range, to_unit

Augment = Literal["flips", "d4"]
Turn = tuple[int, bool]
"""Quarter turns, then whether left and right are exchanged."""

TURNS: dict[Augment, tuple[Turn, ...]] = {
    "flips": ((0, False), (0, True), (2, True), (2, False)),  # none, left-right, top-bottom, both
    "d4": tuple((quarters, is_mirrored) for is_mirrored in (False, True) for quarters in range(4)),
}


def average_turned(
    call: Callable[[Tensor], Tensor], tiles: Tensor, turns: tuple[Turn, ...]
) -> Tensor:
    """Average a net's outputs over all turns of the tiles, one turn at a time.

    Args:
        call: From [B, C, h, w] to [B, K, h, w].
        tiles: [B, C, h, w]; some turns swap the height and width of tiles that are not square.
        turns: Turns of the tiles.

    Returns:
        [B, K, h, w].
    """
    total: Tensor | None = None
    for one in turns:
        # The net may work in place, and a turn by nothing copies nothing.
        turned = turn(tiles, one).clone()
        answer = turn_back(call(turned), one)
        total = answer if total is None else total + answer
    assert total is not None
    return total / len(turns)


def turn(tiles: Tensor, how: Turn) -> Tensor:
    """Turn and mirror: [B, C, h, w]."""
    quarters, is_mirrored = how
    turned = torch.rot90(tiles, quarters, (2, 3)) if quarters else tiles
    return turned.flip(3) if is_mirrored else turned


def turn_back(tiles: Tensor, how: Turn) -> Tensor:
    """Undo `turn`."""
    quarters, is_mirrored = how
    mirrored = tiles.flip(3) if is_mirrored else tiles
    return torch.rot90(mirrored, -quarters, (2, 3)) if quarters else mirrored


Precision = Literal["fp32", "bf16", "fp16"]
Activation = Literal["none", "sigmoid", "softmax"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """Options of the calls of a net.

    Args:
        precision: `bf16` and `fp16` by autocast.
        channels_last: Memory format of weights and tiles.
        compile: By `torch.compile`.
        augment: Turns over which each tile's values are averaged.
        activation: Function of the net's output, in float32.
        value_range: Pixels (low, high) that become 0 and 1; None takes the range of the dtype.

    Raises:
        ConfigError: A name is unknown, or the range is empty.
    """

    precision: Precision = "fp32"
    channels_last: bool = False
    compile: bool = False
    augment: Augment | None = None
    activation: Activation = "none"
    value_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Check the names."""
        for name, value, allowed in (
            ("precision", self.precision, get_args(Precision)),
            ("activation", self.activation, get_args(Activation)),
            ("augment", self.augment, (None, *get_args(Augment))),
        ):
            check_choice(name, value, allowed)
        if self.value_range is not None and not self.value_range[0] < self.value_range[1]:
            raise ConfigError(
                f"value_range={list(self.value_range)} must be [low, high] with low < high"
            )


class Forward:
    """Calls a net in inference mode, and restores its state after each call.

    Args:
        model: From [B, C, h, w] float32 to [B, K, h, w]; it goes to the device.
        device: The device that computes.
        options: Options of the calls.

    Raises:
        ConfigError: There is no compiler for it.
    """

    def __init__(self, model: nn.Module, device: torch.device, options: ForwardOptions) -> None:
        self.device = device
        self.options = options
        self.model = model.to(device)
        self._format = torch.channels_last if options.channels_last else torch.contiguous_format
        if options.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._evaluation = _Evaluation(self.model)
        self._call: Callable[[Tensor], Tensor] = self.model
        if options.compile:
            check_compiler(device)
            # Tiles come in one shape, so nothing is gained by kernels for all of them.
            self._call = torch.compile(self.model, dynamic=False)

    def __call__(self, tiles: Tensor) -> Tensor:
        """Return values of tiles.

        Args:
            tiles: [B, C, h, w] on any device, pixels as stored.

        Returns:
            [B, K, h, w] float32 on the device.

        Raises:
            ConfigError: The net does not give a value for every pixel.
        """
        return self._run(tiles, self._call)

    def call_plain(self, tiles: Tensor) -> Tensor:
        """Call the net as it is, not compiled."""
        return self._run(tiles, self.model)

    def _run(self, tiles: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        with self._evaluation.on(), torch.inference_mode(), self._autocast():
            images = self._scale(tiles.to(self.device, non_blocking=True))
            images = images.contiguous(memory_format=self._format)
            predict = functools.partial(self._predict, call)
            if self.options.augment is None:
                return predict(images)
            return average_turned(predict, images, TURNS[self.options.augment])

    def _scale(self, tiles: Tensor) -> Tensor:
        dtype = np.dtype(str(tiles.dtype).removeprefix("torch."))
        images = to_unit(tiles, find_unit_range(dtype, self.options.value_range))
        # Nets that work in place would change tiles that may be needed again.
        return images.clone() if images is tiles else images

    def _predict(self, call: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        output = call(images)
        _check_output(output, images, self.model)
        values = output.float()
        if self.options.activation == "sigmoid":
            return values.sigmoid()
        return values.softmax(1) if self.options.activation == "softmax" else values

    def _autocast(self) -> AbstractContextManager[None]:
        dtype = _DTYPES.get(self.options.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


def check_compiler(device: torch.device) -> None:
    """Check that the compiler that `torch.compile` needs is there.

    Raises:
        ConfigError: It is missing.
    """
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++", "c++"]
    if device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"compile=true needs a C++ compiler, and none of {', '.join(names)} is installed"
        )
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError("compile=true needs Triton on a GPU, and it is not installed")


def _check_output(output: object, images: Tensor, model: nn.Module) -> None:
    count, _, height, width = images.shape
    form = f"a {type(output).__name__}"
    if isinstance(output, Tensor):
        form = f"a tensor {list(output.shape)}"
        if output.ndim == 4 and (len(output), *output.shape[2:]) == (count, height, width):
            return
    raise ConfigError(
        f"{type(model).__name__} gives {form} for images {list(images.shape)}: it must give "
        f"[{count}, K, {height}, {width}], a value of every pixel"
    )


class _Evaluation:
    """Keeps a net in evaluation mode while at least one thread calls it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._calls = 0  # under way
        self._training: list[nn.Module] = []  # modules to put back into training mode

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            self._calls += 1
            if self._calls == 1:
                self._training = [part for part in self._model.modules() if part.training]
                if self._training:
                    self._model.eval()
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1  # the last thread puts the modes back
                if self._calls == 0:
                    for part in self._training:
                        part.training = True
                    self._training = []


T = TypeVar("T")

_MOST_THREADS = 4  # by default: each more has tensors of its own


class InferenceThreads:
    """Threads that compute in parallel.

    A single thread is the caller's own, and each call then finishes immediately. The cores that
    torch uses for one operation are divided among several threads. Several threads with few cores
    each are faster than one thread with all cores: the operations of a small image are too short to
    be divided, and some cannot be divided.

    Args:
        count: Number of threads.

    Attributes:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = None if count == 1 else _start(count)

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Submit a call to the next free thread."""
        if self._pool is not None:
            return self._pool.submit(call)
        done: Future[T] = Future()
        done.set_result(call())
        return done

    def close(self) -> None:
        """End the threads after their current calls; waiting calls are dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def choose_threads(device: torch.device) -> int:
    """Return the number of threads: one for each core that torch uses, at most 4; 1 on an accelerator."""
    return min(_MOST_THREADS, torch.get_num_threads()) if device.type == "cpu" else 1


def _start(count: int) -> ThreadPoolExecutor:
    """Start all threads at once, each with its part of the cores."""
    all_cores = torch.get_num_threads()
    cores = max(1, all_cores // count)
    has_started = threading.Barrier(count)  # so that no thread takes two of the calls
    pool = ThreadPoolExecutor(count, thread_name_prefix="lit_data_inference")
    starts = [pool.submit(_take_cores, cores, has_started) for _ in range(count)]
    for start in starts:
        start.result()
    torch.set_num_threads(all_cores)  # of this thread as before, and of threads to come
    return pool


def _take_cores(cores: int, has_started: threading.Barrier) -> None:
    # It holds for the thread that sets it, and for others that have not asked yet: this one asks.
    torch.set_num_threads(cores)
    torch.get_num_threads()
    has_started.wait()
