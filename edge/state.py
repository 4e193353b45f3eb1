"""What the routes of one edge process share. Built once in `server.py`, and carried by every request."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from starlette.requests import Request

from edge.appends import Appends
from edge.auth import Caller, authenticate
from edge.catch_up import CatchUp
from edge.counting_threads import CountingThreads
from edge.decisions.account_bounds import AccountBounds
from edge.decisions.problems import DRAINING, Refused, unavailable
from edge.floods import Floods
from edge.loop_lag import LoopLag
from edge.metrics import Metrics
from edge.own_chats import OwnChats
from edge.runs import RunTable
from edge.soft_views import Accounts, BrokerClock, Workers
from edge.start_gap import StartGap
from edge.streams import Streams
from infra.history import History
from infra.log.span_reader import SpanReader
from infra.models import PromptModel
from infra.secrets import Secrets
from schemas.ids import CHAT_PREFIX, MESSAGE_PREFIX, RANDOM_BYTES, RUN_PREFIX, belongs_to
from schemas.vocabulary import Tier

SCOPE_KEY: Final = "turnlog.edge"
STREAMS_MAX: Final = 6_000
HELD_RUNS_MAX: Final = 60_000
PROJECTION_WAIT_MS_MAX: Final = 1_000
PROJECTION_POLL_MS: Final = 15
MIB: Final = 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeState:
    """One edge process."""

    home: Path
    low_disk_mb: int
    secrets: Secrets
    partitions: int
    models: Mapping[str, PromptModel]
    appends: Appends
    reader: SpanReader
    history: History
    chats: OwnChats
    runs: RunTable
    catch_up: CatchUp
    workers: Workers
    accounts: Accounts
    clock: BrokerClock
    gap: StartGap
    streams: Streams
    lag: LoopLag
    metrics: Metrics
    counting: CountingThreads = field(default_factory=CountingThreads)
    bounds: AccountBounds = field(default_factory=AccountBounds)
    floods: Floods = field(default_factory=Floods)

    def models_of(self, tier: Tier) -> Sequence[str]:
        """The models that a tier may use, its default first; all until admission has said."""
        limits = self.accounts.tier(tier)
        allowed = limits.models if limits is not None else tuple(self.models)
        return [name for name in allowed if name in self.models]

    def owns_chat(self, chat_id: str, caller: Caller) -> bool:
        """Whether this is a chat id of the caller's account: no input or output (I10)."""
        return self._owns(chat_id, CHAT_PREFIX, caller)

    def owns_message(self, message_id: str, caller: Caller) -> bool:
        """As owns_chat, for a message."""
        return self._owns(message_id, MESSAGE_PREFIX, caller)

    def owns_run(self, run_id: str, caller: Caller) -> bool:
        """As owns_chat, for a run."""
        return self._owns(run_id, RUN_PREFIX, caller)

    def _owns(self, id_text: str, prefix: str, caller: Caller) -> bool:
        return belongs_to(id_text, prefix, key=self.secrets.id_key, account_id=caller.account_id)

    def refuse_when_full(self) -> None:
        """Refuse what would append while the disk is nearly full. Raises Refused (503)."""
        if self.low_disk_mb and shutil.disk_usage(self.home).free < self.low_disk_mb * MIB:
            raise unavailable(
                "There is too little disk space to take this.", code="storage_low", retry_after_s=30
            )

    def refuse_when_draining(self) -> None:
        """Refuse what could not be finished any more. Raises Refused (503)."""
        if self.streams.draining:
            raise Refused(DRAINING)

    def refuse_when_late(self) -> None:
        """Refuse new streams rather than serve all of them late. Raises Refused (503)."""
        self.refuse_when_draining()
        late = self.lag.too_late
        if late or len(self.streams.open) >= STREAMS_MAX or self.runs.held >= HELD_RUNS_MAX:
            raise overloaded("This server has as many streams as it can serve in time.")


def overloaded(message: str) -> Refused:
    """503 with a jittered wait, so that those who are refused together do not come back together."""
    wait_s = 1 + secrets.randbelow(4)
    return unavailable(
        message, code="overloaded", retry_after_s=wait_s, extra={"wait_ms": wait_s * 1000}
    )


def state_of(request: Request) -> EdgeState:
    """The state that every request's scope carries."""
    found: EdgeState = request.scope[SCOPE_KEY]
    return found


def caller_of(request: Request) -> Caller:
    """Who asks. Raises Refused (401)."""
    return authenticate(
        request.headers.get("authorization"), key=state_of(request).secrets.token_key
    )


def random_id() -> bytes:
    """Randomness for one id."""
    return secrets.token_bytes(RANDOM_BYTES)


async def wait_for_store(look: Callable[[], Awaitable[T | None]]) -> T | None:
    """Look until there is something, at most PROJECTION_WAIT_MS_MAX: the store follows the log by a moment."""
    deadline = asyncio.get_running_loop().time() + PROJECTION_WAIT_MS_MAX / 1000
    while True:
        found = await look()
        if found is not None or asyncio.get_running_loop().time() >= deadline:
            return found
        await asyncio.sleep(PROJECTION_POLL_MS / 1000)
