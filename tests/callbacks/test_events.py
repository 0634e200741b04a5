from types import SimpleNamespace
from typing import Any

import lightning as L

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


def test_who_has_no_such_method_does_not_listen() -> None:
    assert isinstance(Listener("a", []), ListensToEvents)
    assert not isinstance(L.Callback(), ListensToEvents)
