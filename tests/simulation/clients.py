"""What people do: post messages, post them again on another edge, stop, look, lose the connection, come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from schemas.events.accounts import ContentPolicy, LimitsChanged, TierLimits
from schemas.vocabulary import OnBusy, RefusalReason, Tier
from tests.simulation.viewers import Viewer
from tests.simulation.world import MODEL, World

CHATS_PER_ACCOUNT: Final = 4
INTENTS_MAX: Final = 14
INPUT_TOKENS_MAX: Final = 8
OUTPUT_TOKENS_MAX: Final = 30
SHORT_DEADLINE_MS: Final = 5_000
LONG_DEADLINE_MS: Final = 3_600_000

# Of the words that the engine says some are phrases, and some might be the beginning of one.
BLOCKED_PHRASES: Final = (
    *(f"{word:02x}" for word in range(12)),
    *(f"{word:02x} never" for word in range(32, 96)),
)
ACCOUNTS_OF_SEED: Final = {"ann": Tier.FREE, "bob": Tier.PLUS, "cec": Tier.PLUS}


def limits(version: str, *, scale: int = 1) -> LimitsChanged:
    """Limits so tight that a seed meets them."""

    def tier(
        tokens: int, window: str, runs: int, deadline_ms: int, output: int = OUTPUT_TOKENS_MAX
    ) -> TierLimits:
        return TierLimits(
            tokens_per_window=tokens // scale,
            window="day" if window == "day" else "month",
            open_runs_max=runs,
            models=(MODEL,),
            input_tokens_max=INPUT_TOKENS_MAX,
            output_tokens_max=output,
            run_deadline_ms=deadline_ms,
            queue_wait_ms_max=60_000,
        )

    return LimitsChanged(
        version=version,
        tiers={
            Tier.FREE: tier(45, "day", 1, SHORT_DEADLINE_MS),
            Tier.PLUS: tier(110, "month", 2, LONG_DEADLINE_MS),
        },
        changed_by="simulation",
        content=ContentPolicy(blocked_phrases=BLOCKED_PHRASES),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One POST. `key`: with it the same message may be posted again."""

    account_id: str
    tier: Tier
    chat_id: str
    input_tokens: int
    output_tokens: int | None
    key: str | None
    fingerprint: str
    on_busy: OnBusy
    content: str = "?"
    from_root: bool = False
    """It names its parent: none, so it begins another branch of its chat."""


class _Serving(Protocol):
    """What a viewer needs of an edge."""

    name: str
    paused: bool

    def connect(self, viewer: Viewer) -> None:
        """Ask for what follows the viewer's cursor."""

    def disconnect(self, viewer: Viewer) -> None:
        """Close the connection."""


class Client:
    """Everybody who uses the system."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.viewers: list[Viewer] = []
        self.admitted_runs: list[str] = []
        self.redirects: dict[str, str | None] = {}
        self._runs: list[str] = []
        self._keyed: list[Intent] = []
        self._intents_left = world.rng.randint(4, INTENTS_MAX)
        self._accounts = tuple(ACCOUNTS_OF_SEED.items())

    # Posting

    def next_intent(self) -> Intent | None:
        """Something new, or something that was posted before."""
        world = self.world
        if self._intents_left <= 0 or not world.chance(0.3):
            return None
        self._intents_left -= 1
        if self._keyed and world.chance(0.4):
            again = world.rng.choice(self._keyed)
            return replace(again, fingerprint="another") if world.chance(0.25) else again
        account_id, tier = world.rng.choice(self._accounts)
        intent = Intent(
            account_id=account_id,
            tier=tier,
            chat_id=f"{account_id}-chat-{world.rng.randrange(CHATS_PER_ACCOUNT)}",
            input_tokens=world.rng.randint(1, INPUT_TOKENS_MAX),
            output_tokens=world.rng.choice((None, None, 1, 6, 12)),
            key=world.fresh("key-") if world.chance(0.5) else None,
            fingerprint="one",
            on_busy=world.rng.choice(
                (OnBusy.REJECT, OnBusy.REJECT, OnBusy.ENQUEUE, OnBusy.INTERRUPT)
            ),
            content=world.rng.choice(("?",) * 15 + (BLOCKED_PHRASES[0],)),
            from_root=world.chance(0.25),
        )
        if intent.key is not None:
            self._keyed.append(intent)
            self._intents_left += 1  # To be posted twice is what keys are for.
        return intent

    def submitted(self, intent: Intent, run_id: str) -> None:
        """An edge took it; nothing is answered yet."""
        self._runs.append(run_id)

    def run_to_cancel(self) -> str | None:
        """Any run of late, decided or not."""
        runs = self.admitted_runs if self.world.chance(0.6) else self._runs
        return self.world.rng.choice(runs[-4:]) if runs else None

    def admitted(self, intent: Intent, run_id: str) -> None:
        """200 or 202: from now on this answer may not be lost (I13)."""
        self.admitted_runs.append(run_id)
        for _ in range(self.world.rng.randint(1, 2)):
            self.viewers.append(Viewer(self.world, run_id))

    def refused(self, intent: Intent, run_id: str, reason: RefusalReason) -> None:
        """409, 422, 429 or 503."""
        self.world.sometimes[f"refused {reason.value}"] += 1

    def redirected(self, intent: Intent, run_id: str, to: str | None) -> None:
        """The key is bound: to another run, which the stream goes on with, or (None) 422."""
        self.redirects[run_id] = to
        if to is None:
            self.world.sometimes["conflict"] += 1
        else:
            self.world.sometimes["redirect"] += 1
            self.viewers.append(Viewer(self.world, to))

    # Looking

    def step(self, edges: Sequence[_Serving]) -> bool:
        """A connection breaks, or a viewer without one finds an edge."""
        did = False
        for viewer in self.viewers:
            if viewer.edge is not None:
                edge = next((each for each in edges if each.name == viewer.edge), None)
                if edge is None or self.world.chance(0.0 if self.world.draining else 0.25):
                    if edge is not None:
                        edge.disconnect(viewer)
                    viewer.edge = None
                    did = True
            elif not viewer.over:
                awake = [edge for edge in edges if not edge.paused]
                if awake:
                    before = viewer.position
                    self.world.rng.choice(awake).connect(viewer)
                    did = did or viewer.position != before
        return did
