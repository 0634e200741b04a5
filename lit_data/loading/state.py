"""State of a loader: a few plain numbers that go into a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from lit_data.errors import ConfigError, StoreError
from lit_data.loading.order import EpochOrder

_REMEMBERED: Final = 64


@dataclass(slots=True)
class EpochProgress:
    """Progress within an epoch.

    Attributes:
        epoch: The epoch.
        batches: Batches handed out in it, by this run and before it was interrupted.
        position: Samples that these took from its order, over all ranks.
        ends: The position behind each of the last batches, by the number of batches up to it.
    """

    epoch: int
    batches: int = 0
    position: int = 0
    ends: dict[int, int] = field(default_factory=dict)

    def advance(self, position: int) -> None:
        """Count a batch that is handed out."""
        self.batches += 1
        self.position = position
        self.ends[self.batches] = position
        self.ends.pop(self.batches - _REMEMBERED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The samples trained so far in an epoch, and the properties of their order.

    Attributes:
        epoch: The epoch.
        position: Samples taken from its order, over all ranks.
        batches: Batches of this rank in it.
        batch_size: Batch size of the run that saved it.
        world_size: Ranks of the run that saved it.
        length: Samples of the dataset.
        seed: Seed of the order.
        shuffle: The order is random.
        window_bytes: Size of the windows of the order; 0 without windows.
    """

    epoch: int
    position: int
    batches: int
    batch_size: int
    world_size: int
    length: int
    seed: int
    shuffle: bool
    window_bytes: int = 0

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> Self:
        """Check what a checkpoint holds.

        Raises:
            StoreError: It is not what `to_plain` gives.
        """
        if not cls._is_valid(state):
            raise StoreError(
                "the loader's state in the checkpoint is not one that lit_data wrote "
                f"({state!r:.200}): resume from another checkpoint"
            )
        return cls(**state)

    @classmethod
    def _is_valid(cls, state: object) -> bool:
        names = {field.name for field in fields(cls)}
        if not isinstance(state, Mapping) or state.keys() != names:
            return False
        for name, value in state.items():
            kind = bool if name == "shuffle" else int
            limit = 2**64 if name == "seed" else 2**63
            if type(value) is not kind or not 0 <= value < limit:
                return False
        return bool(state["position"] <= state["length"])

    def to_plain(self) -> dict[str, Any]:
        """Return a dict of int and bool."""
        return asdict(self)

    def check_fits(self, order: EpochOrder) -> None:
        """Refuse to go on inside an epoch of another order: samples would be lost or repeated.

        Raises:
            ConfigError: The dataset, the seed or the order is another one.
        """
        if not self.position:
            return  # at the beginning of an epoch any order will do
        for name in ("length", "seed", "shuffle", "window_bytes"):
            saved, current = getattr(self, name), getattr(order, name)
            if saved != current:
                raise ConfigError(
                    f"the checkpoint stopped inside epoch {self.epoch}, after {self.position} "
                    f"samples of an order with {name}={saved}, and now it is {current}: resume "
                    "with the same data and seed, or from a checkpoint of an epoch's end"
                )

    def start(self) -> EpochProgress:
        """Return the progress from which the epoch goes on."""
        return EpochProgress(self.epoch, self.batches, self.position, {self.batches: self.position})

    def is_elastic(self, batch_size: int, world_size: int) -> bool:
        """Return True if the epoch goes on with other sizes than it began with."""
        is_other = (self.batch_size, self.world_size) != (batch_size, world_size)
        return self.position > 0 and is_other
