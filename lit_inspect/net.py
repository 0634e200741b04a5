"""`Net`: the graph of a file in onnxruntime, within limits of memory and time."""

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lit_inspect.errors import AnswerError, BoardError, UsageError, describe_error

Floats = NDArray[np.float32]

_SLACK = 1e-3  # rounding error of sums of weights and of int8, as in `predict`
_GIB = 2**30
_INPUT = "images"
_STEP_S = 0.1  # time between two checks


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of the time and memory of a net, whose file may be untrusted.

    Attributes:
        seconds: Limit for one call, for the start, and for all golden answers together.
        memory_bytes: Limit for the values between layers; the weights are not counted.
        give_up: Called with a reason if a call continues for a while after it was stopped, for
            example inside one huge layer, or fills memory in another way, for example with texts;
            None lets it run. Use it in separate processes.

    Raises:
        UsageError: A limit is out of its range.
    """

    seconds: float = 10.0
    memory_bytes: int = 3 * _GIB // 2
    give_up: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 86400 or not 0 < self.memory_bytes < 2**62:
            raise UsageError(
                f"seconds={self.seconds:g}, memory_bytes={self.memory_bytes:g}: need more than 0, "
                "and at most a day"
            )


class _Call(NamedTuple):
    """A call of onnxruntime that is in progress.

    Attributes:
        stop: Function that ends it between two layers.
        ends_s: Time at which it must end.
        most_bytes: Most memory of the process until then.
    """

    stop: Callable[[], None]
    ends_s: float
    most_bytes: int


class _Watch:
    """Stops a call that takes too much time or memory, from a separate thread.

    Args:
        limits: Limits of each call.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._call: _Call | None = None
        is_closed = threading.Event()
        weakref.finalize(self, is_closed.set)
        arguments = (weakref.ref(self), is_closed)
        threading.Thread(target=_watch, args=arguments, daemon=True).start()

    def begin(self, stop: Callable[[], None], more_bytes: int = 0) -> None:
        """Start to watch a call, and call `stop` if it takes too long before `end` is called.

        Args:
            stop: Function that ends the call.
            more_bytes: Memory that the call may use in addition to the limit.
        """
        most_bytes = 0
        if self._limits.give_up is not None:
            # Slightly above the limit of the arena, which should be reached first.
            most_bytes = _read_peak_bytes() + self._limits.memory_bytes + _GIB // 8 + more_bytes
        self._call = _Call(stop, time.monotonic() + self._limits.seconds, most_bytes)

    def end(self) -> None:
        """Stop watching the call."""
        self._call = None

    def look(self) -> None:
        """Stop the current call if it takes too much time or memory."""
        call, limits = self._call, self._limits
        if call is None:
            return
        late_s = time.monotonic() - call.ends_s
        if late_s > 0:
            call.stop()
        if limits.give_up is None or self._call is not call:
            return
        if late_s > limits.seconds / 2:
            limits.give_up(describe_end(limits))
        if _read_peak_bytes() > call.most_bytes:
            limits.give_up(describe_memory(limits))


def _watch(reference: "weakref.ref[_Watch]", is_closed: threading.Event) -> None:
    while not is_closed.wait(_STEP_S):
        watch = reference()
        if watch is not None:
            watch.look()
        del watch  # so that it can be deleted while this thread waits


def _read_peak_bytes() -> int:
    """Return the peak memory of this process; 0 on Windows, which has no such call."""
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def describe_end(limits: Limits) -> str:
    """Return the reason why a call was stopped, with advice."""
    return (
        f"the net took more than {limits.seconds:g} s: on a slow machine allow more (--seconds, "
        "Limits(seconds=...)), otherwise export a smaller predict.tile_px"
    )


def describe_memory(limits: Limits) -> str:
    """Return the reason why a call got no more memory, with advice."""
    return (
        f"the net needs more than {limits.memory_bytes / _GIB:g} GiB: allow more (--memory-gib, "
        "Limits(memory_bytes=...)), or export a smaller predict.tile_px"
    )


