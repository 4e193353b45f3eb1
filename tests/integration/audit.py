"""What is on a running system's log, and the verdict of `turnlog verify` over all of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infra.log.records import LogRecord
from infra.log.span_reader import SpanReader
from schemas.ids import run_address
from schemas.topics import TOKENS, Topic
from tests.integration.processes import turnlog
from tests.integration.running import RunningSystem

_COUNT = re.compile(r"^\s*(\S.*?)\s{2,}([\d,]+)\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The counts that a clean `turnlog verify` printed."""

    counts: dict[str, int]

    @property
    def runs(self) -> int:
        """Runs that have ended."""
        return self.counts["finished runs"]

    @property
    def later_attempts(self) -> int:
        """Runs that a second worker continued."""
        return self.counts["runs with a second attempt"]


def audited(system: RunningSystem) -> Audit:
    """Run the command as a person would; fail where it does not end clean, with nothing open left."""
    done = turnlog(
        # On a starved machine what was killed is long in coming back; lateness is no loss. What has not come by the end is told below.
        *("verify", "--settle-s", "100", "--grace-s", "300"),
        variables={"TURNLOG_HOME": str(system.home), "TURNLOG_KAFKA": system.bootstrap},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "under way: " not in done.stdout, done.stdout
    found = (_COUNT.match(line) for line in done.stdout.splitlines())
    counts = {match[1]: int(match[2].replace(",", "")) for match in found if match}
    assert counts["open runs"] == counts["open reservations"] == 0, done.stdout
    return Audit(counts=counts)


async def all_records(system: RunningSystem, topic: Topic) -> list[LogRecord]:
    """Every decodable record of a topic, partition by partition."""
    found: list[LogRecord] = []
    async with SpanReader(bootstrap=system.bootstrap, client_id="test") as reader:
        partitions = await reader.partitions(topic)
        for partition, bounds in (await reader.bounds(topic, partitions)).items():
            async for batch in reader.span(topic, partition, bounds.first, bounds.end):
                found.extend(record for record in batch if isinstance(record, LogRecord))
    return found


async def run_records(system: RunningSystem, run_id: str) -> list[LogRecord]:
    """The records of one run on the token log."""
    found: list[LogRecord] = []
    address = run_address(run_id)
    async with SpanReader(bootstrap=system.bootstrap, client_id="test") as reader:
        bounds = (await reader.bounds(TOKENS, [address.partition]))[address.partition]
        async for batch in reader.span(TOKENS, address.partition, address.mint_offset, bounds.end):
            found.extend(
                record
                for record in batch
                if isinstance(record, LogRecord) and getattr(record.event, "run_id", None) == run_id
            )
    return found
