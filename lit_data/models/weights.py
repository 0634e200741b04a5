"""Initial weights of a net from a file, matched by their names and shapes."""

import logging
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_data.core.errors import ConfigError, DataError, StoreError, first_line, show_path
from lit_data.core.opening import check_regular
from lit_data.core.plain import check_size
from lit_data.core.types import PathText
from lit_inspect.counts import counted, counted_of

log = logging.getLogger(__name__)

# Keys under which files hold them.
_STATES = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "net",
)
_MOST_PREFIXES = 32
_MOST_VALUES = 2_000_000  # in lists and dicts of a checkpoint
_MOST_REPEATED_BYTES = 2**24  # of tensors that repeat what is stored, as `expand` makes them
_BLOCK_BYTES = 2**20
_SHOWN = 3  # names in a message
_RGB = 3
_UNDERSCORED = "_conv_stem.weight"
"""Name that identifies files of EfficientNet-PyTorch, whose parts of names begin with underscores."""
_PATHLIKE = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".tar")
_ARE_GIVEN = ContextVar("_ARE_GIVEN", default=False)


@contextmanager
def giving_weights() -> Iterator[None]:
    """Build nets without initial weights, because a checkpoint provides their weights next."""
    token = _ARE_GIVEN.set(True)
    try:
        yield
    finally:
        _ARE_GIVEN.reset(token)


def are_weights_given() -> bool:
    """Return True inside of `giving_weights`, where a net reads no weights."""
    return _ARE_GIVEN.get()


def split_weights(
    weights: PathText | None, names: Sequence[str]
) -> tuple[str | None, PathText | None]:
    """Distinguish names of weights from files.

    Args:
        weights: Name or file.
        names: Names that the library has for this net.

    Returns:
        The name if it is one, and the file if it is one; neither if a checkpoint gives the weights.

    Raises:
        ConfigError: `weights` is neither a name nor a file.
    """
    if weights is None or are_weights_given():
        return None, None
    if weights in names:
        return str(weights), None
    text = str(weights)
    if "/" in text or text.endswith(_PATHLIKE):
        return None, weights
    raise ConfigError(
        f"weights={text!r} is unknown: choose {', '.join(names) or 'none'}, null, or the path of a "
        "file"
    )


class TakenWeights(NamedTuple):
    """Outcome of `take_weights`; names are those of the net.

    Attributes:
        taken: Weights and buffers that the net took from the file.
        other_shape: Weights with another shape in the file, such as the head of other classes.
        missing: Learned weights that the file does not have.
        unused: Tensors of the file that the net does not have.
    """

    taken: tuple[str, ...]
    other_shape: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def load_weights_file(net: nn.Module, path: PathText | None) -> TakenWeights | None:
    """Load initial weights from a file: a state dict, or a checkpoint of a LightningModule.

    Only plain data is unpickled. Names may have other prefixes than in the net (``model.``,
    ``module.``, ``backbone.`` or any other). The pair of prefixes with the most matching numbers is
    used, so a classifier's weights can also initialize the encoder of a segmenter. Weights of
    another shape are not changed, and their number is logged.

    Args:
        net: Net whose weights are set in place.
        path: ``.pt``, ``.pth``, ``.ckpt`` or ``.safetensors``; None does not change the net.

    Raises:
        DataError: `path` is not a file.
        StoreError: The file cannot be read, holds NaN, or none of its weights fits.
    """
    if path is None or are_weights_given():
        return None
    file = Path(path).expanduser()
    try:
        check_regular(file)
    except DataError as error:
        raise DataError(
            f"weights={show_path(path)}: {error}; give a .pt, .pth, .ckpt or .safetensors, or null"
        ) from error
    return take_weights(net, read_weights(file), show_path(path))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by their names, on the host.

    Raises:
        StoreError: The file cannot be read, or holds no tensors.
    """
    if path.suffix == ".safetensors":
        content = _read_safetensors(path)
    else:
        content = read_checkpoint(path, mapped=True)
    # A checkpoint holds its state under a key; a plain file of weights is the state itself.
    for state in (*(content.get(name) for name in _STATES), content):
        if not isinstance(state, Mapping):
            continue
        tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
        if tensors:
            return _drop_underscores(tensors)
    raise StoreError(
        f"{show_path(path)} holds no weights: its keys are {_name_some(map(str, content))}"
    )


def _drop_underscores(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of EfficientNet-PyTorch by the names of our encoder, others as they are."""
    if _UNDERSCORED not in tensors:
        return tensors
    return {name.removeprefix("_").replace("._", "."): tensors[name] for name in tensors}


