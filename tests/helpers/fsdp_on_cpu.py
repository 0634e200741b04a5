"""FSDP on the CPU, where torch 2.13 and Lightning 2.6 refuse it; so that all but the kernels can be tried anywhere."""

import functools
from typing import Any

import torch
from lightning.pytorch.strategies import FSDPStrategy, fsdp
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)
from torch.nn import Module


def _gather(module: Module, world_size: int, rank0_only: bool = True) -> Any:
    """Weights are copied as they are gathered: torch counts on the copy to the host for that, and here is none."""
    weights = FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)
    optimizer = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    return FullyShardedDataParallel.state_dict_type(
        module, StateDictType.FULL_STATE_DICT, weights, optimizer
    )


class ShardsOnCPU(FSDPStrategy):
    """Lightning refuses `FSDPStrategy` itself on the CPU, and names no device, without which torch refuses it too."""

    def _setup_model(self, model: Module) -> Module:
        fsdp._get_full_state_dict_context = _gather
        shard = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
        return shard(model, sharding_strategy=self.sharding_strategy, **self.kwargs)
