"""Way of a batch from the loader to the step: planned on the host, moved, finished on the device.

Where both the datamodule and the module have a hook around the transfer, Lightning alone calls the
datamodule's and drops the module's. A `BatchTransfer` runs both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Protocol, cast

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lit_data.core.errors import ConfigError, LitDataError
from lit_data.core.lightning_internals import (
    call_module_hook,
    choose_hooks,
    find_conversion,
    leave_unconverted,
)
from lit_data.core.types import Batch, PlannedBatch, Stage
from lit_data.datamodules.batch_format import BatchFormat, format_batch, gives_dict
from lit_data.loading.staging import INDICES
from lit_data.loading.transfer import StagedBatch, finish_transfer

_OTHER = "pytorch_lightning"


def check_package(datamodule: object, trainer: object) -> None:
    """Refuse a Trainer of ``pytorch_lightning``, unless the datamodule is one of that package too.

    Raises:
        ConfigError: It is not; Lightning's own message would be "Expected a parent".
    """
    if _is_other(trainer) and not _is_other(datamodule):
        name = type(datamodule).__name__
        raise ConfigError(
            f"{name} is a datamodule of lightning, and this Trainer is that of {_OTHER}: write "
            f"`import lightning.pytorch as pl`, the same release under the other name, or keep yours and write "
            f"`class Data({name}, pl.LightningDataModule): ...`"
        )


def _is_other(thing: object) -> bool:
    return any(parent.__module__.startswith(f"{_OTHER}.") for parent in type(thing).__mro__)


Hook = Literal["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]

_STAGES: Mapping[RunningStage, Stage] = {
    RunningStage.TRAINING: "train",
    RunningStage.SANITY_CHECKING: "val",
    RunningStage.VALIDATING: "val",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}
_ORDERS: Mapping[Hook, str] = {
    "on_before_batch_transfer": (
        "first that of {datamodule}, then that of {module} on the planned batch; no batch is copied ahead"
    ),
    "transfer_batch_to_device": (
        "that of {module} moves the planned batch in place of that of {datamodule}; no batch is copied ahead"
    ),
    "on_after_batch_transfer": "first that of {datamodule}, then that of {module} on the batch in its batch_format",
}


class Plans(Protocol):
    """Methods of a datamodule that a batch on its way needs."""

    batch_keys: Sequence[str]
    channel_names: ClassVar[Mapping[str, int]]
    batch_format: BatchFormat

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Draw what the batch needs, on the host."""
        ...

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Work on the device."""
        ...


class BatchTransfer:
    """The three hooks around the transfer of a batch, for one run of a Trainer.

    The datamodule plans a batch on the host, moves it, and finishes it on the device. Hooks that
    the module has too run behind those:

    - ``on_before_batch_transfer``: ours first, because it draws from the loader's batch and its
      indices; the module's may then change values and add keys, which reach the step beside ours.
    - ``transfer_batch_to_device``: the module's in place of ours, on host tensors.
    - ``on_after_batch_transfer``: ours first, then the module's on the batch in the format it was
      written for.

    The module's hooks run as Lightning alone runs them: with gradient, and with its profiler. Its
    ``example_input_array`` (for a summary, a graph) meets its hooks alone. A datamodule whose class
    overrides a hook of ours takes that hook over: Lightning's rule and its warning hold.

    Args:
        datamodule: Plans and finishes.
        trainer: Which is about to run it; without one the module has no hooks.
        base: The class whose hooks call these.
    """

    def __init__(
        self, datamodule: Plans, trainer: Trainer | None, base: type[LightningDataModule]
    ) -> None:
        self._datamodule, self._trainer, self._base = datamodule, trainer, base
        self._decided: dict[str, bool] = {}
        self._added: set[str] = set()
        self._has_example = False
        lightning_datamodule = cast(LightningDataModule, datamodule)
        self._module = choose_hooks(trainer, lightning_datamodule, self._runs_both)
        self._convert = find_conversion(trainer)
        takes_over = is_overridden("on_after_batch_transfer", datamodule, parent=base)
        if trainer is not None and self._convert is not None and not takes_over:
            leave_unconverted(trainer, lightning_datamodule, self._convert)

    def before(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - ours, or the module's example
        """Draw what the batch needs while its indices are still on the host."""
        if self._sees_example(batch):
            return self._pass_on("on_before_batch_transfer", batch, dataloader_idx)
        with self._naming_foreign(batch, dataloader_idx):
            planned = self._datamodule.plan_batch(batch, self._stage())
        if self._has("on_before_batch_transfer"):
            # A copy that is under way is given up, as values may change in place.
            return self._change("on_before_batch_transfer", dict(planned), dataloader_idx)
        return batch.extended(planned) if isinstance(batch, StagedBatch) else planned

    def move(
        self,
        batch: Any,  # noqa: ANN401
        device: torch.device,
        dataloader_idx: int,
        usual: Callable[[], Any],
    ) -> Any:  # noqa: ANN401
        """Take over the copy that the loader began, or leave all to a module that moves batches.

        Args:
            batch: On the host.
            device: Where to.
            dataloader_idx: Handed on.
            usual: Moves any batch as Lightning does.
        """
        if self._has("transfer_batch_to_device"):
            if self._has_example:
                return self._pass_on("transfer_batch_to_device", batch, device, dataloader_idx)
            return self._change("transfer_batch_to_device", dict(batch), device, dataloader_idx)
        return finish_transfer(batch, device) if isinstance(batch, StagedBatch) else usual()

    def after(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - the user's format
        """Finish the batch on its device, without gradient, and in float32 in any precision.

        With a Trainer of another dtype, such as ``bf16-true``, floats are converted to it at the end.

        Returns:
            What the step gets: the batch in the user's format with what the module's hooks added,
                through its hook.
        """
        if self._has_example:
            return self._pass_on("on_after_batch_transfer", batch, dataloader_idx)
        datamodule = self._datamodule
        with self._naming_foreign(batch, dataloader_idx):
            finished = _finish(datamodule, self._stage(), batch)
        formatted = format_batch(finished, datamodule.batch_format, datamodule.channel_names)
        if self._added:
            formatted = {key: batch[key] for key in self._added if key in batch} | formatted
        if self._convert is not None:
            formatted = self._convert(formatted)
        return self._pass_on("on_after_batch_transfer", formatted, dataloader_idx)

    @contextmanager
    def _naming_foreign(self, batch: Any, dataloader_idx: int) -> Iterator[None]:  # noqa: ANN401 - anybody's
        """Say in errors that a batch is none of the datamodule's loaders.

        Raises:
            ConfigError: It is not, and could not be planned or finished.
        """
        try:
            yield
        except LitDataError:
            raise
        except Exception as error:
            if isinstance(batch, Mapping) and INDICES in batch:
                raise
            kind = (
                f"dict with the keys {list(batch)}" if isinstance(batch, Mapping) else _name(batch)
            )
            name = _name(self._datamodule)
            raise ConfigError(
                f"loader {dataloader_idx} of {self._stage()} gave a batch that no MicroBatchLoader of "
                f"{name} has made ({kind}): let plan_batch and finish_batch of a class of your own "
                f"take it, or give fit the loaders, and call {name}.transform(batch, stage) for its "
                "part in the step"
            ) from error

    def copies_ahead(self) -> bool:
        """Return True if no hook of the module comes between a batch on the host and its copy."""
        return not (self._has("on_before_batch_transfer") or self._has("transfer_batch_to_device"))

    def _stage(self) -> Stage:
        stage = self._trainer.state.stage if self._trainer else None
        if stage is None:
            raise ConfigError(
                "this datamodule has no running Trainer: call transform(batch, stage) instead"
            )
        return _STAGES[stage]

    def _runs_both(self, hook: str) -> bool:
        return hook in _ORDERS and self._has(cast(Hook, hook))

    def _has(self, hook: Hook) -> bool:
        """Return True if the module's own hook runs too: decided and logged when first asked in a run."""
        if hook not in self._decided:
            self._decided[hook] = self._decide(hook)
        return self._decided[hook]

    def _sees_example(self, batch: Any) -> bool:  # noqa: ANN401 - the module's format
        """Return True if a batch is the module's ``example_input_array``; asked first for each batch."""
        example = self._module.example_input_array if self._module is not None else None
        self._has_example = example is not None and batch is example
        return self._has_example

    def _pass_on(self, hook: Hook, batch: Any, *args: torch.device | int) -> Any:  # noqa: ANN401 - the module's format
        """Return a batch in the module's format, through the module's hook if it has one."""
        assert self._trainer is not None
        return call_module_hook(self._trainer, hook, batch, *args) if self._has(hook) else batch

    def _decide(self, hook: Hook) -> bool:
        if self._module is None or not is_overridden(hook, self._module):
            return False
        if is_overridden(hook, self._datamodule, parent=self._base):
            return False
        order = _ORDERS[hook].format(datamodule=_name(self._datamodule), module=_name(self._module))
        rank_zero_info(f"{hook}: {order}")
        return True

    def _change(self, hook: Hook, batch: Batch, *args: torch.device | int) -> Batch:
        keys = list(batch)  # the hook may change the dict itself
        try:
            answer = self._pass_on(hook, batch, *args)
        except Exception as error:
            error.add_note(
                f"{self._place(hook)} was given the batch of {_name(self._datamodule)}, {_describe(keys)}"
            )
            raise
        problem = self._find_problem(keys, answer)
        if problem is None:
            self._added |= answer.keys() - set(keys)
            return answer  # type: ignore[no-any-return]  # checked to be a dict
        raise ConfigError(
            f"{self._place(hook)} {problem}: {_name(self._datamodule)} gave it its batch, {_describe(keys)}, and needs "
            f"all of them back. Change values or add keys there, and do the rest in on_after_batch_transfer, which "
            f"gets the finished batch in batch_format={self._datamodule.batch_format!r}"
        )

    def _find_problem(self, keys: list[str], answer: Any) -> str | None:  # noqa: ANN401 - what a user's hook returns
        """Return the fault of what a hook made of a batch with these keys; None without any."""
        if not isinstance(answer, dict):
            kind = "None" if answer is None else type(answer).__name__
            return f"returned {kind} in place of a dict"
        missing = [key for key in keys if key not in answer]
        if missing:
            return f"left out the keys {missing}"
        new_keys = [key for key in answer if key not in keys]
        batch_format = self._datamodule.batch_format
        if new_keys and not gives_dict(batch_format):
            return f"added the keys {new_keys}, for which a batch that is no dict has no place"
        reserved = set(self._datamodule.batch_keys)
        if isinstance(batch_format, Mapping):
            reserved |= batch_format.keys()
        clashes = [key for key in new_keys if key in reserved]
        if clashes:
            return f"added the keys {clashes}, which the datamodule makes itself"
        return None

    def _place(self, hook: Hook) -> str:
        return f"{_name(self._module)}.{hook}"


def _finish(datamodule: Plans, stage: Stage, batch: PlannedBatch) -> Batch:
    # A plan may be an object, which has no device.
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        return datamodule.finish_batch(batch, stage)


def _name(owner: object) -> str:
    return type(owner).__name__


def _describe(keys: list[str]) -> str:
    return f"a dict with the keys {keys}"