def read_checkpoint(path: Path, *, mapped: bool = False, verify: bool = True) -> Mapping[str, Any]:
    """Return the content of a torch file on the host; only plain data is unpickled.

    Args:
        path: File to read.
        mapped: Leave the tensors on the disk until they are accessed.
        verify: Compare all bytes with their CRC-32, which torch writes and does not check.

    Raises:
        StoreError: The file is not a torch file, or is damaged.
    """
    try:
        check_regular(path)
    except DataError as error:
        raise StoreError(f"{path} is not a readable checkpoint: {error}") from error
    try:
        # Of other files torch has another way to say that they are none.
        is_zip = zipfile.is_zipfile(path)
        mapped = mapped and is_zip
        if verify and is_zip:
            _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:  # whose text recommends to run what the file says
        raise StoreError(
            f"{path} is not a readable checkpoint: it is damaged, or holds more than data"
        ) from error
    except (
        EOFError,
        LookupError,
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
        OSError,
        zipfile.BadZipFile,
    ) as error:
        reason = "it is damaged, or torch did not write it"
        if isinstance(error, OSError):
            reason = first_line(error)
        raise StoreError(f"{path} is not a readable checkpoint: {reason}") from error
    if not isinstance(content, Mapping):
        raise StoreError(f"{path} is not a checkpoint: it holds a {type(content).__name__}")
    try:
        _check_content(content)
    except ValueError as error:
        raise StoreError(f"{path} is not a readable checkpoint: {error}") from error
    return content


def _check_sums(path: Path) -> None:
    """Compare the records of a zip file with their CRC-32.

    Raises:
        BadZipFile: A record differs, or the file is cut off.
    """
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        # In a file of somebody else, records may overlap or expand to any size; torch stores plain ones.
        if sum(record.file_size for record in records) > path.stat().st_size:
            return
        for record in records:
            # 0 where `torch.serialization.set_crc32_options` turned it off
            if record.CRC and record.compress_type == zipfile.ZIP_STORED:
                with archive.open(record) as stream:
                    while stream.read(_BLOCK_BYTES):
                        pass


def _check_content(content: Mapping[str, Any]) -> None:
    """Refuse lists and tensors that expand to more than a file can hold.

    Raises:
        ValueError: There are such lists or tensors.
    """
    for value in check_size(content, most_values=_MOST_VALUES):
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        stored_bytes = value.untyped_storage().nbytes()
        if value.numel() * value.element_size() > stored_bytes + _MOST_REPEATED_BYTES:
            raise ValueError(
                f"a tensor of {list(value.shape)} has {stored_bytes} bytes in the file"
            )


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ConfigError(
            f"{show_path(path)} needs safetensors: pip install safetensors"
        ) from error
    try:
        content: dict[str, Tensor] = load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise StoreError(
            f"{show_path(path)} is not a readable safetensors file: {first_line(error)}"
        ) from error
    return content


def take_weights(net: nn.Module, state: Mapping[str, Tensor], source: str) -> TakenWeights:
    """Set the weights of a net that match by name and shape, and log their number.

    If a net has another number of channels than RGB, its first convolution gets adapted RGB
    weights; see `fit_channels`.

    Args:
        net: Net whose weights are set in place.
        state: Tensors by name.
        source: Origin of the tensors, for messages.

    Raises:
        StoreError: No tensor fits, or one that does holds NaN.
    """
    expected = net.state_dict()
    learned = {name: tuple(weight.shape) for name, weight in net.named_parameters()}
    shapes = {name: tuple(weight.shape) for name, weight in state.items()}
    strip, add = _find_prefixes(shapes, learned)
    # Names of the net that the file has, with the names that they have there.
    renamed = {add + name.removeprefix(strip): name for name in state if name.startswith(strip)}
    fitting: dict[str, Tensor] = {}
    other_shape = []
    first_kernels = next((name for name, weight in expected.items() if weight.ndim == 4), None)
    for name in expected:
        if name not in renamed:
            continue
        weight = _fit(state[renamed[name]], expected[name], is_first=name == first_kernels)
        if weight is None:
            other_shape.append(name)
        else:
            fitting[name] = weight
    if not fitting.keys() & learned.keys():
        raise StoreError(
            f"{source} has no weight that fits {type(net).__name__}: the file holds "
            f"{_name_some(state)}, the net {_name_some(learned)}"
        )
    refuse_nan({name: fitting[name] for name in learned if name in fitting}, source)
    net.load_state_dict(fitting, strict=False)
    missing = [name for name in learned if name not in renamed]
    used = {renamed[name] for name in expected if name in renamed}
    unused = [name for name in state if name not in used]
    taken = TakenWeights(tuple(fitting), tuple(other_shape), tuple(missing), tuple(unused))
    _log_taken(taken, learned, source)
    return taken


