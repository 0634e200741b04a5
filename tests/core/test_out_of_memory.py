import pickle

import numpy as np
import pytest
import torch

from lit_data.core.errors import BatchMemoryError
from lit_data.core.out_of_memory import is_out_of_memory, make_memory_error

# What the libraries say, word for word.
OUT_OF_MEMORY = [
    # CUDA, by text: what older releases raise, and errors that crossed a process or a library
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB of which 1.12 GiB is free.",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "HIP out of memory. Tried to allocate 256.00 MiB (GPU 0; 15.98 GiB total capacity)",
    "XPU out of memory. Tried to allocate 31.50 GiB. GPU 0 has a total capacity of 15.56 GiB.",
    "Caught OutOfMemoryError in replica 1 on device 1.\ntorch.OutOfMemoryError: CUDA out of memory.",
    # its libraries
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "FIND was unable to find an engine to execute this computation",
    "GET was unable to find an engine to execute this computation",
    # the CPU's allocator, on Linux and on Windows
    "[enforce fail at alloc_cpu.cpp:114] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "17592186044416 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 33554432 bytes.",
    # MPS
    "MPS backend out of memory (MPS allocated: 17.93 GB, other allocations: 98.98 MB, max allowed: 18.13 GB).",
    "Invalid buffer size: 24.00 GiB",
]
ANYTHING_ELSE = [
    # CUDA's state is broken: trying again would hide it
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: misaligned address",
    "CUDA error: unspecified launch failure",
    "CUDA error: invalid device ordinal",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k, &alpha, a)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "NCCL error in: ProcessGroupNCCL.cpp:1331, internal error - please report this issue to the NCCL developers",
    # ordinary errors
    "mat1 and mat2 shapes cannot be multiplied (4x3 and 5x2)",
    "element 0 of tensors does not require grad and does not have a grad_fn",
    "Trying to backward through the graph a second time",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    # not the device's memory: fewer samples in a step would not help
    "DataLoader worker (pid 4711) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit.",
    "unable to mmap 4096 bytes from file </torch_1_2>: Too many open files (24)",
    "",
]


def test_texts_and_classes_that_say_so() -> None:
    for text in OUT_OF_MEMORY:
        assert is_out_of_memory(RuntimeError(text)), text
        assert not is_out_of_memory(ValueError(text)), text  # no library reports it so
    for kind in (torch.OutOfMemoryError, torch.cuda.OutOfMemoryError, MemoryError):
        assert is_out_of_memory(kind())


def test_texts_and_classes_that_say_something_else() -> None:
    for text in ANYTHING_ELSE:
        assert not is_out_of_memory(RuntimeError(text)), text
    for kind in (KeyboardInterrupt, SystemExit, BatchMemoryError, AssertionError):
        assert not is_out_of_memory(kind("CUDA out of memory"))
    assert not is_out_of_memory(None)
    while_handled = KeyError("loss")
    while_handled.__context__ = torch.OutOfMemoryError()
    assert not is_out_of_memory(while_handled)


@pytest.mark.parametrize(
    "cause", [torch.OutOfMemoryError(), RuntimeError(OUT_OF_MEMORY[0]), MemoryError()]
)
def test_a_cause_counts_at_any_depth(cause: Exception) -> None:
    error = cause
    for outer in (ValueError("batch 3"), RuntimeError("step failed"), KeyError("loss")):
        outer.__cause__ = error
        error = outer
        assert is_out_of_memory(error)


def test_a_ring_of_causes_ends() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert not is_out_of_memory(one)


def test_what_the_allocators_here_raise() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(MemoryError) as of_numpy:
        np.empty(1 << 60, np.uint8)
    assert is_out_of_memory(of_torch.value)
    assert is_out_of_memory(of_numpy.value)


@pytest.mark.gpu
def test_what_cuda_raises() -> None:
    with pytest.raises(torch.OutOfMemoryError) as of_cuda:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(of_cuda.value)


def test_the_error_of_a_batch_is_caught_as_that_of_torch() -> None:
    for error in (
        make_memory_error("one sample"),
        pickle.loads(pickle.dumps(make_memory_error("one sample"))),
    ):
        assert isinstance(error, BatchMemoryError)
        assert isinstance(error, torch.OutOfMemoryError)
        assert (str(error), error.exit_code) == ("one sample", 5)
        assert not is_out_of_memory(error), "nothing is left to try"
