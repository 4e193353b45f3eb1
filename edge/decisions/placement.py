"""Where a new run goes: its partition, by the chat's hash unless the soft view says that nobody there would take it soon.

  P1  A chat's turns meet the same partition, hence the same worker and its warm prefix cache.
  P2  Unless no live worker owns that partition, or its worker is overloaded: then the less loaded of two others.
  P3  The view is soft. Where it knows nothing (no live worker at all), the hash decides.
  P4  Who serves a partition differs by model: the first of the models with a live worker counts.

An overload is a wait in the run's own lane, from the newest report (`load_view.py`), so it clears as soon as the wait is gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final

from edge.decisions.load_view import WAIT_MS_MAX, Fleet, ModelLoad, wait_at
from schemas.events.accounts import LaneLimits
from schemas.ids import partition_for_key
from schemas.vocabulary import Lane

OVERLOADED_WAIT_MS: Final = 5_000


def choose_partition(
    chat_id: str,
    *,
    partitions: int,
    models: Sequence[str],
    lane: Lane,
    fleet: Fleet,
    shares: Mapping[Lane, LaneLimits],
    draws: tuple[int, int],
) -> int:
    """The run's partition. `draws` are two random numbers, for the two others."""
    home = partition_for_key(chat_id, partitions)
    load = next((fleet.models[model] for model in models if model in fleet.models), None)
    if load is None or not load.owners:
        return home  # P3

    def wait_of(partition: int) -> int:
        return _wait_of(load, partition, lane, shares=shares, now_ms=fleet.at_ms)

    home_wait_ms = wait_of(home)
    if home_wait_ms <= OVERLOADED_WAIT_MS:
        return home  # P1
    owned = load.owned[: bisect_left(load.owned, partitions)]
    at = bisect_left(owned, home)
    is_owned = home in load.owners
    count = len(owned) - is_owned
    if count <= 0:
        return home
    picked = [draw % count for draw in draws]
    others = [owned[place + (is_owned and place >= at)] for place in picked]
    best = min(others, key=wait_of)
    if is_owned and wait_of(best) >= home_wait_ms:
        return home
    return best  # P2


def _wait_of(
    load: ModelLoad,
    partition: int,
    lane: Lane,
    *,
    shares: Mapping[Lane, LaneLimits],
    now_ms: int,
) -> int:
    owner = load.owners.get(partition)
    if owner is None:
        return WAIT_MS_MAX
    extra = load.extra[owner.report.worker_id]
    return wait_at(owner, lane, extra=extra, shares=shares, now_ms=now_ms)
