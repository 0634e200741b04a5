"""Tensors that say ``cuda:0``, ``cuda:1`` or ``mps`` and compute on the CPU, held to what a real
device would refuse.

- Operations on tensors of two devices raise, as CUDA does; host tensors without axes are let
  through where CUDA does.
- Operations for which the host waits are noted: ``item``, ``nonzero``, boolean masks, copies that
  block, ``unique``.
- Operations without a deterministic kernel raise under ``torch.use_deterministic_algorithms``; so
  does float64 on mps.
- Copies that do not block are carried out late: when their stream is next used, or waited for.
  Until then the target holds rubbish.

It cannot see kernels that a dtype lacks (but those that are listed), TF32, atomics, NCCL or real
times.
"""

import functools
import itertools
import math
import mmap
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.simulated import cuda
from tests.simulated.log import LOG, Log

aten = torch.ops.aten
_TYPES = ("cuda", "mps")
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_INDEX = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten._index_put_impl_.default,
    aten._unsafe_index_put.default,
    aten.index_put.default,
    aten.index_put_.default,
}
_WAITS = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.repeat_interleave.Tensor: "repeat_interleave without output_size",
    aten.bincount.default: "bincount",
    aten.equal.default: "equal",
    aten.histc.default: "histc",
    aten._linalg_check_errors.default: "linalg",
    **dict.fromkeys(
        (aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default), "unique"
    ),
    **dict.fromkeys((aten.linalg_inv_ex.default, aten.linalg_solve.default), None),
}
"""For which the host must know a value of the device."""
_NOT_DETERMINISTIC = {
    aten.median.dim: "median with indices",
    aten.kthvalue.default: "kthvalue",
    aten.histc.default: "histc",
    aten.put_.default: "put_",
    aten.grid_sampler_2d_backward.default: "grid_sampler_2d_backward_cuda",
    aten.grid_sampler_3d_backward.default: "grid_sampler_3d_backward_cuda",
    aten.upsample_bilinear2d_backward.default: "upsample_bilinear2d_backward_out_cuda",
    aten.upsample_trilinear3d_backward.default: "upsample_trilinear3d_backward_out_cuda",
    aten.max_pool3d_with_indices_backward.default: "max_pool3d_with_indices_backward_cuda",
    aten.avg_pool3d_backward.default: "avg_pool3d_backward_cuda",
    aten._adaptive_avg_pool2d_backward.default: "adaptive_avg_pool2d_backward_cuda",
    aten.reflection_pad2d_backward.default: "reflection_pad2d_backward_out_cuda",
    aten.replication_pad2d_backward.default: "replication_pad2d_backward_cuda",
    aten.replication_pad3d_backward.default: "replication_pad3d_backward_cuda",
    aten.nll_loss2d_forward.default: "nll_loss2d_forward_out_cuda_template",
}
"""What ``torch.use_deterministic_algorithms`` lists, with the names that it says; cumsum is one for floats."""
_ALLOCATES = {
    aten.empty.memory_format,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
}
_CUMSUM = {aten.cumsum.default, aten.cumsum_.default}
_NEEDS_ITS_DEVICE = {
    aten.cat.default,
    aten.stack.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.gather.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.index_add.default,
    aten.index_add_.default,
    aten.embedding.default,
    aten.index_select.default,
    aten.searchsorted.Tensor,
    aten.searchsorted.Scalar,
}
"""For which even a host tensor without axes is one too many."""
_RANDOM = (
    "rand",
    "normal",
    "bernoulli",
    "dropout",
    "uniform",
    "multinomial",
    "exponential",
    "poisson",
)


