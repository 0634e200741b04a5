"""Two packages hold the same Lightning, and each knows its own classes only."""

from typing import Final

from lit_data.errors import ConfigError

_OTHER: Final = "pytorch_lightning"


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
