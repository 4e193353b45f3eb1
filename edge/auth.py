"""Who asks: account, seat and tier come from a signed token and from nowhere else. Operators have tokens of their own kind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import jwt

from edge.decisions.problems import unauthenticated
from schemas.vocabulary import Tier

ALGORITHM: Final = "HS256"
AUDIENCE: Final = "turnlog-edge"
ADMIN_AUDIENCE: Final = "turnlog-admin"
"""Neither kind of token opens what the other does."""
ISSUER: Final = "turnlog"
TOKEN_CHARS_MAX: Final = 4_096
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:-]{0,63}")
"""What an account or a seat may be called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The account that a request is made for."""

    account_id: str
    seat_id: str | None
    tier: Tier


def mint_token(
    *, key: bytes, account_id: str, tier: Tier, seat_id: str | None = None, ttl: timedelta
) -> str:
    """A signed token for this account. Raises ValueError for a name that no account can have."""
    for name in (account_id, seat_id):
        if name is not None and NAME_PATTERN.fullmatch(name) is None:
            raise ValueError("a name has 1 to 64 of the characters A-Z a-z 0-9 _ . @ : -")
    now = datetime.now(UTC)
    claims: dict[str, object] = {
        "account": account_id,
        "tier": tier.value,
        "iss": ISSUER,
        "aud": AUDIENCE,
        "iat": now,
        "exp": now + ttl,
    }
    if seat_id is not None:
        claims["seat"] = seat_id
    return jwt.encode(claims, key, algorithm=ALGORITHM)


def mint_admin_token(*, key: bytes, name: str, ttl: timedelta) -> str:
    """A signed token for the operator of this name. Raises ValueError for a name that nobody can have."""
    if NAME_PATTERN.fullmatch(name) is None:
        raise ValueError("a name has 1 to 64 of the characters A-Z a-z 0-9 _ . @ : -")
    now = datetime.now(UTC)
    claims = {"admin": name, "iss": ISSUER, "aud": ADMIN_AUDIENCE, "iat": now, "exp": now + ttl}
    return jwt.encode(claims, key, algorithm=ALGORITHM)


def authenticate_admin(header: str | None, *, key: bytes) -> str:
    """The operator's name behind an Authorization header. Raises Refused (401)."""
    name = _claims(header, key=key, audience=ADMIN_AUDIENCE, required=("admin",))["admin"]
    if not _is_name(name):
        raise unauthenticated("The token is not valid.", code="invalid_token")
    return str(name)


def authenticate(header: str | None, *, key: bytes) -> Caller:
    """The caller behind an Authorization header. Raises Refused (401)."""
    claims = _claims(header, key=key, audience=AUDIENCE, required=("account", "tier"))
    account, seat, tier = claims["account"], claims.get("seat"), claims["tier"]
    if not _is_name(account) or not (seat is None or _is_name(seat)) or tier not in set(Tier):
        raise unauthenticated("The token is not valid.", code="invalid_token")
    return Caller(account_id=account, seat_id=seat, tier=Tier(tier))


def _claims(
    header: str | None, *, key: bytes, audience: str, required: tuple[str, ...]
) -> dict[str, Any]:
    if header is None:
        raise unauthenticated("Authorization: Bearer <token> is missing.", code="missing_token")
    scheme, _, token = header.strip().partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token or len(token) > TOKEN_CHARS_MAX:
        raise unauthenticated("Authorization must be: Bearer <token>.", code="invalid_token")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key,
            algorithms=[ALGORITHM],
            audience=audience,
            issuer=ISSUER,
            options={"require": ["exp", "aud", "iss", *required]},
        )
    except jwt.ExpiredSignatureError:
        raise unauthenticated("The token has expired.", code="expired_token") from None
    except jwt.PyJWTError:
        raise unauthenticated("The token is not valid.", code="invalid_token") from None
    return claims


def _is_name(value: object) -> bool:
    return isinstance(value, str) and NAME_PATTERN.fullmatch(value) is not None