class SimulatedTensor(Tensor):
    """A tensor whose values lie in `inner`, on the host."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, inner: Tensor, device: torch.device) -> "SimulatedTensor":
        strided = inner.layout is torch.strided
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride() if strided else None,
            storage_offset=inner.storage_offset() if strided else 0,
            dtype=inner.dtype,
            device=device,
        )
        made.inner = inner
        if device.type == "cuda" and inner.device.type != "meta" and strided:
            cuda.MEMORY.add(inner, device.index)
        return made

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"{self.inner!r} on {self.device}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.detach().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = SimulatedTensor(self.inner.clone(), self.device).requires_grad_(
                self.requires_grad
            )
            if getattr(self, "_is_param", False):
                memo[id(self)]._is_param = True
        return memo[id(self)]

    def record_stream(self, stream: Any) -> None:
        LOG.note("record_stream")

    def is_shared(self) -> bool:
        return False

    def tolist(self) -> Any:
        LOG.wait("tolist")
        _catch_up(self.device)
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def simulated() -> Iterator[Log]:
    """Let tensors be made on, and moved to, the simulated devices."""
    LOG.clear()
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with _Mode():
            yield LOG
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
        LOG.clear()
        cuda.MEMORY.share.clear()
        cuda.Runtime.fails = cuda.Runtime.pending = 0


def run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Carry out one operation, if a simulated device has a part in it."""
    if func.namespace == "prim":
        return args[0].device
    flat, spec = pytree.tree_flatten((args, kwargs))
    mine = [x for x in flat if isinstance(x, SimulatedTensor)]
    asked = kwargs.get("device") or next(
        (x for x in flat if isinstance(x, torch.device) and not mine), None
    )
    target = cuda.normalise(asked) if asked is not None else mine[0].device if mine else None
    if func is aten._pin_memory.default and not mine:
        return _pin(args[0])
    if not mine and (target is None or target.type not in _TYPES):
        return func(*args, **kwargs)
    if torch.is_inference_mode_enabled() and _is_composite(func):
        with _Mode():
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
    LOG.kernels += 1
    if func is aten._to_copy.default:
        return _to_copy(args[0], target, dict(kwargs))
    if func in (aten.copy_.default, aten._copy_from.default):
        return _copy_into(
            args[0], args[1], (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        )
    if func is aten.is_pinned.default:
        return False
    _check(func, args, kwargs, flat, mine, target)
    return _compute(func, flat, spec, mine, target)


def _check(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    flat: Sequence[Any],
    mine: Sequence[Any],
    target: torch.device,
) -> None:
    """Raise what the device would, and note waits."""
    if func is aten._pin_memory.default:
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    if func not in _VIEWS_AND_SIZES and not _is_view(func):
        cuda.Runtime.raise_pending()
    devices = {str(x.device) for x in mine}
    hosts = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, SimulatedTensor)]
    indices = [x for x in args[1] if isinstance(x, Tensor)] if func in _INDEX else []
    if mine and func in _INDEX:
        _check_index(func, args, indices)
        hosts = [x for x in hosts if not any(x is index for index in indices)]
    refused = hosts if func in _NEEDS_ITS_DEVICE else [x for x in hosts if x.ndim]
    if len(devices) > 1 or (mine and refused):
        names = " and ".join(sorted(devices | ({"cpu"} if refused else set())))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {names}! {func}"
        )
    if (what := _WAITS.get(func)) and kwargs.get("output_size") is None:
        LOG.wait(what)
    _check_determinism(func, mine)
    if target.type == "mps" and torch.float64 in flat:
        raise TypeError(_NO_DOUBLE)


_NO_DOUBLE = (
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64"
)
_VIEWS_AND_SIZES = {aten.detach.default, aten.alias.default}


def _check_index(func: Any, args: Sequence[Any], indices: Sequence[Tensor]) -> None:
    if not isinstance(args[0], SimulatedTensor):
        raise RuntimeError(
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
        )
    if args[0].dtype in _UNSIGNED:
        raise NotImplementedError(
            f"\"index_cuda\" not implemented for '{str(args[0].dtype)[6:].replace('ui', 'UI')}'"
        )
    for index in indices:
        if not isinstance(index, SimulatedTensor):
            LOG.wait("index on the host")
        elif index.dtype in (torch.bool, torch.uint8):
            value = args[2] if "put" in str(func) else None
            if not (isinstance(value, Tensor) and value.ndim == 0):  # else it becomes masked_fill
                LOG.wait("boolean mask")


def _check_determinism(func: Any, mine: Sequence[Tensor]) -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    name = _NOT_DETERMINISTIC.get(func)
    if func in _CUMSUM and mine and mine[0].is_floating_point():
        name = "cumsum_cuda_kernel"
    if name is None:
        return
    text = f"{name} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(text)


