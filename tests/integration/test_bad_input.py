"""Bad input of every kind against one whole system: a clear error each time, nothing lost, nothing half done.

The system is shared and takes all of it; that the last test finds it whole is a part of what is shown.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from prometheus_client.parser import text_string_to_metric_families

from infra.log.span_reader import SpanReader
from producers.log_writer import LogWriter, acknowledged
from producers.parking import H_REASON, H_SOURCE, HAD
from schemas.topics import ACCOUNTS, CHATS, TOKENS, Topic, all_topics
from tests.contracts.http_cases import ACCEPTED, HttpCase
from tests.integration.audit import audited
from tests.integration.edge_peers import EdgeProcess
from tests.integration.people import Person, Reading, person
from tests.integration.processes import turnlog
from tests.integration.recording import STEADY
from tests.integration.running import RunningSystem, processes_of
from tests.integration.waiting import PATIENCE_S, eventually_async

PARTITIONS = 12
# Two edges and two workers: whoever parks must be one of them, not each.
VARIABLES = {
    "TURNLOG_EDGES": "2",
    "TURNLOG_WORKERS": "2",
    "TURNLOG_PARTITIONS": str(PARTITIONS),
    "TURNLOG_SCRIPTED_TOKENS": "5",
    # What is parked once is parked again by who takes over before it was committed; nobody does where a process waits for a busy machine.
    **STEADY,
}
# The models that a system serves where TURNLOG_MODELS is not set.
TOPICS = all_topics(("smollm2-135m",))
KEY = b"poison"  # A compacted topic takes no record without one.
NO_TYPE = "no known event type for this topic in the headers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """A record that is no event, and why."""

    value: bytes
    headers: tuple[tuple[str, bytes], ...]
    reason: str


def poisons(topic: Topic) -> tuple[Poison, ...]:
    """What each partition of the topic is given."""
    kind = topic.events[0].__name__
    whole = (("t", kind.encode()), ("v", b"1"), ("id", b"poison"))
    return (
        Poison(value=b"{}", headers=(("t", b"Nonsense"), *whole[1:]), reason=NO_TYPE),
        Poison(value=b"{}", headers=(), reason=NO_TYPE),
        Poison(
            value=b"{}", headers=(whole[0], ("v", b"7"), whole[2]), reason="unknown schema number"
        ),
        Poison(value=b"{}", headers=whole[:2], reason=f"{kind}: no event id"),
        Poison(value=b'{"run_id": "\xff', headers=whole, reason=f"{kind}: "),
        Poison(value=b"", headers=whole, reason=f"{kind}: "),
        Poison(value=b"\xff" * 2_000, headers=(("t", b"\xff"),), reason="a header is not text"),
    )


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
async def test_what_is_no_event_is_parked_once_and_its_partition_goes_on(
    running: RunningSystem, topic: Topic
) -> None:
    dead = replace(topic, name=topic.dead)
    before = len(await raw_records(running, dead))
    wanted: dict[str, Poison] = {}
    async with LogWriter(bootstrap=running.bootstrap, client_id="test") as writer:
        for partition in range(PARTITIONS):
            for poison in poisons(topic):
                sending = await writer.send_raw(
                    topic.name,
                    poison.value,
                    key=KEY,
                    partition=partition,
                    headers=list(poison.headers),
                )
                put = await acknowledged(sending)
                wanted[f"{topic.name}/{partition}/{put.offset}"] = poison

    async with person(running) as ada, person(running, edge=1) as elsewhere:
        # Whatever partition its chat, its account and its run lie in: the poison is in it.
        for asker in (ada, elsewhere):
            chat_id, reading = await asker.ask("Does it go on?")
            assert reading.end["status"] == "done"
            assert (await asker.stored_answer(chat_id))["content"] == reading.text

        async def counted() -> bool:
            for each in (ada, elsewhere):
                assert await parked_by_topic(each, topic) == before + len(wanted)
            return True

        await eventually_async(counted, what="all of it is parked and counted")

    # A second parker would have had its time: it sees what the first one saw.
    found = (await raw_records(running, dead))[before:]
    assert len(found) == len(wanted), "each is parked once"
    for record in found:
        headers = dict(record.headers)
        poison = wanted.pop(headers.pop(H_SOURCE).decode())
        assert poison.reason in headers.pop(H_REASON).decode()
        assert (record.key, record.value) == (KEY, poison.value)
        assert headers == {HAD + name: content for name, content in poison.headers}
    assert wanted == {}


async def test_a_record_as_large_as_the_broker_takes_is_parked_with_its_beginning(
    running: RunningSystem,
) -> None:
    dead = replace(TOKENS, name=TOKENS.dead)
    async with LogWriter(bootstrap=running.bootstrap, client_id="test") as writer:
        headers = [(f"h{number}", bytes(900)) for number in range(40)]
        sending = await writer.send_raw(
            TOKENS.name, b"x" * 950_000, key=b"k" * 20_000, partition=0, headers=headers
        )
        put = await acknowledged(sending)
    source = f"{TOKENS.name}/0/{put.offset}".encode()

    async def parked() -> bool:
        newest = (await raw_records(running, dead))[-1]
        return (H_SOURCE, source) in newest.headers and newest.value == b"x" * 900_000

    await eventually_async(parked, what="it is parked")
    async with person(running) as ada:
        _, reading = await ada.ask("Does it go on?")
        assert reading.end["status"] == "done"


async def parked_by_topic(reader: Person, topic: Topic) -> int:
    """What the edge's metrics say."""
    text = (await reader.http.get("/metrics")).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "turnlog_parked_records" and sample.labels["topic"] == topic.name:
                return int(sample.value)
    raise AssertionError("no such metric")


