"""`MicroBatchLoader`: workers write micro-batches straight into the rows of a batch."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch.utils.data import SequentialSampler

from lit_data.core.checks import check_count
from lit_data.core.errors import ConfigError
from lit_data.core.types import Ints, RowWriter, Stage
from lit_data.loading.apart import maps_files, read_apart
from lit_data.loading.assembly import (
    Assembly,
    EpochProgress,
    LoaderState,
    check_sources,
    look_ahead,
)
from lit_data.loading.changes import look_at
from lit_data.loading.choice import Choice, choose_workers, open_workers
from lit_data.loading.current_order import CurrentOrder
from lit_data.loading.options import LoaderOptions
from lit_data.loading.order import EpochOrder
from lit_data.loading.samples import Collate, MapStyle, SampleWriter
from lit_data.loading.staging import INDICES, Layout, Slot, Staging, check_room
from lit_data.loading.survey import as_rows
from lit_data.loading.torch_options import TorchOptions, choose_kind, keeps_workers, merge_options
from lit_data.loading.trainer_view import (
    CYCLE,
    EPOCHS,
    OF_PROCESS,
    PER_PASS,
    EpochSampler,
    check_unread,
    make_sampler,
    record_indices,
)
from lit_data.loading.transfer import SideStream, pin_tensors
from lit_data.loading.workers import Failure, Workers, write

log = logging.getLogger(__name__)

_FROM_SAMPLES = ("_rows", "_layout", "_staging")
"""Attributes that depend on samples of the dataset."""


class MicroBatchLoader:
    """Loader whose workers write micro-batches in place, in a reproducible order.

    It is a plain iterable, not a `torch.utils.data.DataLoader`, because Lightning re-creates those.
    The order of an epoch and all random numbers of a sample depend only on the seed, the epoch and
    the sample, not on workers, micro-batches, batch size or ranks.

    Each pass is the next epoch, also after an interrupted pass.
    `set_epoch` sets the epoch of the next pass; Lightning does that through `sampler`. Each further
    pass within an epoch of Lightning (``max_size_cycle``) has a different order.

    Ranks share the samples: each rank reads its part of every step, without a `DistributedSampler`.

    A batch is in staging memory, which is reused only after its last tensor is deleted.

    Args:
        dataset: A dataset that writes rows (`lit_data.core.types.RowWriter`), or any map-style one.
        options: Batch size, workers and other options.
        shuffle: Shuffle the samples in each epoch; otherwise the order is ascending.
        sampler: Yields the sample indices of a pass in order, as torch's samplers do; ranks share
            them. The global generators that it draws from are seeded by seed and epoch.
        rank: Rank of this process; by default that of `torch.distributed` if its process group is
            initialized when a pass begins, else 0.
        world_size: Number of processes, with the same default; with ``rank=0, world_size=1`` each
            process reads everything.
        collate_fn: Makes a batch from a list of samples of any kind and size in a worker, as in
            torch's DataLoader; `list` returns the samples unchanged. By default samples are
            stacked in place, which is several times faster.
        worker_init_fn: Called in each worker process with its number, before the first sample; not
            called without worker processes, as in torch.
        stage: Purpose of the batches. For val, test and predict each sample occurs exactly once over
            all ranks; for train all ranks take the same number of steps. Without a stage,
            `shuffle=True` means train; any other order fulfills both conditions or raises an error.
        repeats: Each pass is epoch 0, with the same random numbers, unless `set_epoch` is called;
            the default for val, test and predict. Without a `stage` passes differ, as with torch's
            DataLoader.
        **torch_options: Arguments of torch's DataLoader instead of `options`, see `TorchOptions`.

    Attributes:
        epoch: Epoch of the order and the random numbers of the next pass.
        sampler: Object through which a Trainer sets the epoch.
        count_trained: Returns (epoch, batches trained in it) from the epoch of the last pass, if it
            is known, as with a Trainer; otherwise every returned batch counts as trained.
        device: CUDA device to which the next batch is copied in advance
            (`lit_data.loading.transfer`); with None the consumer copies batches.
        assemble_s: Seconds spent so far on returning batches, without waiting for workers.

    Raises:
        ConfigError: The dataset cannot be read by index, is empty or smaller than the number of
            ranks, or its samples cannot be put into a batch; or the ranks cannot share the global
            batch evenly; or `collate_fn` is combined with `micro_batch_size`, or with a dataset that
            writes rows; or two arguments contradict each other.
    """

    def __init__(
        self,
        dataset: RowWriter | MapStyle,
        options: LoaderOptions | None = None,
        *,
        shuffle: bool | None = None,
        sampler: Iterable[int] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Collate | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        stage: Stage | None = None,
        repeats: bool | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        self.options = choose_kind(merge_options(options, torch_options), worker_init_fn)
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.worker_init_fn = worker_init_fn
        if collate_fn is not None and self.options.micro_batch_size != "auto":
            raise ConfigError("collate_fn makes a batch of whole samples: remove micro_batch_size")
        self.stage = stage
        self._orders = CurrentOrder(
            dataset,
            self.options,
            shuffle=bool(shuffle),
            sampler=sampler,
            rank=rank,
            world_size=world_size,
            stage=stage,
        )
        self.repeats = self._orders.is_evaluation if repeats is None else repeats
        self._order = self.order
        self._keeps_workers = keeps_workers(
            self.options, torch_options, shuffled=self._order.shuffle
        )
        self._batch_size: int | None = None
        self.options.count_batch(self._order.world_size)
        self.epoch, self._epochs_per_pass = 0, 1
        self.count_trained: Callable[[int | None], tuple[int, int]] | None = None
        self.device: torch.device | None = None
        self.pin_device: torch.device | None = None
        self.assemble_s = 0.0
        self._resumed: LoaderState | None = None
        self._began = 0  # epoch of a Trainer in which the pass began
        self._iterators = self._handed_out = 0  # since `_resumed` was loaded; batches of the pass
        self._fetched_ahead: int | None = None
        self._has_told_length = False
        self._progress: EpochProgress | None = None
        self._assembly: Assembly | None = None
        self._workers: Workers | None = None
        self._marks: list[object] = []
        self._plan = 0

    @property
    def order(self) -> EpochOrder:
        """Order of the samples for the current dataset and ranks."""
        return self._orders.read()

    @property
    def sampler(self) -> EpochSampler | SequentialSampler:
        """Return the object through which a Trainer sets the epoch."""
        return make_sampler(self.order, self._begin_epoch)

    @property
    def batch_sampler(self) -> Any:  # noqa: ANN401 - a class of Lightning
        """Return the object from which Lightning's ``predict`` reads indices of batches; None without Lightning."""
        return record_indices(self._progress, self._order)

    @property
    def resizable(self) -> bool:
        """Return True if the batch size may change within an epoch."""
        return self.options.resizable

    @property
    def batch_size(self) -> int:
        """Samples per batch on this rank.

        Setting it takes effect with the next batch if the loader is resizable, else with the next
        epoch.
        """
        return self._batch_size or self.options.count_batch(self.order.world_size)

    @batch_size.setter
    def batch_size(self, samples: int) -> None:
        check_count("batch_size", samples, 1)
        has_changed = samples != self.batch_size
        self._batch_size = samples
        if has_changed and self.options.resizable and self._assembly is not None:
            self._assembly.resize(samples)

    @property
    def batch_sizes(self) -> Collection[int]:
        """Possible sizes of this rank's batches; empty if the batch size may change."""
        if self._is_elastic():
            return ()
        return self.order.list_sizes(self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass, which determines its order and its random numbers."""
        self.epoch = epoch
        self._epochs_per_pass = 1

    def _begin_epoch(self, epoch: int) -> None:
        """Set the epoch that a Trainer announces; further passes within it use no later epoch."""
        check_unread(self._progress, self._handed_out)
        if self._fetched_ahead is None:
            # A Trainer fetches first if this loader, or one next to it, has no length.
            self._fetched_ahead = self._handed_out
        if not self.repeats:
            if self._resumed is None or self._resumed.epoch % CYCLE != epoch:
                self.epoch = epoch
            self._epochs_per_pass = CYCLE

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, including those before an interruption.

        Raises:
            TypeError: The number can change within the epoch: the loader is resizable, or resumes
                inside an epoch with another batch size or number of ranks. Lightning then asks for
                batches until there are none; if a length changed, it would skip samples or
                validation.
        """
        if self._is_elastic():
            raise TypeError("this loader has no length: its batch size can change within an epoch")
        start, order = self._start(self.epoch), self._orders.plan(self.batch_size)
        self._has_told_length = True
        return start.batches + order.steps(start.position, self.batch_size)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"MicroBatchLoader({type(self.dataset).__name__}, {self._order.describe()})"

    def __getstate__(self) -> dict[str, Any]:
        state = {**vars(self), **OF_PROCESS}
        for name in (*_FROM_SAMPLES, "side_stream"):
            state.pop(name, None)
        return state

    def __iter__(self) -> Iterator[Any]:
        self._iterators, self._handed_out = self._iterators + 1, 0
        if self._iterators > PER_PASS:
            self._resumed = None
        batches = self._batches()
        return self.side_stream.ahead(batches) if self.device is not None else batches

    def read(self, positions: Ints, epoch: int) -> Any:  # noqa: ANN401 - the structure of a sample
        """Return the samples at some positions of an epoch's order as one batch.

        Meant for a few samples, because it uses no workers.
        """
        rows, samples = self._rows, len(positions)
        # A dataset must not have files open here if its workers are processes.
        is_apart = not maps_files(rows) and self.choice.kind == "process"
        slot = Slot(self._layout, samples, shared=is_apart, pinned=None)
        slot.arrays[INDICES][:] = self.order.at(positions, epoch)
        read = partial(write, arrays=slot.arrays, first=0, stop=samples, epoch=epoch)
        answer = read_apart(read, rows, self.options) if is_apart else read(rows)
        if isinstance(answer, Failure):
            raise answer.rebuild()
        staging = Staging(self._layout, shared=False, pinned=None)
        return self._hand_out(staging, slot, samples, answer or {})

    def close(self) -> None:
        """End the workers; the next pass starts new ones, which see the current dataset."""
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in training as a few plain numbers.

        Any number of ranks and workers can resume from it.
        """
        progress = self._progress or self._start(self.epoch)
        order = self._order if self._progress else self.order
        epoch, batches = progress.epoch, progress.batches
        if self.count_trained is not None:
            # Batches that were fetched before their step are not trained yet.
            began = self._began if self._progress else self._trained_epoch(epoch)
            epoch, batches = self.count_trained(began)
        elif self._assembly is not None:
            batches = max(0, batches - (self._fetched_ahead or 0))
        position = progress.ends.get(batches, progress.position) if batches else 0
        return LoaderState.within(order, epoch, position, batches, self.batch_size).to_plain()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; the loader keeps its own batch size.

        Raises:
            StoreError: This is not the state of a loader.
            ConfigError: It was saved inside an epoch with another order, or another known length.
        """
        resumed = LoaderState.from_plain(state)
        if self.count_trained is not None and resumed == self._resumed:
            return  # the Trainer loads again what its datamodule has loaded
        resumed.check_fits(self.order)
        if self._has_told_length and not self.resizable:
            resumed.check_length(self.batch_size, self.order.world_size)
        if not (self.repeats and self.count_trained is not None):
            self.epoch = resumed.epoch
        self._resumed, self._progress, self._iterators = resumed, None, 0

    @property
    def has_chosen(self) -> bool:
        """Return True if `choice` is known already."""
        return "choice" in self.__dict__

    @cached_property
    def choice(self) -> Choice:
        """Kind and number of workers, and the reason; the first access measures if one is `auto`."""
        return choose_workers(
            self._rows, self._layout, self.options, self.order.world_size, self.stage or ""
        )

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample in the staging memory; 0 if a `collate_fn` makes the batches."""
        return 0 if self.collate_fn is not None else self._layout.count_bytes(1)

    @cached_property
    def side_stream(self) -> SideStream:
        """Stream that copies batches to the device in advance."""
        assert self.device is not None
        return SideStream(self.device)

    def _batches(self) -> Iterator[Any]:
        progress = self._begin_pass()
        self._forget_old_samples()
        depth = self._count_tasks_ahead()
        workers = self._open_workers()
        assembly = self._begin_assembly(progress)
        fetching = look_ahead(self._rows, assembly.order, progress)
        samples_read = 0
        try:
            for task, answer in workers.run(assembly, depth):
                batch = assembly.receive(task, answer)
                if batch is None:  # some of its micro-batches are missing
                    continue
                samples_read += batch.samples
                fetching.advance(samples_read)
                self._handed_out += 1
                yield self._hand_out(self._staging, batch.slot, batch.samples, batch.texts)
                self._check_current(assembly)
        except Exception:
            self.close()
            raise
        finally:
            fetching.close()
            self._end_iteration(assembly)

    def _begin_pass(self) -> EpochProgress:
        """Set the order of a pass and the epoch of the next one; return the start of the pass."""
        order = self._orders.plan(self.batch_size)
        self._orders.check_ranks()
        progress = self._start(self.epoch)
        if progress.batches and not order.steps(progress.position, self.batch_size):
            further = 0 if self.repeats else self._epochs_per_pass
            progress = EpochProgress(self.epoch + further)  # it was complete
        order.draw(progress.epoch)
        if progress.position and self._resumed is not None:
            self._resumed.check_drawn(order.digest(progress.epoch))
        self._order, self._iterators = order, PER_PASS
        self._began = self._trained_epoch(progress.epoch)
        if not self.repeats:
            self.epoch = (progress.epoch + self._epochs_per_pass) % EPOCHS
        return progress

    def _open_workers(self) -> Workers:
        if self.choice.kind != "process":
            check_sources(self._rows)
        # Workers stay for the next epoch, because starting processes takes longer than a batch.
        if self._workers is None:
            self._workers = open_workers(
                self._rows, self._layout, self.choice, self.options, self.worker_init_fn
            )
        return self._workers

    def _begin_assembly(self, progress: EpochProgress) -> Assembly:
        self._progress = progress
        self._assembly = Assembly(
            self._order,
            self._staging,
            progress,
            batch_size=self.batch_size,
            count_rows=self._count_rows,
            plan=self._plan + 1,
        )
        return self._assembly

    def _forget_old_samples(self) -> None:
        """End the workers and discard the layout of samples if the dataset has changed since the last pass."""
        marks = look_at(self._order.length, self.dataset, self.collate_fn)
        if self._marks and marks != self._marks and not self._still_serves():
            self.close()
            for name in _FROM_SAMPLES:
                self.__dict__.pop(name, None)
        self._marks = marks

    def _still_serves(self) -> bool:
        """Return True if a changed dataset is not copied to workers and its samples have the same layout."""
        if self.choice.kind == "process":
            return False
        return dict(self._make_rows().fields) == self._layout.fields

    def _count_tasks_ahead(self) -> int:
        """Return the number of micro-batches in progress, besides the one that is needed next.

        Raises:
            ConfigError: The batches do not fit into memory.
        """
        tasks_per_batch = math.ceil(self.batch_size / self._count_rows(self.batch_size))
        # Each worker has something to do, also if batches are small.
        depth = max(self.options.prefetch_batches * tasks_per_batch, self.choice.workers)
        # In addition to the batches ahead, one is being written and one is in use.
        check_room(self._layout, self.batch_size, math.ceil(depth / tasks_per_batch) + 2)
        return depth

    def _count_rows(self, batch_size: int) -> int:
        return batch_size if self.collate_fn is not None else self.choice.count_rows(batch_size)

    def _hand_out(
        self, staging: Staging, slot: Slot, samples: int, texts: Mapping[str, list[Any]]
    ) -> Any:  # noqa: ANN401
        began_s = time.perf_counter()
        batch: Any = staging.lend(slot, samples)
        if isinstance(self._rows, SampleWriter):
            batch = self._rows.build(batch, texts)
        if self.collate_fn is not None and self.options.pins_memory:
            batch = pin_tensors(batch)  # they are outside of the staging memory
        self.assemble_s += time.perf_counter() - began_s
        return batch

    def _check_current(self, assembly: Assembly) -> None:
        if self._assembly is not assembly:
            raise ConfigError(
                "another iteration over this loader has begun, and its workers serve one "
                "iteration at a time: create one loader per iteration"
            )

    def _end_iteration(self, assembly: Assembly) -> None:
        self._plan = max(self._plan, assembly.plan)
        if self._assembly is not assembly:
            return  # another iteration has taken over the workers
        self._assembly = None
        if not self._keeps_workers:
            # Evaluation runs once in an epoch: until then its workers would only use memory.
            self.close()

    def _is_elastic(self) -> bool:
        """Return True if batches of the coming epoch may differ in size."""
        if self.options.resizable:
            return True
        resumed = self._resumed
        return resumed is not None and resumed.is_elastic(self.batch_size, self.order.world_size)

    def _start(self, epoch: int) -> EpochProgress:
        if self._resumed is not None and self._resumed.epoch == self._trained_epoch(epoch):
            return replace(self._resumed.start(), epoch=epoch)
        return EpochProgress(epoch)

    def _trained_epoch(self, epoch: int) -> int:
        """Return the epoch of the Trainer in which an epoch is trained that may be repeated."""
        if self.repeats and self.count_trained is not None:
            return self.count_trained(None)[0]
        return epoch

    @cached_property
    def _rows(self) -> RowWriter:
        return self._make_rows()

    def _make_rows(self) -> RowWriter:
        options = self.options
        if self.has_chosen:  # the dataset has changed: its workers stay
            options = replace(options, worker_kind=self.choice.kind)
        return as_rows(self.dataset, options, self.collate_fn, self.worker_init_fn)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self._rows.fields)

    @cached_property
    def _staging(self) -> Staging:
        device = None
        if self.options.pins_memory:
            device = self.pin_device or torch.device("cuda", torch.cuda.current_device())
        elif self.options.pin_memory is True:
            log.warning("pin_memory=True, but there is no CUDA device: batches are not page-locked")
        return Staging(self._layout, shared=self.choice.kind == "process", pinned=device)
