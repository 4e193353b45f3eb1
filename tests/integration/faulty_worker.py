"""The worker process with a scripted engine that fails: `python -m tests.integration.faulty_worker '{"die_after_tokens": 5}'`.

The argument holds fields of ScriptedFaults and of ScriptedSettings; the environment is that of a worker.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import fields

from inference_workers.decisions.script import Script
from inference_workers.engine_scripted import ScriptedEngine, ScriptedFaults, ScriptedSettings
from inference_workers.worker import Worker, WorkerSettings
from infra.process import start_logging, stop_requested
from infra.settings import read_settings_or_exit


async def _serve(settings: WorkerSettings, given: dict[str, object]) -> None:
    known = {field.name for field in fields(ScriptedFaults)}
    faults = {name: value for name, value in given.items() if name in known}
    rest = {name: value for name, value in given.items() if name not in known}
    if "script" in rest:
        rest["script"] = Script(str(rest["script"]))
    chosen: dict[str, object] = {
        "slots": settings.scripted_slots,
        "tokens_per_answer": settings.scripted_tokens,
        "token_delay_s": settings.scripted_delay_ms / 1000,
        "faults": ScriptedFaults(**faults),  # type: ignore[arg-type]
        **rest,
    }
    engine = ScriptedEngine(ScriptedSettings(**chosen))  # type: ignore[arg-type]
    await Worker(settings, engine=engine, epoch=1).serve(stop_requested())


if __name__ == "__main__":
    read = read_settings_or_exit(WorkerSettings)
    start_logging("faulty-worker", read.log)
    asyncio.run(_serve(read, json.loads(sys.argv[1])))
