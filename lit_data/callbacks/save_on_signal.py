"""`SaveOnSignal`: a checkpoint to resume from when Ctrl-C or SIGTERM stops training."""

import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from typing_extensions import override

from lit_data.callbacks.wrapping import CopiedCallback
from lit_data.core.lightning_internals import load_waiting_states, set_stop
from lit_data.core.types import PathText

log = logging.getLogger(__name__)


_Handler = Callable[[int, FrameType | None], Any] | int | None


class SaveOnSignal(CopiedCallback):
    """Finishes the step, saves a checkpoint and ends the run when any rank gets a stop signal.

    The ranks agree after each optimizer step, whichever of them got the signal. On GPUs they read
    the result of the step before, so that nothing waits for the device, and stop one step later. A
    running validation is finished, because Lightning would not repeat it after a resume. Then
    ``trainer.fit`` raises ``SystemExit`` with the code 130 (Ctrl-C) or 143 (SIGTERM).

    The checkpoint holds the whole state of the Trainer and is written completely or not at all. A
    second Ctrl-C stops at once and saves nothing; further SIGTERMs are ignored, because launchers
    send several. A signal that was ignored before stays ignored, and an earlier handler of SIGTERM
    is called as well.

    Args:
        path: The checkpoint to write, on a local or mounted disk; its folder is created if it does
            not exist.
    """

    of_run = MappingProxyType({"_before": dict, "_replaced": dict, "_asked": type(None)})

    def __init__(self, path: PathText) -> None:
        self.path = Path(path)
        self._before: dict[int, _Handler] = {}
        self._replaced: dict[int, _Handler] = {}
        self._received = 0
        self._agreed = 0
        self._training = False
        self._in_step = False
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._received = self._agreed = 0
        self._asked = None
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.getsignal(number) for number in numbers}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training = True
        load_waiting_states(trainer)
        if trainer.received_sigterm:
            self._received = signal.SIGTERM
        # Lightning's own handler is replaced, because it waits for the other ranks wherever the
        # signal arrives.
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows no handlers in other threads
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                self._replaced[number] = signal.signal(number, self._note)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._in_step = True

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._in_step = False
        has_stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if has_stepped or trainer.is_last_batch:
            self._stop_if_agreed(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._agreed:
            set_stop(trainer, False)

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        is_new = self._training and self._received and not self._agreed
        if is_new and trainer.world_size == 1:
            self._agreed = self._received
            self._save(trainer)  # the sender may not wait for the end of the validation

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._training:
            self._stop_if_agreed(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore_handlers()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # By name, as pytorch_lightning has one of its own.
        is_stop = type(exception).__name__ == SIGTERMException.__name__
        # The same signal may end loader processes that share our terminal while we wait for their
        # batch.
        is_between_steps = trainer.world_size == 1 and not self._in_step
        is_loader_death = isinstance(exception, Exception) and is_between_steps
        try:
            if (is_stop and self._agreed) or (is_loader_death and self._received):
                self._save_and_log(trainer)
        finally:
            if is_stop:
                exception.code = 128 + (self._agreed or signal.SIGTERM)  # type: ignore[attr-defined]
            self._restore_handlers()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self._received = number
        hint = "; Ctrl-C once more stops at once" if number == signal.SIGINT else ""
        log.warning("%s: finishing the step, then saving%s", signal.Signals(number).name, hint)
        earlier_handler = self._before[number]
        if number == signal.SIGTERM and callable(earlier_handler):
            earlier_handler(number, frame)

    def _restore_handlers(self) -> None:
        self._training = False
        for number, handler in self._replaced.items():
            if signal.getsignal(number) == self._note:  # Lightning may have put another there
                signal.signal(number, handler)
        self._replaced = {}

    def _stop_if_agreed(self, trainer: Trainer) -> None:
        self._agreed = self._agreed or self._received
        if trainer.world_size > 1:
            self._agreed = self.ask_ranks(trainer)
        if self._agreed:
            set_stop(trainer, True)

    def ask_ranks(self, trainer: Trainer) -> int:
        """Return the signal that any rank got before this step, or on GPUs before the last one."""
        device = trainer.strategy.root_device
        if device.type != "cuda":
            signals = torch.tensor(self._agreed, device=device)
            return int(trainer.strategy.reduce(signals, reduce_op="max"))
        signals = torch.full((), self._agreed, device=device)
        # The strategy's own reduction would wait for all ranks.
        torch.distributed.all_reduce(signals, torch.distributed.ReduceOp.MAX)
        answer = signals.to("cpu", non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        previous = self._asked
        self._asked = (answer, event)
        # The result of the step before has arrived by now; the last step of an epoch waits for its
        # own.
        if previous is not None and not trainer.is_last_batch:
            answer, event = previous
        event.synchronize()
        return int(answer)

    def _save_and_log(self, trainer: Trainer) -> None:
        problem = self._save(trainer)
        if not trainer.is_global_zero:
            return
        name = signal.Signals(self._agreed or self._received).name
        if problem:
            log.error("%s: stopped after step %d; %s", name, trainer.global_step, problem)
        else:
            log.warning(
                "%s: stopped after step %d; resume with ckpt=%s",
                name,
                trainer.global_step,
                self.path,
            )

    def _save(self, trainer: Trainer) -> str:
        """Write the checkpoint from all ranks, and return the problem or an empty string."""
        part = self.path.with_name(f".{self.path.name}.part")
        try:
            _save_on_all_ranks(trainer, part)  # completed before it gets its name
            if trainer.is_global_zero:
                # Lightning writes nothing and reports nothing if the folder is read-only.
                if not part.exists() or (part.is_file() and part.stat().st_size == 0):
                    folder = self.path.parent
                    raise OSError(
                        f"no checkpoint was written to {folder}; check its permissions and the disk"
                    )
                part.replace(self.path)
        except (Exception, KeyboardInterrupt) as error:
            return f"{self.path} could not be written: {str(error) or type(error).__name__}"
        finally:
            if trainer.is_global_zero and part.is_file():
                part.unlink()
        return ""


def _save_on_all_ranks(trainer: Trainer, path: Path) -> None:
    try:
        trainer.save_checkpoint(path, weights_only=False)
    except Exception:
        trainer.strategy.barrier()  # the other ranks wait at the end of save_checkpoint
        raise
