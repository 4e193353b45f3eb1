"""Where a new run goes: its partition, by the chat's hash unless the soft view says that nobody there would take it soon.

  P1  A chat's turns meet the same partition, hence the same worker and its warm prefix cache.
  P2  Unless no live worker owns that partition, or its worker is overloaded: then the less loaded of two others.
  P3  The view is soft. Where it knows nothing (no live worker at all), the hash decides.

And the view of load that goes into the prompt, since admission looks at nothing that is not in its log: for each model the wait that
a request sent now would have, from the workers' reports and from what this edge itself has sent since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from schemas.events.accounts import LaneWait, LoadView
from schemas.events.workers import WorkerLoadReported
from schemas.ids import partition_for_key
from schemas.vocabulary import Lane

REPORT_AGE_MS_MAX: Final = 5_000
"""A worker that has said nothing for so long counts as gone."""
OVERLOADED_WAIT_MS: Final = 5_000
NO_WORKER_WAIT_MS: Final = 3_000
"""About what it takes until a dead worker's partitions have another owner."""
TOKENS_A_REQUEST: Final = 300
"""Guess for a request that no report counts yet."""
DECODE_TOKENS_PER_S_MIN: Final = 20.0
WAIT_MS_MAX: Final = 3_600_000
PRESSURE_STEPS_MS: Final = (2_000, 10_000, 30_000, 120_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """A worker's last report, when the broker took it, and how many runs this edge has sent to its partitions since."""

    report: WorkerLoadReported
    appended_ms: int
    sent_since: int = 0


def live_workers(workers: Iterable[WorkerSeen], *, now_ms: int) -> tuple[WorkerSeen, ...]:
    """Those that report and take work. `now_ms` is the broker's clock."""
    return tuple(
        worker
        for worker in workers
        if now_ms - worker.appended_ms <= REPORT_AGE_MS_MAX and not worker.report.draining
    )


def wait_ms(worker: WorkerSeen) -> int:
    """Until a request sent to this worker now would start, in ms."""
    report = worker.report
    ahead = report.queued_requests + worker.sent_since
    if report.busy + ahead < report.slots:
        return 0
    rate = max(report.decode_tokens_per_s, DECODE_TOKENS_PER_S_MIN)
    tokens = report.queued_tokens + worker.sent_since * TOKENS_A_REQUEST
    # Slots free up one by one: the next one after about one request's share of the whole rate.
    next_slot = TOKENS_A_REQUEST / max(1, report.slots)
    return min(WAIT_MS_MAX, int(1000 * (tokens + next_slot) / rate))


def choose_partition(
    chat_id: str,
    *,
    partitions: int,
    models: Sequence[str],
    workers: Sequence[WorkerSeen],
    draws: tuple[int, int],
) -> int:
    """The run's partition. `workers` are live; `draws` are two random numbers, for the two others."""
    home = partition_for_key(chat_id, partitions)
    owners = _owners(workers, models)
    if not owners:
        return home  # P3
    if _wait_at(home, owners) <= OVERLOADED_WAIT_MS:
        return home  # P1
    owned = sorted(
        partition for partition in owners if partition != home and partition < partitions
    )
    if not owned:
        return home
    others = [owned[draw % len(owned)] for draw in draws]
    best = min(others, key=lambda partition: _wait_at(partition, owners))
    if home in owners and _wait_at(best, owners) >= _wait_at(home, owners):
        return home
    return best  # P2


def _owners(workers: Sequence[WorkerSeen], models: Sequence[str]) -> Mapping[int, WorkerSeen]:
    owners: dict[int, WorkerSeen] = {}
    for worker in workers:
        if worker.report.model in models:
            for partition in worker.report.partitions:
                other = owners.get(partition)
                if other is None or other.appended_ms < worker.appended_ms:
                    owners[partition] = worker
    return owners


def _wait_at(partition: int, owners: Mapping[int, WorkerSeen]) -> int:
    owner = owners.get(partition)
    return WAIT_MS_MAX if owner is None else wait_ms(owner)


def load_view(
    models: Sequence[str], workers: Sequence[WorkerSeen], *, unowned_sent: int
) -> LoadView:
    """What admission is told. `unowned_sent`: runs sent lately while no worker was alive."""
    waits: list[LaneWait] = []
    least: list[int] = []
    for model in models:
        of_model = [wait_ms(worker) for worker in workers if worker.report.model == model]
        wait = min(of_model) if of_model else NO_WORKER_WAIT_MS + 100 * unowned_sent
        wait = min(wait, WAIT_MS_MAX)
        least.append(wait)
        waits.extend(LaneWait(model=model, lane=lane.value, wait_ms=wait) for lane in Lane)
    highest = max(least, default=0)
    pressure = sum(1 for step in PRESSURE_STEPS_MS if highest >= step)
    return LoadView(pressure=pressure, waits=tuple(waits))
