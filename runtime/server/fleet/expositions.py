"""Texts for Prometheus of several processes as one text."""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from llmc.runtime.server.http.accounts import allows_model


def join_expositions(texts: Mapping[str, bytes]) -> bytes:
    """One text with the families of all, and the label ``replica`` on every sample; without models that the present
    client's key is not for. ``texts``: by the name of the replica."""
    return generate_latest(_Joined(texts))


class _Joined(Collector):
    """A collector of what others have collected."""

    def __init__(self, texts: Mapping[str, bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                shown = (
                    s for s in family.samples if "model_name" not in s.labels or allows_model(s.labels["model_name"])
                )
                samples = [s._replace(labels={**s.labels, "replica": replica}) for s in shown]
                known = families.setdefault(family.name, family)
                known.samples = samples if known is family else [*known.samples, *samples]
        yield from families.values()
