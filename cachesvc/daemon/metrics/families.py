"""Families of metrics of the names and labels that the daemon uses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from cachesvc.core.histogram import BOUNDS_S, Histogram


def histogram(name: str, about: str, waits: Histogram) -> Metric:
    """Return a family with one histogram."""
    found = HistogramMetricFamily(f"cachesvc_{name}", about)
    found.add_metric([], _buckets(waits), waits.sum_s)
    return found


def histograms(name: str, about: str, label: str, of: Mapping[str, Histogram]) -> Metric:
    """Return a family with a histogram for each value of a label."""
    found = HistogramMetricFamily(f"cachesvc_{name}", about, labels=[label])
    for value, waits in of.items():
        found.add_metric([value], _buckets(waits), waits.sum_s)
    return found


def _buckets(waits: Histogram) -> list[tuple[str, float]]:
    """Return the bounds, and how many waits were no longer than each."""
    bounds = [*map(floatToGoString, BOUNDS_S), "+Inf"]
    return list(zip(bounds, accumulate(waits.counts), strict=True))


def family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    name: str,
    about: str,
    label: str,
    values: Iterable[tuple[str, float]],
) -> Metric:
    """Return a family with the sum of the values of each label."""
    sums: dict[str, float] = {}
    for each, value in values:
        sums[each] = sums.get(each, 0) + value
    found = kind(f"cachesvc_{name}", about, labels=[label])
    for each, value in sums.items():
        found.add_metric([each], value)
    return found
