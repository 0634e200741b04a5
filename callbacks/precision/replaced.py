"""Which precision plugin of a Trainer `AMP` may take the place of."""

import lightning as L
from lightning.pytorch.plugins.precision import Precision

from lit_data.errors import ConfigError


def check_replaceable(trainer: L.Trainer) -> Precision:
    """The Trainer's plugin, if it is the plain one.

    Raises:
        ConfigError: It mixes precisions itself, or belongs to ``pytorch_lightning``, the other package of that name.
    """
    plugin = trainer.strategy.precision_plugin
    if type(plugin).__module__.startswith("pytorch_lightning."):
        raise ConfigError(
            "AMP: this Trainer is that of pytorch_lightning, and lightning's plugin does not clip the gradients of its "
            "modules - write `import lightning.pytorch as pl`, the same release under the other name, or leave AMP out "
            "and set Trainer(precision='bf16-mixed')"
        )
    if type(plugin) is not Precision:
        raise ConfigError(
            f"AMP: Trainer(precision={trainer.precision!r}) sets the precision by {type(plugin).__name__} already"
            " - allowed: '32-true', which is the default, and no other plugin - leave that out, or this callback"
        )
    return plugin