def fit_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt the kernels of a convolution of RGB images to another number of channels.

    Kernels for one channel are the sum over R, G and B, which is the same function for gray images.
    For more channels, kernels are repeated and scaled so that the sum stays the same.

    Args:
        weight: Kernels [outputs, 3, h, w].
        channels: Number of channels of the images.

    Returns:
        Kernels [outputs, channels, h, w].
    """
    if channels == 1:
        return weight.sum(1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // weight.shape[1]), 1, 1)[:, :channels]
    return repeated * (weight.shape[1] / channels)


def _fit(weight: Tensor, expected: Tensor, *, is_first: bool) -> Tensor | None:
    """Return a weight as the net can take it, or None."""
    if weight.layout != torch.strided or weight.is_floating_point() != expected.is_floating_point():
        return None
    if weight.shape == expected.shape:
        return weight
    # RGB kernels that differ only in the number of channels; deeper ones have other features.
    if not is_first or weight.ndim != 4 or expected.ndim != 4 or weight.shape[1] != _RGB:
        return None
    outputs, _, *kernel_px = expected.shape
    if weight.shape != (outputs, _RGB, *kernel_px):
        return None
    return fit_channels(weight, expected.shape[1])


def _find_prefixes(
    state: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> tuple[str, str]:
    """Choose the prefixes to remove from and add to names of the file, so that most numbers fit.

    Among equal ones, the shortest prefixes are chosen.
    """
    best = ("", "")
    most = 0
    for strip in _list_prefixes(state):
        names = [name for name in state if name.startswith(strip)]
        for add in _list_prefixes(expected):
            numbers = 0
            for name in names:
                if expected.get(add + name.removeprefix(strip)) == state[name]:
                    numbers += torch.Size(state[name]).numel()
            if numbers > most:
                best = (strip, add)
                most = numbers
    return best


def _list_prefixes(names: Iterable[str]) -> list[str]:
    """Return the dotted prefixes that most names begin with: none first, then by length."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join(parts[:depth]) + "." for depth in range(1, len(parts)))
    return ["", *sorted((prefix for prefix, _ in counts.most_common(_MOST_PREFIXES)), key=len)]


def refuse_nan(weights: Mapping[str, Tensor], source: str) -> None:
    """Refuse NaN in learned weights, which would stay NaN; buffers may hold any value.

    Raises:
        StoreError: A weight holds NaN.
    """
    bad = []
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.isnan().any():
            bad.append(name)
    if bad:
        raise StoreError(
            f"{source} holds NaN in {len(bad)} of {counted(len(weights), 'weight')}, first in {bad[0]}: "
            "training diverged before it was saved. Use an earlier checkpoint or another file, "
            "or train again with a lower learning rate"
        )


def _log_taken(taken: TakenWeights, learned: Mapping[str, tuple[int, ...]], source: str) -> None:
    fitting = [name for name in taken.taken if name in learned]
    come = counted_of(len(fitting), len(learned), "weight", "of the net comes", "of the net come")
    parts = [f"{come} from {source}"]
    if taken.other_shape:
        parts.append(
            f"{counted(len(taken.other_shape), 'has', 'have')} another shape there "
            f"({_name_some(taken.other_shape)})"
        )
    if taken.missing:
        missing = counted(len(taken.missing), "is", "are")
        parts.append(f"{missing} not there ({_name_some(taken.missing)})")
    if taken.unused:
        unused = counted(len(taken.unused), "of the file is", "of the file are")
        parts.append(f"{unused} not used by the net")
    level = logging.INFO if 2 * len(fitting) >= len(learned) else logging.WARNING
    log.log(level, "%s", "; ".join(parts))


def _name_some(names: Iterable[str]) -> str:
    listed = list(names)
    if not listed:
        return "nothing"
    if len(listed) > _SHOWN:
        return ", ".join([*listed[:_SHOWN], "..."])
    return ", ".join(listed)
