"""Where a loader stands: a few plain numbers that go into a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Self

from lit_data.errors import ConfigError, StoreError
from lit_data.loading.order import EpochOrder

_REMEMBERED: Final = 64


@dataclass(slots=True)
class EpochProgress:
    """How far an epoch is.

    Attributes:
        epoch: Which epoch.
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
        self.batches, self.position = self.batches + 1, position
        self.ends[self.batches] = position
        self.ends.pop(self.batches - _REMEMBERED, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The samples trained so far in an epoch, and what their order depends on.

    Attributes:
        epoch: The epoch.
        position: Samples taken from its order, over all ranks.
        batches: Batches of this rank in it.
        batch_size: Of the run that saved it.
        world_size: Of the run that saved it.
        length: Samples of the set.
        seed: Of the order.
        shuffle: Whether the order is random.
        window_bytes: Of an order by windows; 0 for another.
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
        state = {"window_bytes": 0, **state} if isinstance(state, Mapping) else state
        names = {own.name: bool if own.name == "shuffle" else int for own in fields(cls)}
        if (
            not isinstance(state, Mapping)
            or state.keys() != names.keys()
            or any(
                type(state[name]) is not kind
                or not 0 <= state[name] < 2 ** (64 if name == "seed" else 63)
                for name, kind in names.items()
            )
            or state["position"] > state["length"]
        ):
            raise StoreError(
                f"the loader's state in the checkpoint is not one that lit_data wrote ({state!r:.200}): "
                "resume from another checkpoint"
            )
        return cls(**state)

    def to_plain(self) -> dict[str, Any]:
        """A dict of int and bool."""
        return asdict(self)

    def check_fits(self, order: EpochOrder) -> None:
        """Refuse to go on inside an epoch of another order, where samples would be lost and
        repeated.

        Raises:
            ConfigError: The set, the seed or the order is another one.
        """
        for name in ("length", "seed", "shuffle", "window_bytes"):
            found = getattr(order, name)
            saved = getattr(self, name)
            if self.position and saved != found:
                raise ConfigError(
                    f"the checkpoint stopped inside epoch {self.epoch}, after {self.position} samples of an order with "
                    f"{name}={saved}, and now it is {found}: resume with the same data and seed, or from a checkpoint "
                    "of an epoch's end"
                )

    def start(self) -> EpochProgress:
        """Where the epoch goes on."""
        return EpochProgress(self.epoch, self.batches, self.position, {self.batches: self.position})

    def is_elastic(self, batch_size: int, world_size: int) -> bool:
        """Whether the epoch goes on with other sizes than it began with."""
        return bool(self.position) and (self.batch_size, self.world_size) != (
            batch_size,
            world_size,
        )
