"""The word is reserved; measuring comes with a later release."""

from omegaconf import DictConfig

from lit_data.errors import ConfigError


def run(cfg: DictConfig) -> dict[str, float | int | str]:
    """Say what measures speed today.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        "`benchmark` is not part of this release yet. Run `fit`: its summary.json has samples_per_s, "
        "data_wait_fraction and peak_rss_bytes, and debug=profiler writes a table of where the time goes."
    )
