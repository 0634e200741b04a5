"""Transfer of batches, which are planned on the host, moved, and finished on the device.

The hooks run in this order: `BatchHooks.on_before_batch_transfer` with `plan_batch`,
`transfer_batch_to_device`, and `on_after_batch_transfer` with `finish_batch` and `batch_format`. If
the module has such hooks too, a `ModuleRun` calls them afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from lightning import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from lit_data.core.errors import ConfigError, LitDataError
from lit_data.core.lightning_internals import (
    call_module_hook,
    check_version,
    choose_hooks,
    find_conversion,
    find_module,
    leave_unconverted,
)
from lit_data.core.types import Batch, PlannedBatch, Stage
from lit_data.datamodules.batch_format import BatchFormat, format_batch, gives_dict
from lit_data.datamodules.trainer_run import TrainerRun
from lit_data.loading.transfer import StagedBatch, finish_transfer

_OTHER = "pytorch_lightning"


def check_package(datamodule: object, trainer: object) -> None:
    """Refuse a Trainer of ``pytorch_lightning``, unless the datamodule is of that package too.

    Raises:
        ConfigError: The datamodule is not; Lightning's own message would be "Expected a parent".
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
        "that of {module} moves the planned batch instead of that of {datamodule}; no batch is "
        "copied ahead"
    ),
    "on_after_batch_transfer": "first that of {datamodule}, then that of {module} on the batch in its batch_format",
}


class BatchHooks(LightningDataModule):
    """The hooks of a datamodule around the transfer of a batch, and what they call.

    If the module has the same hooks, they run after those of this class:

    - ``on_before_batch_transfer``: ours runs first, because it draws from the loader's batch and
      its indices. The module's may then change values and add keys, which reach the step too.
    - ``transfer_batch_to_device``: the module's replaces ours, on host tensors.
    - ``on_after_batch_transfer``: ours runs first, then the module's on the batch in the format it
      was written for.

    The module's hooks run exactly as Lightning runs them: with gradient, and with its profiler. Its
    ``example_input_array`` (for a summary or a graph) goes only through its own hooks. If the class
    of a datamodule overrides one of these hooks, Lightning's rule and warning apply.
    """

    batch_keys: Sequence[str] = ()
    channel_names: ClassVar[Mapping[str, int]] = {}
    batch_format: BatchFormat = "dict"
    # The last run is that of the newest Trainer; the runs before enclose it.
    _runs: Sequence["ModuleRun"] = ()

    @property
    def trainer(self) -> Trainer | None:
        """Trainer of the run, which sets it after it has chosen the owner of each hook.

        A Trainer that runs during the training of another one is returned only until it is done.
        """
        return self._run.trainer if self._runs else None

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        check_package(self, trainer)
        if trainer is None and not self._runs:  # set by the constructor, before any Trainer
            return
        check_version()
        self._runs = ModuleRun(trainer, self).follow(self._runs)

    @property
    def _run(self) -> "ModuleRun":
        """The current run, or else the last one; without any Trainer yet, a run without one."""
        if not self._runs:
            self._runs = [ModuleRun(None, self)]
        *around, newest = self._runs
        if around and not newest.is_under_way:
            self._runs = around
        return self._runs[-1]

    def __getstate__(self) -> dict[str, Any]:
        """Leave the Trainer and its loaders, which have workers and open memory, out of copies."""
        state = self.__dict__.copy()
        state.pop("_runs", None)
        return state

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - ours, or an example
        """Draw the numbers that the batch needs while its indices are still on the host."""
        run = self._run
        if run.sees_example(batch):
            return run.call_module("on_before_batch_transfer", batch, dataloader_idx)
        with run.naming_foreign(batch, dataloader_idx):
            planned = self.plan_batch(batch, run.stage)
        if "on_before_batch_transfer" in run.module_hooks:
            # A copy in progress is dropped, because values may change in place.
            return run.change("on_before_batch_transfer", planned, dataloader_idx)
        return batch.extended(planned) if isinstance(batch, StagedBatch) else planned

    def plan_batch(self, batch: Batch, stage: Stage) -> PlannedBatch:
        """Add the drawn numbers that `finish_batch` needs to a batch on the host; by default none."""
        return batch

    def transfer_batch_to_device(
        self,
        batch: Any,  # noqa: ANN401
        device: torch.device,
        dataloader_idx: int,
    ) -> Any:  # noqa: ANN401
        """Use the copy that the loader began, or let a module that moves batches do it."""
        run = self._run
        if "transfer_batch_to_device" in run.module_hooks:
            call = run.call_module if run.has_example else run.change
            return call("transfer_batch_to_device", batch, device, dataloader_idx)
        if isinstance(batch, StagedBatch):
            return finish_transfer(batch, device)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:  # noqa: ANN401 - the user's format
        """Finish the batch on its device, without gradient, and in float32 at any precision.

        If the Trainer has another dtype, such as ``bf16-true``, floats are converted to it at the
        end.

        Returns:
            The batch that the step gets: in your format, with the keys that the module's hooks
            added, after the module's own hook.
        """
        run = self._run
        if not run.has_example:
            with run.naming_foreign(batch, dataloader_idx), _in_float32(batch):
                finished = self.finish_batch(batch, run.stage)
            batch = run.add_keys(self._format(finished), batch)
        return run.call_module("on_after_batch_transfer", batch, dataloader_idx)

    def finish_batch(self, batch: PlannedBatch, stage: Stage) -> Batch:
        """Turn a planned batch on its device into the model's input; by default return it unchanged."""
        return batch

    def _format(self, batch: Batch) -> Any:  # noqa: ANN401 - the user's format
        if self.batch_format == "dict":
            return batch
        return format_batch(batch, self.batch_format, self.channel_names)

    def transform(self, batch: Batch, stage: Stage) -> Batch:
        """Plan and finish a batch on its current device, for use without a Trainer.

        Returns:
            A dict, whatever the `batch_format`.
        """
        return self.finish_batch(self.plan_batch(batch, stage), stage)


