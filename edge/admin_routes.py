"""What operators may do over HTTP: read the limits, and change them. Their tokens are of a kind of their own."""

from __future__ import annotations

import secrets
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from edge.answers import json_answer
from edge.auth import authenticate_admin
from edge.bodies import read_body
from edge.decisions.problems import unavailable, unprocessable
from edge.state import state_of
from infra.models import MODELS
from infra.policies import POLICY_BYTES_MAX, parse_policies, policy_text
from infra.policy_checks import PolicyError
from producers.log_writer import Appended, AppendFailed, RecordTooLarge
from schemas.events.accounts import LimitsChanged
from schemas.topics import ACCOUNTS, POLICY_ORDER_PARTITION

APPEND_WAIT_MS_MAX: Final = 5_000
TOML: Final = "application/toml"


async def read_policy(request: Request) -> Response:
    """GET /v1/admin/policy: the limits that hold, as JSON, or as a policy file where TOML is asked for."""
    edge = state_of(request)
    authenticate_admin(request.headers.get("authorization"), key=edge.secrets.token_key)
    limits = edge.accounts.limits
    if limits is None:
        raise unavailable("The limits are not known yet.", code="limits_unknown")
    if TOML in request.headers.get("accept", ""):
        return PlainTextResponse(
            policy_text(limits), media_type=TOML, headers={"cache-control": "no-store"}
        )
    return json_answer(msgspec.to_builtins(limits, str_keys=True))


async def change_policy(request: Request) -> Response:
    """PUT /v1/admin/policy with a policy file: the limits from now on. Twice the same changes nothing more."""
    edge = state_of(request)
    name = authenticate_admin(request.headers.get("authorization"), key=edge.secrets.token_key)
    raw = await read_body(request, POLICY_BYTES_MAX)
    windows = {model: spec.context_window for model, spec in MODELS.items()}
    try:
        limits = parse_policies(raw, source="policy", models=windows, changed_by=name)
    except PolicyError as error:
        raise unprocessable(str(error), param=None, code="invalid_policy") from None
    edge.refuse_when_full()
    partitions = await edge.appends.partitions_of(ACCOUNTS)
    others = (each for each in range(partitions) if each != POLICY_ORDER_PARTITION)
    for written, partition in enumerate((POLICY_ORDER_PARTITION, *others)):
        try:
            appended = await _append(request, limits, partition)
        except (AppendFailed, RecordTooLarge):
            raise unavailable(
                f"The policy was written to {written} of {partitions} partitions; send it again.",
                code="log_unavailable",
            ) from None
        if partition == POLICY_ORDER_PARTITION:
            limits = msgspec.structs.replace(limits, order=appended.offset)
    return json_answer(
        {"version": limits.version, "changed_by": limits.changed_by, "partitions": partitions}
    )


async def _append(request: Request, limits: LimitsChanged, partition: int) -> Appended:
    return await state_of(request).appends.append(
        ACCOUNTS,
        limits,
        event_id=secrets.token_hex(16),
        wait_ms_max=APPEND_WAIT_MS_MAX,
        partition=partition,
    )