class Net:
    """The graph of a file.

    Args:
        data: In ONNX.
        threads: That it computes with; None: one for each core of this process.
        limits: Bounds.

    Raises:
        UsageError: onnxruntime is not installed.
        BoardError: onnxruntime refuses it, or it has other ends than an exported one.
    """

    def __init__(self, data: bytes, threads: int | None, limits: Limits) -> None:
        try:
            import onnxruntime
        except ImportError as error:  # it is in an extra of lit_data
            raise UsageError(
                "an .inspect file needs onnxruntime: pip install onnxruntime"
            ) from error
        self._limits = limits
        self._ends_s = math.inf
        self._watch = _Watch(limits)
        self._new_options = onnxruntime.RunOptions
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or _count_cores()
        options.log_severity_level = 4  # errors are raised; text of the file is not printed
        _bound_memory(onnxruntime, options, limits.memory_bytes)

        def cancel() -> None:
            options.set_load_cancellation_flag(True)

        self._watch.begin(cancel, more_bytes=4 * len(data))  # weights are read, packed and stored
        try:
            self._session = onnxruntime.InferenceSession(
                data,
                options,
                providers=["CPUExecutionProvider"],
                # Exported graphs have no constants to fold; folding in other graphs would ignore limits.
                disabled_optimizers=["ConstantFolding"],
            )
            is_known = self._has_known_ends()
        except Exception as error:  # onnxruntime has errors of its own
            raise BoardError(f"its net cannot be opened ({describe_error(error)})") from error
        finally:
            self._watch.end()
        if not is_known:
            raise BoardError("its net does not go from images [B, C, h, w] to one array of float32")

    @property
    def input_shape(self) -> list[int | str]:
        """Length of each axis of a batch; a free axis has a name."""
        return list(self._session.get_inputs()[0].shape)

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Refuse calls in this context after they have taken the seconds of one call in total."""
        self._ends_s = time.monotonic() + self._limits.seconds
        try:
            yield
        finally:
            self._ends_s = math.inf

    def run(self, images: Floats) -> Floats:
        """Return the answers for a batch [B, C, h, w] in 0..1; they are in 0..1 too.

        Raises:
            AnswerError: There are none within the limits, or they contain NaN, infinite values or
                values outside of 0..1.
        """
        if time.monotonic() > self._ends_s:
            raise AnswerError(describe_end(self._limits))
        options = self._new_options()
        options.log_severity_level = 4

        def stop() -> None:
            options.terminate = True

        self._watch.begin(stop)
        try:
            feeds = {_INPUT: np.ascontiguousarray(images)}
            answers: Floats = self._session.run(None, feeds, options)[0]
        except Exception as error:  # onnxruntime has errors of its own
            raise AnswerError(self._explain(error, is_stopped=options.terminate)) from error
        finally:
            self._watch.end()
        return _check_values(answers)

    def _explain(self, error: Exception, *, is_stopped: bool) -> str:
        if is_stopped:
            return describe_end(self._limits)
        if "Available memory of" in str(error):
            return describe_memory(self._limits)
        return f"the net gives no answer ({describe_error(error)})"

    def _has_known_ends(self) -> bool:
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        ends = [(end.name, end.type) for end in inputs]
        is_image = ends == [(_INPUT, "tensor(float)")] and len(inputs[0].shape) == 4
        return is_image and [end.type for end in outputs] == ["tensor(float)"]


def _check_values(answers: Floats) -> Floats:
    """Return answers clipped to 0..1, which rounding may exceed slightly.

    Raises:
        AnswerError: One is NaN, infinite or outside of 0..1.
    """
    if not answers.size:
        raise AnswerError(f"the net gives nothing, {list(answers.shape)}")
    least, largest = answers.min(), answers.max()
    if not (least >= -_SLACK and largest <= 1 + _SLACK):  # this form also refuses NaN
        raise AnswerError(f"the net gives values from {least:.4g} to {largest:.4g}, not in 0..1")
    if least < 0 or largest > 1:
        return answers.clip(0, 1)
    return answers


def _bound_memory(onnxruntime: Any, options: Any, memory_bytes: int) -> None:  # noqa: ANN401 - it ships no types
    """Give a session a separate arena of limited size."""
    kind = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR
    place = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, onnxruntime.OrtMemType.DEFAULT)
    arena = onnxruntime.OrtArenaCfg({"max_mem": memory_bytes})
    onnxruntime.create_and_register_allocator(place, arena)  # for sessions that are opened later
    options.add_session_config_entry("session.use_env_allocators", "1")


def _count_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows have no affinity mask
