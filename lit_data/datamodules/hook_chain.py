"""Lets the module's own hooks around the transfer run behind those of our datamodule.

Where both have a hook, Lightning alone calls the datamodule's, drops the module's and warns of that
(``_DataHookSelector`` in ``lightning/pytorch/trainer/connectors/data_connector.py``, 2.6.6). A Trainer makes a new
selector for each run; a `HookChain` puts its own in the place of that one, so that no warning filter has to change.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import lightning as L
import torch
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from typing_extensions import override

from lit_data.datamodules.batch_format import gives_dict
from lit_data.errors import ConfigError
from lit_data.types import Batch

if TYPE_CHECKING:
    from lit_data.datamodules.base import BaseDataModule

Hook = Literal["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]

_ORDERS: Final[Mapping[Hook, str]] = {
    "on_before_batch_transfer": (
        "first that of {datamodule}, then that of {module} on the planned batch; no batch is copied ahead"
    ),
    "transfer_batch_to_device": (
        "that of {module} moves the planned batch in place of that of {datamodule}; no batch is copied ahead"
    ),
    "on_after_batch_transfer": "first that of {datamodule}, then that of {module} on the batch in its batch_format",
}


class HookChain:
    """Which hooks of the module run behind those of the datamodule, for one run of a Trainer.

    - ``on_before_batch_transfer``: ours first, because it draws from the loader's batch and its indices; the module's
      may then change values and add keys, which reach the step beside ours.
    - ``transfer_batch_to_device``: the module's in place of ours, on host tensors.
    - ``on_after_batch_transfer``: ours first, then the module's on the batch in the format it was written for.

    The module's hooks run as Lightning alone runs them: with gradient, and with its profiler. Its
    ``example_input_array`` (for a summary, a graph) meets its hooks alone. A datamodule whose class overrides a hook of
    ours takes that hook over: Lightning's rule and its warning hold.

    Args:
        datamodule: Whose hooks come first.
        trainer: Which is about to run it; without one nothing is chained.
        base: The class whose hooks call this chain.

    Attributes:
        has_example: What is on its way to the device is the module's ``example_input_array``.
    """

    def __init__(
        self, datamodule: "BaseDataModule", trainer: L.Trainer | None, base: type[L.LightningDataModule]
    ) -> None:
        self._datamodule, self._trainer, self._base = datamodule, trainer, base
        self._module: L.LightningModule | None = None
        self._decided: dict[str, bool] = {}
        self._added: set[str] = set()
        self.has_example = False
        connector: Any = getattr(trainer, "_data_connector", None)
        selector = getattr(connector, "_datahook_selector", None)
        if isinstance(selector, _DataHookSelector) and selector.datamodule is datamodule:
            self._module = selector.model
            connector._datahook_selector = _Selector(selector.model, self, datamodule)

    def has(self, hook: Hook) -> bool:
        """Whether the module's own hook runs too: decided and told when it is first asked in a run."""
        if hook not in self._decided:
            self._decided[hook] = self._decide(hook)
        return self._decided[hook]

    def sees_example(self, batch: Any) -> bool:  # noqa: ANN401 - the module's format
        """Whether a batch is the module's ``example_input_array``; asked first for each batch."""
        example = self._module.example_input_array if self._module is not None else None
        self.has_example = example is not None and batch is example
        return self.has_example

    def pass_on(self, hook: Hook, batch: Any, *args: torch.device | int) -> Any:  # noqa: ANN401 - the module's format
        """A batch in the module's format, through the module's hook if it has one."""
        assert self._trainer is not None
        return _call_lightning_module_hook(self._trainer, hook, batch, *args) if self.has(hook) else batch

    def before(self, planned: Batch, dataloader_idx: int) -> Batch:
        """The module's hook on a planned batch; a copy that is under way is given up, as values may change in place.

        Raises:
            ConfigError: What it returns is no dict with all our keys.
        """
        return self._change("on_before_batch_transfer", dict(planned), dataloader_idx)

    def transfer(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:  # noqa: ANN401
        """The module's transfer of a planned batch, whose tensors are those on the host.

        Raises:
            ConfigError: What it returns is no dict with all our keys.
        """
        if self.has_example:
            return self.pass_on("transfer_batch_to_device", batch, device, dataloader_idx)
        return self._change("transfer_batch_to_device", dict(batch), device, dataloader_idx)

    def after(self, formatted: Any, batch: Batch, dataloader_idx: int) -> Any:  # noqa: ANN401 - the user's format
        """What the step gets: the formatted batch with what the module's hooks added, through the module's hook.

        Args:
            formatted: The finished batch in the user's format.
            batch: The batch before it was finished.
            dataloader_idx: Handed on.
        """
        if self._added:
            formatted = {key: batch[key] for key in self._added if key in batch} | formatted
        return self.pass_on("on_after_batch_transfer", formatted, dataloader_idx)

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
            found = self.pass_on(hook, batch, *args)
        except Exception as error:
            error.add_note(f"{self._place(hook)} was given the batch of {_name(self._datamodule)}, {_describe(keys)}")
            raise
        problem = self._find_problem(keys, found)
        if problem is None:
            self._added |= found.keys() - set(keys)
            return found  # type: ignore[no-any-return]  # checked to be a dict
        raise ConfigError(
            f"{self._place(hook)} {problem}: {_name(self._datamodule)} gave it its batch, {_describe(keys)}, and needs "
            f"all of them back. Change values or add keys there, and do the rest in on_after_batch_transfer, which "
            f"gets the finished batch in batch_format={self._datamodule.batch_format!r}"
        )

    def _find_problem(self, keys: list[str], found: Any) -> str | None:  # noqa: ANN401 - what a user's hook returns
        if not isinstance(found, dict):
            return f"returned {'None' if found is None else type(found).__name__} in place of a dict"
        if missing := [key for key in keys if key not in found]:
            return f"left out the keys {missing}"
        new, batch_format = [key for key in found if key not in keys], self._datamodule.batch_format
        if new and not gives_dict(batch_format):
            return f"added the keys {new}, for which a batch that is no dict has no place"
        taken = {*self._datamodule.batch_keys, *(batch_format if isinstance(batch_format, Mapping) else ())}
        if clash := [key for key in new if key in taken]:
            return f"added the keys {clash}, which the datamodule makes itself"
        return None

    def _place(self, hook: Hook) -> str:
        return f"{_name(self._module)}.{hook}"


class _Selector(_DataHookSelector):
    """Lightning's answer to whose hook it calls, without its warning where the chain runs both."""

    def __init__(self, model: L.LightningModule, chain: HookChain, datamodule: L.LightningDataModule) -> None:
        super().__init__(model, datamodule)
        self._chain = chain

    @override
    def get_instance(self, hook_name: Any) -> L.LightningModule | L.LightningDataModule:
        if self.datamodule is not None and self._chain.has(hook_name):
            return self.datamodule
        return super().get_instance(hook_name)


def _name(owner: object) -> str:
    return type(owner).__name__


def _describe(keys: list[str]) -> str:
    return f"a dict with the keys {keys}"
