"""What a worker is told, what it does, and how its faults come back."""

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
    """One micro-batch: the rows of a slot from `first` up to `stop`."""

    slot: Slot
    first: int
    stop: int
    epoch: int
    plan: int  # of several plans for the same samples, made as the batch size changed, the highest number holds

    @property
    def indices(self) -> NDArray[np.int64]:
        """[M] sample numbers."""
        return self.slot.arrays[INDICES][self.first : self.stop]


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way from a worker.

    Attributes:
        error: The exception; from another process its pickle, or nothing where it cannot be
            rebuilt.
        text: Class, message and traceback.
        sample: The sample it came from and its name, if known.
    """

    error: BaseException | bytes | None
    text: str
    sample: str

    def packed(self) -> Self:
        """A copy that crosses a process border whatever the exception is made of."""
        try:
            data = pickle.dumps(self.error)
            pickle.loads(data)  # a class with two arguments pickles, and fails here
        except Exception:
            data = None
        return type(self)(data, self.text, self.sample)

    def rebuild(self) -> BaseException:
        """The exception to raise: the original one, told which sample it was; else one that quotes it."""
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
        error.add_note(
            f"while loading {self.sample}"
            + (f"\n{self.text}" if error.__traceback__ is None else "")
        )
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
    """What crosses a process border in place of an answer: a queue drops what cannot be pickled without a word."""
    if isinstance(answer, Failure):
        return answer.packed()
    try:
        _Checker(io.BytesIO()).dump(answer)
    except Exception as error:
        return Failure(
            None, f"{error!r}: a part of a sample cannot be sent to the main process", "a sample"
        )
    return answer


class _Checker(pickle.Pickler):
    """Tries to pickle, without a copy of tensors, which cross through shared memory."""

    def persistent_id(self, value: object) -> str | None:
        return "tensor" if isinstance(value, torch.Tensor) else None


def describe_samples(dataset: object, indices: NDArray[np.int64]) -> str:
    """The samples of a micro-batch for a message."""
    describe: Callable[[int], str] | None = getattr(dataset, "describe_sample", None)
    numbers = indices.tolist()
    first = describe(numbers[0]) if describe else ""
    shown = ", ".join(map(str, numbers[:_NAMED])) + (
        f" and {len(numbers) - _NAMED} more" * (len(numbers) > _NAMED)
    )
    return f"sample {shown}" + (f" ({first}{' first' * (len(numbers) > 1)})" if first else "")


def _find_culprit(
    dataset: RowWriter, rows: Mapping[str, Array], indices: NDArray[np.int64], epoch: int
) -> str:
    """Try the samples one by one; what fails alone is named alone."""
    for number in range(len(indices)):
        one = slice(number, number + 1)
        try:
            dataset.write_into(
                {name: array[one] for name, array in rows.items()}, indices[one], epoch
            )
        except (Exception, SystemExit):
            return describe_samples(dataset, indices[one])
    return describe_samples(dataset, indices)