async def raw_records(running: RunningSystem, topic: Topic) -> list:  # type: ignore[type-arg]
    """All records of a topic as the broker has them."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=running.bootstrap, auto_offset_reset="none", fetch_max_wait_ms=20
    )
    await consumer.start()
    try:
        sources = [TopicPartition(topic.name, partition) for partition in range(PARTITIONS)]
        firsts, ends = (
            await consumer.beginning_offsets(sources),
            await consumer.end_offsets(sources),
        )
        consumer.assign(sources)
        for source in sources:
            consumer.seek(source, firsts[source])
        found: list = []  # type: ignore[type-arg]
        async with asyncio.timeout(PATIENCE_S):
            while len(found) < sum(ends[s] - firsts[s] for s in sources):
                for batch in (await consumer.getmany(timeout_ms=100)).values():
                    found.extend(batch)
        return sorted(found, key=lambda record: record.timestamp)
    finally:
        await consumer.stop()


async def test_a_second_start_in_the_same_home_is_refused_and_the_first_goes_on(
    running: RunningSystem,
) -> None:
    before = running.state()
    second = await asyncio.to_thread(turnlog, "up", variables={"TURNLOG_HOME": str(running.home)})
    assert second.returncode == 2
    assert second.stderr == (
        f"turnlog: {running.home} is in use by a running system (pid {running.pid}); "
        "stop it with `turnlog down` or set TURNLOG_HOME to another folder\n"
    )
    assert running.state() == before
    async with person(running) as ada:
        _, reading = await ada.ask("Still there?")
        assert reading.end["status"] == "done"


async def test_an_edge_that_is_short_of_disk_refuses_what_would_append_and_reads_on(
    running: RunningSystem,
) -> None:
    async with person(running) as ada:
        chat_id, told = await ada.ask("Before.")
        low = EdgeProcess(
            home=running.home,
            bootstrap=running.bootstrap,
            variables={"TURNLOG_LOW_DISK_MB": "1000000", "TURNLOG_PART": "edge-9"},
        ).wait_ready()
        try:
            await ada.is_settled()  # The last that is appended of her question.
            before = await ends(running)
            async with httpx.AsyncClient(
                base_url=low.url, headers=ada.http.headers, timeout=PATIENCE_S
            ) as client:
                for path, body in (
                    (f"/v1/chats/{chat_id}/messages", {"content": "x"}),
                    ("/v1/chats", {}),
                ):
                    refused = await client.post(path, json=body)
                    assert refused.status_code == 503
                    assert refused.json()["error"]["code"] == "storage_low"
                    assert int(refused.headers["retry-after"]) > 0
                assert await ends(running) == before, "nothing was appended"
                listed = await when_there(client, f"/v1/chats/{chat_id}/messages")
                assert listed["data"][-1]["content"] == told.text
                await when_there(client, "/readyz")
        finally:
            low.end()


async def when_there(client: httpx.AsyncClient, path: str) -> Any:
    """What is read, by a client that comes back where the edge says that the store or the log is behind."""

    async def read() -> Any:
        answer = await client.get(path)
        assert answer.status_code in {200, 503}, answer.text
        return answer.json() if answer.status_code == 200 else None

    return await eventually_async(read, what=f"{path} can be read")


async def ends(running: RunningSystem) -> list[int]:
    """Where the logs end that a request could append to."""
    async with SpanReader(bootstrap=running.bootstrap, client_id="test") as reader:
        every = list(range(PARTITIONS))
        found = [await reader.bounds(topic, every) for topic in (ACCOUNTS, CHATS, TOKENS)]
        return [bounds[partition].end for bounds in found for partition in every]


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case.name)
async def test_what_is_just_within_the_limits_is_answered(
    running: RunningSystem, case: HttpCase
) -> None:
    async with person(running) as ada:
        chat_id = await ada.new_chat()
        answer = await ada.http.request(
            case.method,
            case.path.replace("{chat}", chat_id),
            content=case.body,
            headers=case.headers,
        )
        assert answer.status_code == case.status, answer.text
        assert answer.headers["x-request-id"]


async def test_a_chat_works_from_its_first_moment_though_the_projector_stands_still(
    running: RunningSystem,
) -> None:
    running.kill("projector", signal.SIGSTOP)
    try:
        async with person(running) as ada:
            chat_id, told = await ada.ask("Before anything is stored?")
            assert told.end["status"] == "done"
            again = await Reading().read(ada.client.say(chat_id, {"content": "And again?"}))
            assert again.end["usage"]["input_tokens"] > told.end["usage"]["input_tokens"]
            shown = await ada.messages(chat_id)
            assert [message["content"] for message in shown[1::2]] == [told.text, again.text]
        async with person(running, edge=1) as elsewhere:
            behind = await elsewhere.http.get(f"/v1/chats/{chat_id}")
            assert (behind.status_code, behind.headers["retry-after"]) == (503, "1")
    finally:
        running.kill("projector", signal.SIGCONT)
    async with person(running, edge=1) as elsewhere:

        async def stored() -> bool:
            answer = await elsewhere.http.get(f"/v1/chats/{chat_id}/messages")
            return answer.status_code == 200 and bool(answer.json()["data"] == shown)

        await eventually_async(stored, what="the store tells the same")


async def test_a_home_keeps_its_partitions_and_starts_again_with_all_its_poison(
    running: RunningSystem,
) -> None:
    async with person(running) as ada:
        chat_id, told = await ada.ask("What is kept?")
    variables = {**VARIABLES, "TURNLOG_PARTITIONS": "6"}
    assert running.stop()[0] == 0
    running.start(variables)
    assert await asyncio.to_thread(running.ended) == 2
    assert (
        "turnlog: topics: chat.chats.v1 has 12 partitions and the plan says 6: a partition count is "
        "never changed (set TURNLOG_PARTITIONS to what is there)\n"
    ) in running.output()
    assert processes_of(running.home) == []
    running.start(VARIABLES)
    await asyncio.to_thread(running.wait_ready)
    async with person(running) as ada:
        kept = await when_there(ada.http, f"/v1/chats/{chat_id}/messages")
        assert kept["data"][-1]["content"] == told.text
        again = await Reading().read(ada.client.say(chat_id, {"content": "And now?"}))
        assert again.end["status"] == "done"
    counts = (await asyncio.to_thread(audited, running)).counts
    poisoned = PARTITIONS * sum(len(poisons(topic)) for topic in TOPICS)
    assert counts["parked records"] == poisoned + 1  # The large one.
