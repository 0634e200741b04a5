"""``torch.cuda`` without a GPU: streams and events that are late, bytes that are counted, and a page-locked memory."""

import ctypes
import threading
import time
import types
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from tests.simulated.log import LOG

DEVICES = 2
TOTAL_BYTES = 16 * 2**30
LIBRARY = None  # set by `install`
_local = threading.local()
_defaults = {}
_streams = weakref.WeakSet()


def normalise(device: Any = None) -> torch.device:
    """A device with its number; the current one where none is given."""
    if device is None or device == -1:
        return torch.device("cuda", LIBRARY.sim_get_device())
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.index is not None or found.type not in ("cuda", "mps"):
        return found
    return torch.device(found.type, LIBRARY.sim_get_device() if found.type == "cuda" else 0)


def number_of(device: Any = None) -> int:
    """The number of a device."""
    return normalise(device).index or 0


class Stream:
    """Work that was asked for and is not done yet, in order: copies, events, and waits for events of other streams."""

    _count = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        Stream._count += 1
        self.device, self.priority, self.stream_id = normalise(device), priority, Stream._count
        self.cuda_stream, self.device_index, self.device_type = self.stream_id, self.device.index, 1
        self.pending = []
        _streams.add(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        self.pending.append(event.finish)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        LOG.wait("stream.synchronize")
        self.flush()

    def query(self) -> bool:
        return not self.pending

    def flush(self) -> None:
        """Do all that is asked for."""
        todo, self.pending = self.pending, []
        for work in todo:
            if isinstance(work, Event):
                work.done = True
            else:
                work()

    def __enter__(self) -> "Stream":
        self._context = StreamContext(self)
        return self._context.__enter__() or self

    def __exit__(self, *_: object) -> None:
        self._context.__exit__()


class Event:
    """Done once its stream has come to it; nothing moves a stream but the host, or work that needs it."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timing, self.done, self.at_s = enable_timing, True, 0.0
        self.stream = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream, self.done, self.at_s = stream or current_stream(), False, time.perf_counter()
        LOG.note(f"event on {self.stream.device}")
        self.stream.pending.append(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Whether nothing lies before it; asking lets time pass."""
        if not self.done and self.stream is not None and self.stream.pending[:1] == [self]:
            self.stream.pending.pop(0)
            self.done = True
        return self.done

    def finish(self) -> None:
        """Do all that lies before it."""
        while not self.done and self.stream is not None:
            self.stream.flush()

    def synchronize(self) -> None:
        LOG.wait("event.synchronize")
        self.finish()

    def elapsed_time(self, other: "Event") -> float:
        if not (self.timing and other.timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if not (self.done and other.done):
            raise RuntimeError("CUDA error: device not ready")
        return (other.at_s - self.at_s) * 1e3


class StreamContext:
    """Makes a stream, and its device, the current one of this thread."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> Stream | None:
        if self.stream is not None:
            self._before = LIBRARY.sim_get_device(), _current().get(self.stream.device.index)
            LIBRARY.sim_set_device(self.stream.device.index)
            _current()[self.stream.device.index] = self.stream
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            number, before = self._before
            LIBRARY.sim_set_device(number)
            _current()[self.stream.device.index] = before or default_stream(self.stream.device)


def default_stream(device: Any = None) -> Stream:
    number = number_of(device)
    if number not in _defaults:
        _defaults[number] = Stream(torch.device("cuda", number))
    return _defaults[number]


def current_stream(device: Any = None) -> Stream:
    return _current().get(number_of(device)) or default_stream(device)


def finish_all() -> None:
    """Do all that any stream was asked for."""
    for stream in list(_streams):
        stream.flush()


def _current() -> dict[int, Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = {}
    return _local.streams


class Memory:
    """Bytes of the storages on each device; beyond its limit the error that CUDA raises."""

    def __init__(self) -> None:
        self.now = Counter()
        self.peak = Counter()
        self.reserved = Counter()
        self.share = {}
        self.ooms = 0
        self._seen = {}
        self._lock = threading.RLock()

    def limit(self, number: int) -> int:
        return int(TOTAL_BYTES * self.share.get(number, 1.0))

    def add(self, tensor: Tensor, number: int) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._seen or not size:
                return
            self.check(number, size)
            self._seen[key] = size
            self.now[number] += size
            self.peak[number] = max(self.peak[number], self.now[number])
            self.reserved[number] = max(self.reserved[number], self.now[number])
            weakref.finalize(storage, self._drop, key, number).atexit = False

    def check(self, number: int, size: int) -> None:
        """Raise CUDA's error if so many bytes more do not fit."""
        if self.now[number] + size > self.limit(number):
            self.ooms += 1
            raise torch.OutOfMemoryError(self._describe(number, size))

    def empty(self) -> None:
        LOG.note("empty_cache")
        self.reserved = Counter(self.now)

    def _drop(self, key: int, number: int) -> None:
        with self._lock:
            self.now[number] -= self._seen.pop(key, 0)

    def _describe(self, number: int, size: int) -> str:
        free = self.limit(number) - self.now[number]
        return (
            f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU {number} has a total capacity of "
            f"{TOTAL_BYTES / 2**30:.2f} GiB of which {free / 2**30:.2f} GiB is free."
        )


MEMORY = Memory()


class Runtime:
    """The few functions of the CUDA runtime that are called; `fails` is what page-locking answers."""

    fails = 0
    pending = 0
    """An error that the next kernel raises, as a failed call leaves it behind."""

    @classmethod
    def cudaHostRegister(cls, address: int, nbytes: int, flags: int) -> int:
        answer = cls.fails or LIBRARY.sim_register(address, nbytes)
        LOG.note(f"cudaHostRegister {answer}")
        cls.pending = answer
        return int(answer)

    @classmethod
    def cudaHostUnregister(cls, address: int) -> int:
        return int(LIBRARY.sim_unregister(address))

    @classmethod
    def cudaGetLastError(cls) -> int:
        answer, cls.pending = cls.pending, 0
        return answer

    @classmethod
    def raise_pending(cls) -> None:
        """What the check behind each launch of a kernel does."""
        if cls.cudaGetLastError():
            raise torch.AcceleratorError("CUDA error: out of memory")


def _nested_stats(device: Any = None) -> dict[str, Any]:
    number = number_of(device)
    held = {
        "current": MEMORY.now[number],
        "peak": MEMORY.peak[number],
        "allocated": MEMORY.peak[number],
        "freed": 0,
    }
    kept = dict.fromkeys(("current", "peak", "allocated"), MEMORY.reserved[number]) | {"freed": 0}
    stats = {
        name: {"all": dict(held)}
        for name in ("active_bytes", "inactive_split_bytes", "requested_bytes")
    }
    for name, values in (("allocated_bytes", held), ("reserved_bytes", kept)):
        stats[name] = {pool: dict(values) for pool in ("all", "small_pool", "large_pool")}
    return {
        **stats,
        "num_alloc_retries": 0,
        "num_ooms": MEMORY.ooms,
        "num_device_alloc": 1,
        "max_split_size": -1,
    }


def _flat_stats(device: Any = None) -> dict[str, Any]:
    def walk(prefix: str, node: Any) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix[1:]: node}
        return {
            key: value
            for name, inner in node.items()
            for key, value in walk(f"{prefix}.{name}", inner).items()
        }

    return walk("", _nested_stats(device))


class _Device:
    def __init__(self, device: Any) -> None:
        self._number = number_of(device)

    def __enter__(self) -> None:
        self._before = LIBRARY.sim_get_device()
        LIBRARY.sim_set_device(self._number)

    def __exit__(self, *_: object) -> None:
        LIBRARY.sim_set_device(self._before)


def _wait_for_all(*_: Any) -> None:
    LOG.wait("synchronize")
    finish_all()


def _set_sync_debug_mode(mode: int | str) -> None:
    LOG.raise_waits = mode in ("error", 2)


def install(library: ctypes.CDLL) -> None:
    """Put all this into ``torch.cuda``, for the rest of the process."""
    global LIBRARY
    LIBRARY = library
    generators = tuple(torch.Generator() for _ in range(DEVICES))
    properties = types.SimpleNamespace(name="simulated", total_memory=TOTAL_BYTES, major=9, minor=0)
    properties.multi_processor_count = 132

    def set_rng_state(state: Tensor, device: Any = "cuda") -> None:
        generators[number_of(device)].set_state(state)

    def get_rng_state(device: Any = "cuda") -> Tensor:
        return generators[number_of(device)].get_state()

    replaced = {
        **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
        **dict.fromkeys(("init", "_lazy_init", "ipc_collect", "seed"), lambda: None),
        **dict.fromkeys(("_is_in_bad_fork", "is_current_stream_capturing"), lambda: False),
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: library.sim_get_device(),
        "set_device": lambda device: library.sim_set_device(number_of(device)),
        "device": _Device,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: ["sm_90"],
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "synchronize": _wait_for_all,
        "set_sync_debug_mode": _set_sync_debug_mode,
        "memory_stats": _flat_stats,
        "memory_stats_as_nested_dict": _nested_stats,
        "memory_allocated": lambda device=None: MEMORY.now[number_of(device)],
        "memory_reserved": lambda device=None: MEMORY.reserved[number_of(device)],
        "max_memory_allocated": lambda device=None: MEMORY.peak[number_of(device)],
        "max_memory_reserved": lambda device=None: MEMORY.reserved[number_of(device)],
        "mem_get_info": lambda device=None: (
            TOTAL_BYTES - MEMORY.reserved[number_of(device)],
            TOTAL_BYTES,
        ),
        "reset_peak_memory_stats": lambda device=None: MEMORY.peak.update(
            {number_of(device): MEMORY.now[number_of(device)] - MEMORY.peak[number_of(device)]}
        ),
        "set_per_process_memory_fraction": lambda share, device=None: MEMORY.share.update(
            {number_of(device): share}
        ),
        "get_per_process_memory_fraction": lambda device=None: MEMORY.share.get(
            number_of(device), 1.0
        ),
        "empty_cache": MEMORY.empty,
        "memory_summary": lambda device=None, abbreviated=False: "simulated",
        "host_memory_stats": lambda: {"allocated_bytes.current": 4096},
        "default_generators": generators,
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators],
        "set_rng_state_all": lambda states: [
            g.set_state(s) for g, s in zip(generators, states, strict=False)
        ],
        "manual_seed": lambda seed: generators[library.sim_get_device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [generator.manual_seed(seed) for generator in generators],
        "cudart": lambda: Runtime,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = get_rng_state, set_rng_state
    torch.cuda.memory.memory_stats = _flat_stats
    torch.version.cuda, torch.cuda._initialized = "13.0", True
    torch._C._cuda_isInBadFork = lambda: False
    torch.accelerator.synchronize = _wait_for_all
    library.sim_init()
