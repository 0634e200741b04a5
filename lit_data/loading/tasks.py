"""Tasks of the workers, their answers, and the way of their failures to the main process."""

import io
import pickle
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from lit_data.errors import DataError, LitDataError
from lit_data.loading.staging import INDICES, Slot
from lit_data.types import Array, RowWriter

Texts = Mapping[str, list[Any]] | None
_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class RowTask:
    """One micro-batch: the rows of a slot from `first` up to `stop`.

    Attributes:
        slot: Memory of the batch.
        first: First row.
        stop: Row behind the last one.
        epoch: Epoch of the samples.
        plan: Of several plans for the same samples, made as the batch size changed, the highest
            number holds.
    """

    slot: Slot
    first: int
    stop: int
    epoch: int
    plan: int

    @property
    def indices(self) -> NDArray[np.int64]:
        """[M] sample numbers."""
        return self.slot.arrays[INDICES][self.first : self.stop]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way from a worker.

    Attributes:
        error: The exception; from another process its pickle, or None if it cannot be rebuilt.
        text: Class, message and traceback.
        sample: The sample it came from and its name, if known.
    """

    error: BaseException | bytes | None
    text: str
    sample: str

    def packed(self) -> Self:
        """Return a copy that crosses a process border whatever the exception is made of."""
        try:
            pickled = pickle.dumps(self.error)
            pickle.loads(pickled)  # a class with two arguments pickles, and fails here
        except Exception:
            pickled = None
        return type(self)(pickled, self.text, self.sample)

    def rebuild(self) -> BaseException:
        """Return the exception to raise: the original with its sample, or one that quotes it."""
        error = self.error
        if isinstance(error, bytes):
            try:
                error = pickle.loads(error)
            except Exception:
                error = None
        if not isinstance(error, Exception):
            return DataError(f"loading {self.sample} failed:\n{self.text}")
        if isinstance(error, LitDataError):
            return type(error)(f"{error}\n  while loading {self.sample}")
        note = f"while loading {self.sample}"
        if error.__traceback__ is None:  # a pickle leaves it out
            note += f"\n{self.text}"
        error.add_note(note)
        return error


def write(
    dataset: RowWriter, arrays: Mapping[str, Array], first: int, stop: int, epoch: int
) -> Texts | Failure:
    """Write one micro-batch; any exception of the dataset comes back instead of being raised."""
    rows = {name: array[first:stop] for name, array in arrays.items()}
    indices = rows.pop(INDICES)
    try:
        return dataset.write_into(rows, indices, epoch)
    except (Exception, SystemExit) as error:
        return Failure(error, traceback.format_exc(), _find_culprit(dataset, rows, indices, epoch))


def check_crossing(answer: Texts | Failure) -> Texts | Failure:
    """Return the answer if it can cross a process border, else a failure that says so."""
    if isinstance(answer, Failure):
        return answer.packed()
    try:
        _Checker(io.BytesIO()).dump(answer)
    except Exception as error:
        text = f"{error!r}: a part of a sample cannot be sent to the main process"
        return Failure(None, text, "a sample")
    return answer


class _Checker(pickle.Pickler):
    """Pickler that leaves out tensors, which cross through shared memory."""

    def persistent_id(self, value: object) -> str | None:
        return "tensor" if isinstance(value, torch.Tensor) else None


def describe_samples(dataset: object, indices: NDArray[np.int64]) -> str:
    """Return the samples of a micro-batch for a message."""
    numbers = indices.tolist()
    text = "sample " + ", ".join(map(str, numbers[:_NAMED]))
    if len(numbers) > _NAMED:
        text += f" and {len(numbers) - _NAMED} more"
    describe: Callable[[int], str] | None = getattr(dataset, "describe_sample", None)
    first = describe(numbers[0]) if describe else ""
    if not first:
        return text
    return f"{text} ({first} first)" if len(numbers) > 1 else f"{text} ({first})"


def _find_culprit(
    dataset: RowWriter, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int
) -> str:
    """Try the samples one by one, and name the one that fails alone, else all."""
    for number in range(len(indices)):
        single = slice(number, number + 1)
        single_row = {name: array[single] for name, array in rows.items()}
        try:
            dataset.write_into(single_row, indices[single], epoch)
        except (Exception, SystemExit):
            return describe_samples(dataset, indices[single])
    return describe_samples(dataset, indices)
