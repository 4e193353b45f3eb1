"""Who sends what, when: arrivals of a pattern, drawn from a seed.

Lengths: a prompt with its history has a log-normal length of 1,500 tokens on average, an answer one of about 500; two in a thousand
paid ones are long, up to 30,000. Nobody knows an answer's length beforehand; who asks for a long one allows it 32,000.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from typing import Final

from infra.capacity.scenario import LARGE, OUTPUT_TOKENS_PAID, SMALL, Scenario
from schemas.vocabulary import OnBusy, ServiceTier, Tier

ACCOUNT_EVERY_S: Final = 20.0
"""How often an account of the free and plus tiers sends, on average."""
HEAVY_SHARE: Final = 0.7
"""Of what teams send; a few of them send it, and want more than they get. Half of them want long answers (LONGER times the usual), the
others send short prompts (SHORTER of the usual), so that a turn is not the same as a share, and SHORTER_OFTENER times as many, so that all
want about as many tokens: who wants less than an equal part gets all of it, and there is nothing to compare."""
LONGER: Final = 4
SHORTER: Final = 0.3
SHORTER_OFTENER: Final = 3
SMALL_TEAMS: Final = 2_000
TEAM_SEATS: Final = 5_000
POOR_EVERY: Final = 20
CHATS_AN_ACCOUNT: Final = 3
LARGE_SHARE: Final = 0.5
"""Of paid prompts."""
LONG_SHARE: Final = 0.002
LONG_TOKENS: Final = (8_000, 30_000)
CANCEL_SHARE: Final = 0.03
CANCEL_AFTER_MS: Final = 5_000.0
INTERRUPT_SHARE: Final = 0.03
ENQUEUE_SHARE: Final = 0.03
KEYED_SHARE: Final = 0.01
"""Of prompts carry an idempotency key, and come twice."""
BEYOND_SHARE: Final = 0.001
"""Of free prompts name the model that the tier may not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A message that somebody sends. `context` are the tokens of the whole prompt, `output` those that the answer would have."""

    number: int
    account_id: str
    tier: Tier
    seat_id: str | None
    chat_id: str
    model: str | None
    needed: int
    context: int
    output: int
    asked: int
    on_busy: OnBusy
    key: str | None
    service_tier: ServiceTier
    cancel_after_ms: float | None
    draws: tuple[int, int, bytes]


class People:
    """The arrivals of a scenario, in order: call `next_ms`, then `ask`."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = Random(f"people {scenario.seed}")
        self._accounts = max(1_000, round(scenario.prompts_per_s * ACCOUNT_EVERY_S))
        self._number = 0

    def poor(self) -> list[tuple[str, Tier]]:
        """Accounts that have used nearly all of their quota before: one of POOR_EVERY."""
        free = [(f"free-{n}", Tier.FREE) for n in range(0, self._accounts, POOR_EVERY)]
        return free + [(f"plus-{n}", Tier.PLUS) for n in range(0, self._accounts // 3, POOR_EVERY)]

    def again(self, ask: Ask) -> Ask:
        """The same message, sent again with its key."""
        return replace(ask, draws=(*ask.draws[:2], self._random.randbytes(10)))

    def rate(self, at_ms: float) -> float:
        """Prompts per second."""
        at = at_ms / self._scenario.end_ms
        rates = self._scenario.pattern.rates
        for before, after in pairwise(rates):
            if at <= after.at:
                part = (at - before.at) / (after.at - before.at)
                share = before.share + part * (after.share - before.share)
                return share * self._scenario.prompts_per_s
        return rates[-1].share * self._scenario.prompts_per_s

    def next_ms(self, now_ms: float) -> float:
        """When the next one comes."""
        return now_ms + 1000 * self._random.expovariate(1.0) / max(1e-3, self.rate(now_ms))

    def ask(self) -> Ask:
        """What it is."""
        random = self._random
        self._number += 1
        pattern, which = self._scenario.pattern, random.random()
        team = -1
        seat: str | None = None
        if which < pattern.abuser_share:
            account, tier = "abuser", Tier.PLUS
            chat = f"{account}-{random.randrange(10_000)}"
        elif which < pattern.abuser_share + pattern.team_share:
            account, tier = "everybody", Tier.TEAM
            seat = f"seat-{random.randrange(TEAM_SEATS)}"
            chat = f"{account}-{seat}-{random.randrange(CHATS_AN_ACCOUNT)}"
        else:
            which = random.random()
            if which < pattern.free_share:
                account, tier = f"free-{random.randrange(self._accounts)}", Tier.FREE
            elif which < pattern.free_share + pattern.plus_share:
                account, tier = f"plus-{random.randrange(self._accounts // 3)}", Tier.PLUS
            else:
                account, tier, seat, team = self._team()
            whose = f"{account}-{seat}" if seat else account
            chat = f"{whose}-{random.randrange(CHATS_AN_ACCOUNT if not seat else 40)}"
        return self._asked(account, tier, seat, chat, team=team)

    def _team(self) -> tuple[str, Tier, str, int]:
        random = self._random
        if random.random() < HEAVY_SHARE:
            pair = random.randrange(self._scenario.heavy_teams // 2)
            team = 2 * pair + (random.random() < SHORTER_OFTENER / (1 + SHORTER_OFTENER))
            name = f"team-{team}"
        else:
            team = -1
            name = f"small-team-{random.randrange(SMALL_TEAMS)}"
        seat = f"seat-{random.randrange(400 if team >= 0 else 20)}"
        return name, Tier.TEAM, seat, team

    def _asked(self, account: str, tier: Tier, seat: str | None, chat: str, *, team: int) -> Ask:
        random = self._random
        needed = max(4, round(random.lognormvariate(math.log(60), 1.0)))
        context = needed + round(random.lognormvariate(math.log(1_000), 0.9))
        output = max(1, round(random.lognormvariate(math.log(330), 0.9)))
        asked = random.choices((1_024, 2_048, 4_096), (50, 30, 20))[0]
        if team >= 0 and team % 2 == 0:
            output *= LONGER
        elif team >= 0:
            context = needed + round(SHORTER * (context - needed))
        if tier is not Tier.FREE and random.random() < LONG_SHARE:
            output, asked = random.randint(*LONG_TOKENS), OUTPUT_TOKENS_PAID
        which = random.random()
        on_busy = OnBusy.REJECT
        if which < INTERRUPT_SHARE:
            on_busy = OnBusy.INTERRUPT
        elif which < INTERRUPT_SHARE + ENQUEUE_SHARE:
            on_busy = OnBusy.ENQUEUE
        cancels = random.random() < CANCEL_SHARE
        large = random.random() < (BEYOND_SHARE if tier is Tier.FREE else LARGE_SHARE)
        return Ask(
            number=self._number,
            account_id=account,
            tier=tier,
            seat_id=seat,
            chat_id=chat,
            model=LARGE if large else None,
            needed=needed,
            context=context,
            output=output,
            asked=asked,
            on_busy=on_busy,
            service_tier=self._service_tier(),
            key=f"key-{self._number}" if random.random() < KEYED_SHARE else None,
            cancel_after_ms=random.expovariate(1 / CANCEL_AFTER_MS) if cancels else None,
            draws=(random.getrandbits(30), random.getrandbits(30), random.randbytes(10)),
        )

    def _service_tier(self) -> ServiceTier:
        every = self._scenario.pattern.flex_every
        return ServiceTier.FLEX if every and self._number % every == 0 else ServiceTier.DEFAULT


def prompt_tokens(ask: Ask) -> dict[str, int]:
    """As an edge counts it: of the model that is named and of what may stand in for it, else of all models of the tier."""
    if ask.model:
        return {LARGE: ask.needed, SMALL: ask.needed}
    return {SMALL: ask.needed} if ask.tier is Tier.FREE else {SMALL: ask.needed, LARGE: ask.needed}
