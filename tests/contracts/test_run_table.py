"""What the table of runs promises: whoever is held is held whole, whatever was forgotten, read back, or came twice."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edge.decisions.viewer import Transcript
from edge.runs import ENDED_AGE_S_MAX, UNDECIDED_AGE_S_MAX, RunTable
from infra.log.records import LogRecord
from schemas.codec import Envelope
from schemas.events.tokens import (
    AttemptStarted,
    PartitionTick,
    RunCancelled,
    RunEnded,
    RunEvent,
    TokensGenerated,
)
from schemas.ids import RANDOM_BYTES, RunAddress, mint_run_id, run_address
from schemas.vocabulary import CancelReason, EndCause, EndWriter
from tests.run_samples import queued

EPOCH = 7


def run_id(number: int, mint_offset: int) -> str:
    address = RunAddress(epoch=EPOCH, partition=0, mint_offset=mint_offset)
    return mint_run_id(
        key=b"k", account_id="a", address=address, random=number.to_bytes(RANDOM_BYTES, "big")
    )


def course(name: str, deltas: int, *, end: str) -> list[RunEvent]:
    """One run's records, in order."""
    events: list[RunEvent] = []
    if end == "cancelled first":
        events.append(RunCancelled(run_id=name, reason=CancelReason.USER))
    events.append(queued(name, assistant_message_id=f"m-{name}"))
    events.append(AttemptStarted(run_id=name, attempt=1, nonce="n", worker_id="w", input_tokens=1))
    events += [
        TokensGenerated(run_id=name, nonce="n", index=index, count=1, text=f"<{index}>")
        for index in range(deltas)
    ]
    if end == "stopped":
        events.append(
            RunEnded(
                run_id=name, cause=EndCause.STOP, writer=EndWriter.WORKER, nonce="n", end=deltas
            )
        )
    return events


def record(offset: int, event: RunEvent | PartitionTick) -> LogRecord:
    envelope = Envelope(event=event, event_id="e", cause_id="", trace="")
    return LogRecord(0, offset, 1_000 + offset, envelope)


def folded(log: Sequence[LogRecord], name: str, upto: int) -> Transcript:
    """What the log says of the run, from its mint offset up to (exclusive) an offset."""
    transcript = Transcript()
    for one in log[run_address(name).mint_offset : upto]:
        if getattr(one.event, "run_id", None) == name:
            transcript.accept(one.offset, one.appended_ms, one.event)  # type: ignore[arg-type]
    return transcript


@st.composite
def logs(draw: st.DrawFn) -> tuple[list[LogRecord], list[str]]:
    """Several runs interleaved in one partition, with replays of old records."""
    log: list[LogRecord] = [record(0, PartitionTick())]
    waiting: list[list[RunEvent]] = []
    names: list[str] = []
    for _ in range(draw(st.integers(1, 60))):
        choice = draw(st.integers(0, 9))
        if choice == 0 or not waiting:
            behind = draw(st.integers(0, min(2, len(log))))
            name = run_id(len(names), len(log) - behind)
            names.append(name)
            end = draw(st.sampled_from(["stopped", "open", "cancelled first"]))
            waiting.append(course(name, draw(st.integers(0, 5)), end=end))
        elif choice == 1:
            log.append(record(len(log), draw(st.sampled_from(log)).event))  # type: ignore[arg-type]
        else:
            events = draw(st.sampled_from(waiting))
            log.append(record(len(log), events.pop(0)))
            if not events:
                waiting.remove(events)
    return log, names


@given(logs(), st.data())
def test_a_held_run_is_what_the_log_says_and_one_above_the_floor_that_is_not_held_has_no_record(
    made: tuple[list[LogRecord], list[str]], data: st.DataObject
) -> None:
    log, names = made
    now = 0.0
    start = data.draw(st.integers(0, len(log)))
    table = RunTable(epoch=EPOCH, starts={0: start}, now=lambda: now)
    loading: dict[str, int] = {}
    at = start
    while at < len(log):
        step = data.draw(st.integers(1, 6))
        table.apply(log[at : at + step])
        at = min(len(log), at + step)
        match data.draw(st.sampled_from(["go on", "forget", "begin a load", "finish a load"])):
            case "forget":
                now += max(ENDED_AGE_S_MAX, UNDECIDED_AGE_S_MAX) + 1
                table.forget_old()
            case "begin a load":
                unknown = [
                    name
                    for name in names
                    if table.get(name) is None
                    and name not in loading
                    and not table.knows(run_address(name))
                ]
                if unknown:
                    name = data.draw(st.sampled_from(unknown))
                    loading[name] = table.begin_load(name)
            case "finish a load" if loading:
                name = data.draw(st.sampled_from(sorted(loading)))
                table.finish_load(name, folded(log, name, loading.pop(name)))
            case _:
                pass
        for name in names:
            wanted = folded(log, name, at)
            held = table.get(name)
            if held is not None:
                assert held.transcript.state == wanted.state
                assert held.transcript.end == wanted.end
            elif table.knows(run_address(name)):
                assert wanted.last_offset < 0


def test_a_forgotten_run_does_not_begin_again_with_a_late_duplicate() -> None:
    now = 0.0
    table = RunTable(epoch=EPOCH, starts={0: 0}, now=lambda: now)
    name = run_id(1, 0)
    events = course(name, 2, end="stopped")
    table.apply([record(offset, event) for offset, event in enumerate(events)])
    assert [run.run_id for run in table.runs_of_chat("c")] == [name]
    assert table.ended_runs("a") == (name,)
    now = ENDED_AGE_S_MAX + 1
    table.forget_old()
    table.apply([record(len(events), events[0])])
    assert table.get(name) is None
    assert table.runs_of_chat("c") == []
    assert not table.knows(run_address(name))


def test_a_run_of_another_epoch_or_partition_is_nobodys() -> None:
    table = RunTable(epoch=EPOCH, starts={0: 0, 1: 0}, now=lambda: 0.0)
    for address in (
        RunAddress(epoch=EPOCH + 1, partition=0, mint_offset=0),
        RunAddress(epoch=EPOCH, partition=1, mint_offset=0),
    ):
        name = mint_run_id(key=b"k", account_id="a", address=address, random=bytes(RANDOM_BYTES))
        table.apply([record(0, course(name, 0, end="open")[0])])
        assert table.get(name) is None
