"""`turnlog verify` and `turnlog tail` over a whole system that has really run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from edge.auth import mint_token
from infra.command.edge_client import EdgeClient
from infra.secrets import load_secrets
from producers.log_writer import LogWriter
from schemas.events.usage import UsageSettled
from schemas.topics import USAGE
from schemas.vocabulary import FinishReason, Tier
from tests.integration.conftest import SystemFactory
from tests.integration.processes import turnlog
from tests.integration.running import RunningSystem

ACCOUNT = "acc-verify"
# An answer of more than a minute: whoever cancels it may take his time.
LONG = 1_000
DELAY_MS = 100
# Lateness is no loss.
PATIENT = ("--settle-s", "100", "--grace-s", "60")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnlog:
    """The command against one system."""

    variables: Mapping[str, str]

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return turnlog(*words, variables=self.variables)


async def answered(running: RunningSystem, count: int) -> list[str]:
    """The runs of some prompts, each in a chat of its own; the last one is cancelled in mid-answer."""
    token = mint_token(
        key=load_secrets(running.home).token_key,
        account_id=ACCOUNT,
        tier=Tier.TEAM,
        ttl=timedelta(hours=1),
    )
    runs = []
    async with EdgeClient(url=running.url, token=token) as client:
        for number in range(count):
            chat = await client.call("POST", "/v1/chats", {})
            run_id = ""
            last = number == count - 1
            body = {"content": f"question {number}", "max_output_tokens": LONG if last else 20}
            cancelled = False
            async for event in client.say(chat["id"], body):
                run_id = event.data.get("run_id", run_id)
                if last and event.name == "message.delta" and not cancelled:
                    cancelled = True  # Deltas that were on their way may follow.
                    path = f"/v1/chats/{chat['id']}/runs/{run_id}/cancel"
                    await client.call("POST", path)
            runs.append(run_id)
    return runs


async def test_a_system_that_has_run_is_clean_until_somebody_tampers_with_a_topic(
    system: SystemFactory,
) -> None:
    running = system(
        {"TURNLOG_SCRIPTED_DELAY_MS": f"{DELAY_MS}", "TURNLOG_SCRIPTED_TOKENS": f"{LONG}"}
    )
    kafka = running.bootstrap
    command = Turnlog(variables={"TURNLOG_HOME": str(running.home), "TURNLOG_KAFKA": kafka})
    runs = await answered(running, 4)

    clean = command("verify", *PATIENT)
    assert clean.returncode == 0, clean.stdout + clean.stderr
    counts = dict(line.rsplit(None, 1) for line in clean.stdout.splitlines()[:-1])
    assert counts["prompts"] == counts["runs"] == counts["finished runs"] == "4"
    assert counts["cancels"] == "1"
    assert counts["open runs"] == counts["open reservations"] == "0"

    told = command("tail", runs[0])
    assert told.returncode == 0, told.stderr
    assert "RunQueued" in told.stdout
    assert "ends the run: length" in told.stdout
    assert "question" not in told.stdout
    ended = command("tail", runs[-1], "--text")
    assert "ends the run: cancelled" in ended.stdout

    async with LogWriter(bootstrap=kafka, client_id="test") as writer:
        await writer.append(
            USAGE,
            UsageSettled(
                run_id=runs[1],
                account_id=ACCOUNT,
                chat_id="chat",
                tier=Tier.TEAM,
                model="smollm2-135m",
                window="2001-01",
                input_tokens=1,
                output_tokens=1,
                finish_reason=FinishReason.STOP,
            ),
            event_id="forged",
        )
    forged = command("verify")
    assert forged.returncode == 1, forged.stdout + forged.stderr
    assert f"VIOLATED: I5 {runs[1]}: 2 settlements" in forged.stdout


def test_tail_and_verify_say_in_one_line_what_is_wrong() -> None:
    nobody = Turnlog(variables={"TURNLOG_KAFKA": "127.0.0.1:1"})
    for words, code in ((("tail", "run_x"), 2), (("verify", "--settle-s", "0"), 2)):
        found = nobody(*words)
        assert found.returncode == code
        assert found.stderr.strip().splitlines()[-1].startswith("turnlog: ")
        assert "Traceback" not in found.stderr
