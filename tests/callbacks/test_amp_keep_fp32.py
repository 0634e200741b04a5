import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_data.callbacks.amp import AMP
from lit_data.callbacks.precision import keep_in_float32
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET

Pair = namedtuple("Pair", ["left", "right"])
DATA = torch.rand(4, 2, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images))


class Model(LightningModule):
    """Notes the dtypes of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = Net()
        self.dtypes = set()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        score = self.critic(batch)
        self.dtypes.add(score.dtype)
        return score.float().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(amp: AMP, model: Model) -> None:
    trainer = Trainer(**QUIET, callbacks=[amp], max_epochs=1, log_every_n_steps=1)
    trainer.fit(model, DataLoader(DATA.clone(), batch_size=None))


def run(net: Net, keep: Any) -> tuple[list[torch.dtype], Tensor]:
    """Dtypes that body.0, body.1 and head give under autocast, and the output."""
    seen = []
    undo = keep_in_float32(net, keep, "cpu")
    hooks = []
    for layer in (net.body[0], net.body[1], net.head):
        hooks.append(layer.register_forward_hook(lambda *args: seen.append(args[2].dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        out = net(DATA[0])
    undo()
    for hook in hooks:
        hook.remove()
    return seen, out


HALF, FULL = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("keep", "dtypes"),
    [
        ((), [HALF, HALF, HALF]),
        (("head",), [HALF, HALF, FULL]),
        (("body",), [FULL, FULL, HALF]),
        (("body.1", "head"), [HALF, FULL, FULL]),
        (("body", "body.0"), [FULL, FULL, HALF]),
    ],
)
def test_chosen_modules_stay_in_float32(keep: Any, dtypes: list[torch.dtype]) -> None:
    net = Net()
    before = dict(vars(net.head))
    assert run(net, keep)[0] == dtypes
    assert vars(net.head) == before
    assert run(net, ())[0] == [HALF] * 3


@pytest.mark.parametrize("name", ["haed", "body.2", "", "head.forward"])
def test_an_unknown_name_is_refused(name: str) -> None:
    message = f"keep_fp32 has '{name}', which is not a submodule of Net - allowed: .* - the nearest: .*(head|body)"
    with pytest.raises(ConfigError, match=message):
        keep_in_float32(Net(), (name,), "cpu")


def test_inputs_of_any_nesting_are_cast() -> None:
    class Inner(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    net = nn.Sequential(Inner())
    keep_in_float32(net, ("0",), "cpu")
    half, double = torch.ones(1, dtype=HALF), torch.ones(1, dtype=torch.float64)
    whole = torch.ones(1, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        args, kwargs = net[0]([half, whole], {"a": (half, "text")}, pair=Pair(half, double))
    assert [tensor.dtype for tensor in args[0]] == [FULL, torch.int64]
    assert (args[1]["a"][0].dtype, args[1]["a"][1]) == (FULL, "text")
    assert isinstance(kwargs["pair"], Pair)
    assert [tensor.dtype for tensor in kwargs["pair"]] == [FULL, torch.float64]


def test_modules_built_late_are_known() -> None:
    class Late(Model):
        def configure_model(self) -> None:
            self.late = nn.Linear(4, 1)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            out = self.late(batch)
            self.dtypes.add(out.dtype)
            return out.sum()

    model = Late()
    train(AMP("bf16", keep_fp32=["late"]), model)
    assert model.dtypes == {FULL}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_keeps_what_is_named_and_leaves_no_trace(precision: str) -> None:
    plain, kept = Model(), Model()
    train(AMP(precision), plain)
    train(AMP(precision, keep_fp32=["critic.head"]), kept)
    assert plain.dtypes == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert kept.dtypes == {FULL}
    assert "forward" not in vars(kept.critic.head)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_kept_module_can_be_copied_and_pickled(clone: Callable[[Net], Net]) -> None:
    net = Net()
    keys = list(net.state_dict())
    keep_in_float32(net, ("body",), "cpu")
    other = clone(net)
    assert list(other.state_dict()) == list(net.state_dict()) == keys
    nn.init.zeros_(next(other.body.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        assert other.body(DATA[0]).dtype == other.body[0](DATA[0]).dtype == FULL
        first, second = other.body(DATA[0])
        assert torch.equal(first, second)  # the input has no effect any more
        assert not torch.equal(*net.body(DATA[0]))


@pytest.mark.parametrize("full", [True, False])
def test_compiled_modules_are_kept(full: bool) -> None:
    net = Net()
    outer = nn.Module()
    outer.net = torch.compile(net, backend="eager", fullgraph=full)
    keep_in_float32(outer, ("net.head",), "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        compiled = outer.net(DATA[0])
    dtypes, plain = run(net, ("head",))
    assert dtypes[2] == compiled.dtype == FULL
    assert torch.equal(compiled, plain)
