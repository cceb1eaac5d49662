"""An engine's /metrics as values one can ask for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families


class Metrics:
    """One scrape. Samples are found by name and any part of their labels; several that match are summed."""

    def __init__(self, exposition: str) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def samples(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Every (labels, value) of this name whose labels include these."""
        for found, value in self._samples.get(name, []):
            if labels.items() <= found.items():
                yield found, value

    def get(self, name: str, **labels: str) -> float | None:
        """The sum over ranks and engines, or None where there is no such sample."""
        values = [value for _, value in self.samples(name, **labels)]
        return sum(values) if values else None

    def value(self, name: str, **labels: str) -> float:
        """As `get`, with 0 for a counter that has not been touched yet."""
        return self.get(name, **labels) or 0.0
