"""The embedded broker: what it keeps through kill -9, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition  # noqa: TID251 - no part of ours
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

from infra.embedded.jars import KAFKA_LOCK, JarError, fetch_jars, read_lock
from infra.embedded.kafka import BrokerError, prepare_broker, wait_until_serving
from producers.log_writer import AppendFailed, LogWriter
from schemas.events.chats import ChatCreated
from schemas.topics import CHATS
from tests.integration.running import RunningBroker, free_ports
from tests.integration.waiting import PATIENCE_S

RECORDS = 5_000
KILL_AFTER = 1_500


async def test_a_broker_killed_in_mid_stream_comes_back_with_all_that_it_acknowledged(
    own_broker: RunningBroker,
) -> None:
    await _make_topic(own_broker.bootstrap)
    producer = AIOKafkaProducer(
        bootstrap_servers=own_broker.bootstrap,
        enable_idempotence=True,
        linger_ms=0,
        # It holds on to what it has for so long, and the broker is away meanwhile.
        request_timeout_ms=int(2_000 * PATIENCE_S),
    )
    await producer.start()
    pending: list[asyncio.Future[object]] = []
    try:
        for number in range(RECORDS):
            pending.append(await producer.send("kept", b"%d" % number, partition=0))
            if number == KILL_AFTER:
                await pending[number // 2]
                own_broker.stop(signal.SIGKILL)
                own_broker.launch()
        await asyncio.wait_for(asyncio.gather(*pending), 2 * PATIENCE_S)
    finally:
        await producer.stop()
    assert await _read(own_broker.bootstrap, RECORDS) == [b"%d" % i for i in range(RECORDS)]


async def test_a_stopped_broker_starts_again_on_its_data(own_broker: RunningBroker) -> None:
    await _make_topic(own_broker.bootstrap)
    producer = AIOKafkaProducer(bootstrap_servers=own_broker.bootstrap)
    await producer.start()
    await producer.send_and_wait("kept", b"before", partition=0)
    await producer.stop()
    own_broker.stop(signal.SIGTERM)
    own_broker.launch()
    await wait_until_serving(own_broker.bootstrap, deadline_s=PATIENCE_S)
    assert await _read(own_broker.bootstrap, 1) == [b"before"]


def test_a_taken_port_is_named_with_its_variable(tmp_path: Path) -> None:
    running = RunningBroker(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", running.plan.port))
        other.listen()
        with pytest.raises(BrokerError) as caught:
            prepare_broker(running.plan, progress=print)
    assert str(caught.value) == (
        f"port {running.plan.port} is in use (Address already in use); "
        "set TURNLOG_KAFKA_PORT to a free one"
    )


def test_a_format_that_was_interrupted_is_made_anew(tmp_path: Path) -> None:
    running = RunningBroker(tmp_path)
    half = running.plan.data / "log.new-0000"
    half.mkdir(parents=True)
    (half / "meta.properties").write_text("version=1\n")
    prepare_broker(running.plan, progress=print)
    assert "cluster.id" in (running.plan.data / "log" / "meta.properties").read_text()


def test_a_jar_that_is_not_the_locked_one_stops_the_start(
    tmp_path: Path, own_broker: RunningBroker
) -> None:
    folder = tmp_path / "jars"
    shutil.copytree(own_broker.plan.jars, folder)
    jar = read_lock(KAFKA_LOCK)[0]
    with (folder / jar.filename).open("ab") as file:
        file.write(b"!")
    port, controller_port = free_ports(2)
    plan = replace(own_broker.plan, jars=folder, port=port, controller_port=controller_port)
    with pytest.raises(JarError) as caught:
        prepare_broker(plan, progress=print)
    assert f"{jar.filename} is not the {jar} of the lock" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_network_is_one_clear_line_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("no_proxy", "")
    jar = read_lock(KAFKA_LOCK)[0]
    with pytest.raises(JarError) as caught:
        fetch_jars([jar], tmp_path / "jars", progress=print)
    assert str(caught.value) == (
        f"could not download {jar} in 3 tries (ProxyError); is there a network?"
    )
    assert list(tmp_path.rglob("*")) == [tmp_path / "jars"]


def test_a_broker_that_does_not_come_is_a_time_out_that_names_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with pytest.raises(TimeoutError, match=f"no Kafka broker answers at 127.0.0.1:{port}"):
        asyncio.run(wait_until_serving(f"127.0.0.1:{port}", deadline_s=0.3))


def test_a_fetched_jar_is_not_fetched_again(tmp_path: Path, broker: RunningBroker) -> None:
    lines: list[str] = []
    fetch_jars(read_lock(KAFKA_LOCK), broker.plan.jars, progress=lines.append)
    assert lines == []


async def test_an_append_to_a_topic_that_the_broker_does_not_name_has_failed(
    broker: RunningBroker,
) -> None:
    """So it is too where the broker is too busy to name its topics: nobody gets an error that he does not expect."""
    nowhere = replace(CHATS, name="nowhere")
    async with LogWriter(bootstrap=broker.bootstrap, client_id="test") as writer:
        with pytest.raises(AppendFailed, match="nowhere"):
            await writer.append(nowhere, ChatCreated(chat_id="c", account_id="a"), event_id="e")


async def _make_topic(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.create_topics([NewTopic("kept", num_partitions=1, replication_factor=1)])
    finally:
        await admin.close()


async def _read(bootstrap: str, count: int) -> list[bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    values: list[bytes] = []
    try:
        consumer.assign([TopicPartition("kept", 0)])
        await consumer.seek_to_beginning()
        async with asyncio.timeout(PATIENCE_S):
            while len(values) < count:
                for records in (await consumer.getmany(timeout_ms=200)).values():
                    values.extend(record.value for record in records)
        # Nothing beyond: an idempotent producer left no record twice.
        partition = TopicPartition("kept", 0)
        assert await consumer.end_offsets([partition]) == {partition: count}
    finally:
        await consumer.stop()
    return values
