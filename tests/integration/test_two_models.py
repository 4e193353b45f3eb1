"""Two real models in one system: each has its own queues and workers, and a chat may use both."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.models import ModelFileMissingError, model_spec
from infra.policies import PACKAGED
from tests.integration.audit import audited
from tests.integration.conftest import SystemFactory
from tests.integration.people import Reading, person

LARGER = "gemma3-270m"


def _installed() -> bool:
    try:
        model_spec(LARGER).path()
    except ModelFileMissingError:
        return False
    return True


@pytest.mark.skipif(
    not _installed(), reason=f"{LARGER} is not installed: make setup-models (253 MB)"
)
async def test_a_chat_is_answered_by_either_model_as_the_message_asks(
    system: SystemFactory, tmp_path: Path
) -> None:
    both = f'models = ["smollm2-135m", "{LARGER}"]'
    policies = tmp_path / "policies.toml"
    policies.write_text(PACKAGED.read_text().replace('models = ["smollm2-135m"]', both))
    running = system(
        {
            "TURNLOG_ENGINE": "llama",
            "TURNLOG_MODELS": f"smollm2-135m,{LARGER}",
            "TURNLOG_POLICIES": str(policies),
        }
    )
    async with person(running) as ada:
        chat_id = await ada.new_chat()
        for model in (LARGER, "smollm2-135m", LARGER):
            asked = {
                "content": "What is the capital of Italy?",
                "model": model,
                "temperature": 0,
                "max_output_tokens": 24,
            }
            reading = await Reading().read(ada.client.say(chat_id, asked))
            assert reading.end["finish_reason"] in ("stop", "length")
            assert reading.frames[0].data["model"] == model
            assert reading.text.strip()
            assert "Question:" not in reading.text
        stored = await ada.messages(chat_id)
        assert [m["role"] for m in stored] == ["user", "assistant"] * 3
    assert audited(running).runs == 3