@contextmanager
def _in_float32(batch: PlannedBatch) -> Iterator[None]:
    # A plan may be an object, which has no device.
    device = next(value.device for value in batch.values() if isinstance(value, Tensor))
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


class ModuleRun(TrainerRun):
    """One run of a Trainer, with the hooks of its module around the transfer of a batch.

    Args:
        trainer: Trainer that is about to run the datamodule; without one there are no module hooks.
        datamodule: Datamodule whose hooks run first.

    Attributes:
        module_hooks: Hooks of the module that run too.
        has_example: True if the current batch is the module's ``example_input_array``.
    """

    def __init__(self, trainer: Trainer | None, datamodule: BatchHooks) -> None:
        super().__init__(trainer)
        self._datamodule = datamodule
        self._module = find_module(trainer, datamodule)
        self.module_hooks = frozenset(hook for hook in _ORDERS if self._runs_too(hook))
        self.has_example = False
        self._added: set[str] = set()
        if trainer is not None and self.module_hooks:
            choose_hooks(trainer, self.module_hooks)
        self._convert = find_conversion(trainer)
        takes_over = is_overridden("on_after_batch_transfer", datamodule, parent=BatchHooks)
        if trainer is not None and self._convert is not None and not takes_over:
            leave_unconverted(trainer, datamodule, self._convert)

    def _runs_too(self, hook: Hook) -> bool:
        """Return True if the module has a hook that runs after the datamodule's, and log the order."""
        if self._module is None or not is_overridden(hook, self._module):
            return False
        if is_overridden(hook, self._datamodule, parent=BatchHooks):
            return False
        order = _ORDERS[hook].format(datamodule=_name(self._datamodule), module=_name(self._module))
        rank_zero_info(f"{hook}: {order}")
        return True

    @property
    def stage(self) -> Stage:
        """Stage of the current batch.

        Raises:
            ConfigError: No Trainer is running.
        """
        stage = self.trainer.state.stage if self.trainer else None
        if stage is None:
            raise ConfigError(
                "this datamodule has no running Trainer: call transform(batch, stage) instead"
            )
        return _STAGES[stage]

    @property
    def copies_ahead(self) -> bool:
        """True if no hook of the module comes between a batch on the host and its copy."""
        return self.module_hooks <= {"on_after_batch_transfer"}

    def sees_example(self, batch: Any) -> bool:  # noqa: ANN401 - the module's format
        """Return True if a batch is the module's ``example_input_array``; called first for each batch."""
        example = self._module.example_input_array if self._module is not None else None
        self.has_example = example is not None and batch is example
        return self.has_example

    @contextmanager
    def naming_foreign(self, batch: Any, dataloader_idx: int) -> Iterator[None]:  # noqa: ANN401 - anybody's
        """State in errors that a batch is not from the datamodule's loaders.

        Raises:
            ConfigError: The batch is not, and could not be planned or finished.
        """
        try:
            yield
        except LitDataError:
            raise
        except Exception as error:
            loader = self.loaders.get(self.stage)
            fields = {} if loader is None else getattr(loader.dataset, "fields", {})
            if isinstance(batch, Mapping) and fields and fields.keys() <= batch.keys():
                raise
            kind = (
                f"dict with the keys {list(batch)}" if isinstance(batch, Mapping) else _name(batch)
            )
            name = _name(self._datamodule)
            raise ConfigError(
                f"loader {dataloader_idx} of {self.stage} gave a batch that no MicroBatchLoader of "
                f"{name} has made ({kind}): let plan_batch and finish_batch of a class of your own "
                f"take it, or give fit the loaders, and call {name}.transform(batch, stage) for its "
                "part in the step"
            ) from error

    def call_module(self, hook: Hook, batch: Any, *args: torch.device | int) -> Any:  # noqa: ANN401 - the module's format
        """Return a batch in the module's format after the module's hook, if it has one."""
        if hook not in self.module_hooks:
            return batch
        assert self.trainer is not None
        return call_module_hook(self.trainer, hook, batch, *args)

    def add_keys(self, formatted: Any, batch: PlannedBatch) -> Any:  # noqa: ANN401 - the user's format
        """Return a finished batch with the keys that the module's hooks added, in the dtype of the run."""
        if self._added:
            formatted = {key: batch[key] for key in self._added if key in batch} | formatted
        return formatted if self._convert is None else self._convert(formatted)

    def change(self, hook: Hook, batch: Batch, *args: torch.device | int) -> Batch:
        """Let the module change values of a planned batch, or add keys.

        Raises:
            ConfigError: It did something else.
        """
        keys = list(batch)  # the hook may change the dict itself
        try:
            answer = self.call_module(hook, dict(batch), *args)
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
        """Return the problem with a hook's result for a batch with these keys; None if it is valid."""
        if not isinstance(answer, dict):
            kind = "None" if answer is None else type(answer).__name__
            return f"returned {kind} instead of a dict"
        missing = [key for key in keys if key not in answer]
        if missing:
            return f"dropped the keys {missing}"
        new_keys = [key for key in answer if key not in keys]
        batch_format = self._datamodule.batch_format
        if new_keys and not gives_dict(batch_format):
            return f"added the keys {new_keys}, which only a batch that is a dict can hold"
        reserved = set(self._datamodule.batch_keys)
        if isinstance(batch_format, Mapping):
            reserved |= batch_format.keys()
        clashes = [key for key in new_keys if key in reserved]
        if clashes:
            return f"added the keys {clashes}, which the datamodule makes itself"
        return None

    def _place(self, hook: Hook) -> str:
        return f"{_name(self._module)}.{hook}"


def _name(owner: object) -> str:
    return type(owner).__name__


def _describe(keys: list[str]) -> str:
    return f"a dict with the keys {keys}"
