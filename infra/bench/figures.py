"""Quantiles and the small tables that benchmarks print."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which the share `q` of `values` lies (nearest rank); NaN for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def p50_p99(values: Sequence[float]) -> str:
    """Median and 99th percentile, in the unit of the values."""
    return f"p50 {quantile(values, 0.50):7.1f}   p99 {quantile(values, 0.99):7.1f}"
