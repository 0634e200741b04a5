from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from lit_data.callbacks.events import Event, ListensToEvents, announce

Heard = list[tuple[str, Any, Event, BaseException | None]]


class Listener(L.Callback):
    def __init__(self, name: str, heard: Heard) -> None:
        self.name, self.heard = name, heard

    def on_event(self, trainer: L.Trainer, event: Event, error: BaseException | None) -> None:
        self.heard.append((self.name, trainer, event, error))


def test_all_callbacks_that_listen_are_told_in_their_order() -> None:
    heard: Heard = []
    trainer: Any = SimpleNamespace(
        callbacks=[Listener("a", heard), L.Callback(), Listener("b", heard)]
    )
    oom = Event("oom", "batch 3 ran out of memory", {"size": 8.0, "index": 3.0})
    release, error = Event("release", "given back"), MemoryError()
    announce(trainer, oom, error)
    announce(trainer, release)
    assert heard == [
        ("a", trainer, oom, error),
        ("b", trainer, oom, error),
        ("a", trainer, release, None),
        ("b", trainer, release, None),
    ]


def test_a_real_trainer_has_the_callbacks() -> None:
    heard: Heard = []
    trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[Listener("a", heard)])
    announce(trainer, Event("batch_size", "now 4", {"size": 4.0}))
    assert [entry[0] for entry in heard] == ["a"]


def test_who_has_no_such_method_does_not_listen() -> None:
    assert isinstance(Listener("a", []), ListensToEvents)
    assert not isinstance(L.Callback(), ListensToEvents)


def test_an_event_cannot_be_changed_by_a_listener() -> None:
    event = Event("precision", "scale halved", {"scale": 512.0})
    with pytest.raises(AttributeError, match="text"):
        event.text = "other"  # type: ignore[misc]
    assert Event("oom", "x").values == {}
    assert Event("oom", "x").values is not Event("oom", "x").values
