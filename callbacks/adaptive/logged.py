"""Values that a step logs once for each piece: what is shown is what the whole batch would have shown."""

from typing import Any

from lit_data.callbacks.adaptive.pieces import mean
from lit_data.lightning_internals import Metric, Results, show_value, shown_value


class LoggedPieces:
    """Collects the values of each piece from Lightning's results; epoch means weight pieces by their samples anyway.

    A torchmetrics object, which is right at the end of the epoch, shows its last piece at a step.

    Args:
        results: Of the loop that runs; none outside of a loop.
    """

    def __init__(self, results: Results | None) -> None:
        self.results = results
        self._batch = results.batch if results is not None else None
        self._values: dict[str, list[tuple[Any, int]]] = {}
        self._count = 0  # samples of the piece under way
        self._before: dict[str, Any] = {}

    def begin(self, part: Any, count: int) -> None:  # noqa: ANN401 - a piece of any structure
        """A piece begins: values that are logged count for its samples."""
        self._count = count
        self._before = {key: shown_value(metric) for key, metric in self._step_metrics()}
        self._show(part)

    def end(self) -> None:
        """A piece is done: keep what it logged for this step."""
        for key, metric in self._step_metrics():
            if shown_value(metric) is not self._before.get(key):  # otherwise another hook logged it, or another step
                self._values.setdefault(key, []).append((shown_value(metric), self._count))

    def merge(self) -> None:
        """All pieces are done."""
        for key, metric in self._step_metrics():
            found = self._values.get(key, [])
            if len(found) > 1:
                show_value(metric, _reduce(metric, [value for value, _ in found], [count for _, count in found]))
        self.close()

    def close(self) -> None:
        """Let go of the last piece."""
        self._show(self._batch)

    def _show(self, batch: Any) -> None:  # noqa: ANN401
        if self.results is not None:
            self.results.batch, self.results.batch_size = batch, None

    def _step_metrics(self) -> list[tuple[str, Metric]]:
        found = [] if self.results is None else self.results.items()
        return [(key, m) for key, m in found if m.is_tensor and m.meta.on_step and shown_value(m) is not None]


def _reduce(metric: Metric, values: list[Any], counts: list[int]) -> Any:  # noqa: ANN401
    if metric.meta.is_mean_reduction:
        return mean(values, counts)
    total = values[0]
    for value in values[1:]:
        total = total + value if metric.meta.is_sum_reduction else metric.meta.reduce_fx(total, value)
    return total