def _compute(
    func: Any, flat: Sequence[Any], spec: Any, mine: Sequence[Any], target: torch.device
) -> Any:
    _catch_up(target)
    if target.type == "cuda" and func in _ALLOCATES and not mine:
        dtype = next((x for x in flat if isinstance(x, torch.dtype)), torch.get_default_dtype())
        sizes = list(itertools.takewhile(lambda x: type(x) is int, flat))
        cuda.MEMORY.check(target.index, math.prod(sizes) * dtype.itemsize)
    args, kwargs = pytree.tree_unflatten([_to_host(x) for x in flat], spec)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with _generator_of(target, func, flat):
        found = func(*args, **kwargs)
    if func is aten._local_scalar_dense.default:
        return found
    known = {id(x.inner): x for x in mine}

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in known:
            return known.get(id(x), x)
        if target.type == "mps" and x.dtype is torch.float64:
            raise TypeError(_NO_DOUBLE)
        if (
            torch.is_inference_mode_enabled()
            and mine
            and _is_view(func)
            and not mine[0].is_inference()
        ):
            with torch.inference_mode(False):
                return SimulatedTensor(x, target)
        return SimulatedTensor(x, target)

    return pytree.tree_map(wrap, found)


def _to_host(x: Any) -> Any:
    if isinstance(x, SimulatedTensor):
        return x.inner
    return torch.device("cpu") if isinstance(x, torch.device) and x.type in _TYPES else x


@contextmanager
def _generator_of(target: torch.device, func: Any, flat: Sequence[Any]) -> Iterator[None]:
    """Draw from the generator of the device, not from that of the host."""
    is_plain = target.type != "cuda" or not _is_random(func)
    if is_plain or any(isinstance(x, torch.Generator) for x in flat):
        yield
        return
    generator, before = torch.cuda.default_generators[target.index], torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(before)


def _to_copy(source: Tensor, target: torch.device, options: dict[str, Any]) -> Tensor:
    waits = not options.pop("non_blocking", False)
    for name in ("device", "pin_memory"):
        options.pop(name, None)
    if target.type == "mps" and (options.get("dtype") or source.dtype) is torch.float64:
        raise TypeError(_NO_DOUBLE)
    if not isinstance(source, SimulatedTensor):
        return _upload(source, target, options, waits=waits)
    if target.type in _TYPES:
        _catch_up(target)
        return SimulatedTensor(aten._to_copy.default(source.inner, **options), target)
    _catch_up(source.device)
    found = aten._to_copy.default(source.inner, **options)
    if waits:
        LOG.wait("blocking copy to the host")
    elif source.device.type == "cuda":
        _do_late(found, found.clone(), source.device)
    return found


def _upload(
    source: Tensor, target: torch.device, options: dict[str, Any], *, waits: bool
) -> Tensor:
    if waits:
        LOG.wait("blocking copy to the device")
    copied = aten._to_copy.default(source, **options)
    if (
        not waits and target.type == "cuda" and source.is_pinned()
    ):  # else the driver stages it before it returns
        _do_late(copied, source, target)
    return SimulatedTensor(copied, target)


def _copy_into(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    inner = [x.inner if isinstance(x, SimulatedTensor) else x for x in (target, source)]
    crosses = isinstance(target, SimulatedTensor) != isinstance(source, SimulatedTensor)
    if crosses and not non_blocking:
        LOG.wait("blocking copy")
    for x in (target, source):
        if isinstance(x, SimulatedTensor):
            _catch_up(x.device)
    inner[0].copy_(inner[1])
    return target


def _pin(source: Tensor) -> Tensor:
    """A copy in page-locked memory of its own."""
    memory = mmap.mmap(-1, max(source.nbytes, 1))
    pinned = torch.frombuffer(memory, dtype=source.dtype, count=source.numel()).view(source.shape)
    address = pinned.untyped_storage().data_ptr()
    cuda.LIBRARY.sim_register(address, source.nbytes)
    weakref.finalize(memory, cuda.LIBRARY.sim_unregister, address).atexit = False
    return pinned.copy_(source)


def _do_late(target: Tensor, source: Tensor, device: torch.device) -> None:
    """Copy when the stream gets to it; until then the target holds what no result should."""
    if target.numel():
        target.fill_(
            float("nan")
            if target.is_floating_point()
            else 77 % 2
            if target.dtype is torch.bool
            else 77
        )

    def work() -> None:
        with torch.inference_mode(
            target.is_inference()
        ):  # a device copies in whatever mode the host is by then
            target.copy_(source)

    cuda.current_stream(device).pending.append(work)


def _catch_up(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.current_stream(device).flush()


@functools.cache
def _is_random(func: Any) -> bool:
    return any(name in str(func) for name in _RANDOM)


@functools.cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
