"""The recorder and the projector as processes, a way to write what the others would have written, and a way to read it all."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from infra.log.epoch import topic_epoch
from infra.log.records import BadRecord, LogRecord
from infra.log.span_reader import SpanReader
from producers.log_writer import LogWriter
from schemas.events import Event
from schemas.events.tokens import (
    AttemptStarted,
    RunEnded,
    TokensGenerated,
)
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id
from schemas.topics import TOKENS, Topic
from schemas.vocabulary import EndCause, EndWriter, Lane, Tier
from tests.integration.changed_limits import with_limits
from tests.integration.processes import end_process, start_module
from tests.integration.waiting import ACK_WAIT_MS, PATIENCE_S, eventually
from tests.run_samples import queued

PARTITIONS: Final = 2
ID_KEY: Final = b"k" * 32
ACCOUNT: Final = "acc-1"


# For a process that nothing is to take over from: however slow the machine is, its partitions stay with it.
STEADY: Final[Mapping[str, str]] = {"TURNLOG_SESSION_MS": "20000"}


class PartProcess:
    """`python -m <module>` against one broker; its home is `folder`. `limits` are constants of modules that are others than usual."""

    def __init__(
        self,
        module: str,
        folder: Path,
        *,
        bootstrap: str,
        variables: Mapping[str, str] | None = None,
        limits: Mapping[str, int] | None = None,
    ) -> None:
        name = f"{module.rpartition('.')[2]}-{secrets.token_hex(3)}"
        self._ready = folder / f"{name}.ready"
        self._log = folder / f"{name}.log"
        chosen = {
            "TURNLOG_HOME": str(folder),
            "TURNLOG_KAFKA": bootstrap,
            "TURNLOG_SESSION_MS": "3000",
            "TURNLOG_READY_FILE": str(self._ready),
            **(variables or {}),
        }
        self.process = start_module(
            *with_limits(module, limits or {}), log=self._log, variables=chosen
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end_process(self.process)

    def wait_ready(self) -> None:
        def ready() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended early ({self.process.returncode})")
            return self._ready.exists()

        eventually(ready, what="it is ready")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.ended()

    def ended(self) -> int:
        """Wait until it ends by itself; its exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")


@dataclass(slots=True, kw_only=True)
class Log:
    """Both sides of the log of one cluster."""

    writer: LogWriter
    reader: SpanReader
    epoch: int
    event_ids: int = 0
    cleanup: list[object] = field(default_factory=list)

    @classmethod
    async def open(cls, bootstrap: str) -> Self:
        writer = await LogWriter(bootstrap=bootstrap, client_id="test").__aenter__()
        reader = await SpanReader(bootstrap=bootstrap, client_id="test").__aenter__()
        return cls(writer=writer, reader=reader, epoch=await topic_epoch(bootstrap))

    async def close(self) -> None:
        await self.writer.__aexit__()
        await self.reader.__aexit__()

    async def append(self, topic: Topic, event: Event, event_id: str = "") -> int:
        """The offset."""
        event_id = event_id or secrets.token_hex(8)
        appended = await self.writer.append(
            topic, event, event_id=event_id, wait_ms_max=ACK_WAIT_MS
        )
        return appended.offset

    async def read(self, topic: Topic) -> list[LogRecord | BadRecord]:
        """Everything that is on the topic now, partition after partition."""
        found: list[LogRecord | BadRecord] = []
        bounds = await self.reader.bounds(topic, list(range(PARTITIONS)))
        for partition, kept in bounds.items():
            async for records in self.reader.span(topic, partition, kept.first, kept.end):
                found.extend(records)
        return found

    async def read_dead(self, topic: Topic) -> list[BadRecord]:
        """What was parked of the topic."""
        dead = Topic(
            name=topic.dead,
            key=topic.key,
            events=(),
            retention_ms=topic.retention_ms,
            writers=topic.writers,
            readers=topic.readers,
        )
        return [record for record in await self.read(dead) if isinstance(record, BadRecord)]

    async def events(self, topic: Topic) -> dict[str, list[Event]]:
        """The events by event id; a record written twice is there twice."""
        found: dict[str, list[Event]] = {}
        for record in await self.read(topic):
            if isinstance(record, LogRecord):
                found.setdefault(record.envelope.event_id, []).append(record.event)
        return found

    async def mint(self, partition: int = 0) -> str:
        """A run id at the present end of the partition."""
        bounds = await self.reader.bounds(TOKENS, [partition])
        address = RunAddress(
            epoch=self.epoch, partition=partition, mint_offset=bounds[partition].end
        )
        return mint_run_id(
            key=ID_KEY,
            account_id=ACCOUNT,
            address=address,
            random=secrets.token_bytes(RANDOM_BYTES),
        )

    async def queue(self, run_id: str, *, deadline_ms: int = 600_000) -> None:
        await self.append(
            TOKENS,
            queued(
                run_id,
                account_id=ACCOUNT,
                chat_id=f"chat-{run_id}",
                user_message_id=f"user-{run_id}",
                assistant_message_id=f"answer-{run_id}",
                tier=Tier.FREE,
                lane=Lane.FREE,
                deadline_ms=deadline_ms,
            ),
        )

    async def start(self, run_id: str, *, attempt: int = 1) -> None:
        await self.append(
            TOKENS,
            AttemptStarted(
                run_id=run_id,
                attempt=attempt,
                nonce=f"n{attempt}",
                worker_id="w",
                input_tokens=7,
            ),
        )

    async def say(self, run_id: str, *texts: str, index: int = 0, attempt: int = 1) -> None:
        for place, text in enumerate(texts, start=index):
            await self.append(
                TOKENS,
                TokensGenerated(
                    run_id=run_id, nonce=f"n{attempt}", index=place, count=1, text=text
                ),
            )

    async def end(self, run_id: str, end: int, *, attempt: int = 1) -> int:
        return await self.append(
            TOKENS,
            RunEnded(
                run_id=run_id,
                cause=EndCause.STOP,
                writer=EndWriter.WORKER,
                nonce=f"n{attempt}",
                end=end,
            ),
        )

    async def answer(self, run_id: str, *texts: str) -> int:
        """A whole run; the offset of its terminal."""
        await self.queue(run_id)
        await self.start(run_id)
        await self.say(run_id, *texts)
        return await self.end(run_id, len(texts))
