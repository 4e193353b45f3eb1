"""The one registry of topics: who writes what, who reads it, how it is partitioned, and how long it is kept.

Topic creation, the docs table and `turnlog topics plan` are derived from it. Start here, then read `run_fold.py`, then
`processors/decisions/account.py`: those two folds decide everything.

All topics use LogAppendTime, so "when" always means the broker's clock. Account- and chat-keyed topics have a fixed number of
partitions (changing it would move keys away from their state); run-keyed topics may grow, all of them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import UnionType
from typing import Final, get_args

from schemas.events import Event
from schemas.events.account_snapshots import AccountSnapshotEvent
from schemas.events.accounts import AccountEvent
from schemas.events.admissions import AdmissionEvent
from schemas.events.chats import ChatEvent
from schemas.events.generations import GenerationRequested
from schemas.events.outcomes import RunConcluded
from schemas.events.quotas import QuotaEvent
from schemas.events.tokens import TokenEvent
from schemas.events.usage import UsageSettled
from schemas.events.workers import WorkerLoadReported
from schemas.vocabulary import Lane

PARTITIONS_DEFAULT: Final = 12
RECORD_BYTES_MAX: Final = 1_000_000
DEAD_SUFFIX: Final = ".dead"

_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 24 * _HOUR_MS
_YEAR_MS: Final = 365 * _DAY_MS


class Key(StrEnum):
    """What decides a record's partition. Topics with the same key are co-partitioned."""

    CHAT = "chat_id"
    ACCOUNT = "account_id"
    RUN = "run's partition"
    WORKER = "worker_id"
    SOURCE = "as source"


class Cleanup(StrEnum):
    """Kafka's cleanup.policy."""

    DELETE = "delete"
    COMPACT = "compact"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic. `retention_ms` is ignored for compacted topics; `writers` and `readers` are process names."""

    name: str
    key: Key
    events: tuple[type[Event], ...]
    retention_ms: int
    cleanup: Cleanup = Cleanup.DELETE
    user_text: bool = False
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    record_bytes_max: int = RECORD_BYTES_MAX

    @property
    def dead(self) -> str:
        """Where this topic's undecodable records are parked."""
        return self.name + DEAD_SUFFIX


def _events(union: UnionType | type[Event]) -> tuple[type[Event], ...]:
    return get_args(union) or (union,)


CHATS: Final = Topic(
    name="chat.chats.v1",
    key=Key.CHAT,
    events=_events(ChatEvent),
    retention_ms=_YEAR_MS,
    user_text=True,
    writers=("edge",),
    readers=("context", "projector"),
)
ACCOUNTS: Final = Topic(
    name="chat.accounts.v1",
    key=Key.ACCOUNT,
    events=_events(AccountEvent),
    retention_ms=7 * _DAY_MS,
    user_text=True,
    writers=("edge", "recorder", "turnlog"),
    readers=("admission",),
)
POLICY_ORDER_PARTITION: Final = 0
"""Of chat.accounts: its offsets put policies in order for all partitions."""
ACCOUNT_SNAPSHOTS: Final = Topic(
    name="chat.account-snapshots.v1",
    key=Key.ACCOUNT,
    events=_events(AccountSnapshotEvent),
    retention_ms=0,
    cleanup=Cleanup.COMPACT,
    writers=("admission",),
    readers=("admission", "edge", "projector", "worker"),
)
ADMISSIONS: Final = Topic(
    name="chat.admissions.v1",
    key=Key.CHAT,
    events=_events(AdmissionEvent),
    retention_ms=_YEAR_MS,
    user_text=True,
    writers=("admission",),
    readers=("context", "projector"),
)
QUOTAS: Final = Topic(
    name="chat.quotas.v1",
    key=Key.ACCOUNT,
    events=_events(QuotaEvent),
    retention_ms=_YEAR_MS,
    writers=("admission",),
    readers=("projector", "verify"),
)
USAGE: Final = Topic(
    name="chat.usage.v1",
    key=Key.ACCOUNT,
    events=(UsageSettled,),
    retention_ms=_YEAR_MS,
    writers=("admission",),
    readers=("billing", "projector", "verify"),
)
TOKENS: Final = Topic(
    name="chat.tokens.v1",
    key=Key.RUN,
    events=_events(TokenEvent),
    retention_ms=_DAY_MS,
    user_text=True,
    writers=("edge", "admission", "context", "worker", "recorder"),
    readers=("edge", "worker", "recorder"),
)
OUTCOMES: Final = Topic(
    name="chat.outcomes.v1",
    key=Key.CHAT,
    events=(RunConcluded,),
    retention_ms=_YEAR_MS,
    user_text=True,
    writers=("recorder",),
    readers=("context", "projector"),
)
WORKERS: Final = Topic(
    name="chat.workers.v1",
    key=Key.WORKER,
    events=(WorkerLoadReported,),
    retention_ms=_HOUR_MS,
    writers=("worker",),
    readers=("edge",),
)


def generations(model: str, lane: Lane) -> Topic:
    """The queue of one model and lane, partitioned like the token topic."""
    return Topic(
        name=f"chat.generations.{model}.{lane}.v1",
        key=Key.RUN,
        events=(GenerationRequested,),
        retention_ms=_DAY_MS,
        user_text=True,
        writers=("context",),
        readers=("worker",),
    )


FIXED: Final = (
    CHATS,
    ACCOUNTS,
    ACCOUNT_SNAPSHOTS,
    ADMISSIONS,
    QUOTAS,
    USAGE,
    TOKENS,
    OUTCOMES,
    WORKERS,
)


def all_topics(models: tuple[str, ...]) -> tuple[Topic, ...]:
    """Every topic that carries events, for these models. Each one has a `.dead` topic beside it."""
    return FIXED + tuple(generations(model, lane) for model in models for lane in Lane)


# What retention must cover (protocol bounds): a run's deadline and an outage of the recorder lie well inside a day.
RUN_DEADLINE_MS_MAX: Final = 2 * _HOUR_MS
RECORDER_OUTAGE_MS_MAX: Final = 12 * _HOUR_MS
DEAD_RETENTION_MS: Final = 30 * _DAY_MS

assert len({topic.name for topic in FIXED}) == len(FIXED), "topic names are unique"
assert TOKENS.retention_ms > RUN_DEADLINE_MS_MAX + RECORDER_OUTAGE_MS_MAX, "retention covers a run"
assert all(topic.readers for topic in FIXED), "no topic without a named reader"
