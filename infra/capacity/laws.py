"""The laws of rationing, judged by what was measured: each with its figure, its bound, and whether it held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from edge.decisions.load_view import wait_error
from edge.decisions.refusals import FLOOD
from infra.capacity.figures import Waited
from infra.capacity.scenario import Scenario
from infra.capacity.simulation import Outcome
from schemas.lane_shares import floors_of
from schemas.vocabulary import Lane, RefusalReason, Tier

FLOOR_SLACK_POINTS: Final = 2.0
JAIN_MIN: Final = 0.95
JAIN_EQUAL_MIN: Final = 20
"""Accounts are compared where their requests vary as little as so many equal ones each: fewer are below JAIN_MIN by chance, and one very
long answer may be most of what an account got."""
JAIN_WORKER_MIN: Final = 8
"""And so many, times the root of the number of workers: at each worker an account may be ahead or behind by one request (K5), which evens
out between many."""
WAIT_ERROR_MAX: Final = 0.25
REFUSAL_MS_MAX: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """`held` is None where the scenario gave no occasion to judge it; `says` then tells why."""

    name: str
    figure: str
    bound: str
    held: bool | None
    says: str = ""


def judge(outcome: Outcome) -> list[Law]:
    """Every law, in the order in which people ask for them."""
    return [
        *_floor(outcome),
        _fairness(outcome),
        *_queues(outcome),
        _background(outcome),
        _estimates(outcome),
        _refusals(outcome),
        *_books(outcome),
    ]


def failed(laws: Iterable[Law]) -> list[Law]:
    """Those that did not hold."""
    return [law for law in laws if law.held is False]


def measured_seconds(scenario: Scenario) -> range:
    """After the warm-up, while prompts come."""
    return range(-int(-scenario.warm_up_ms // 1000), scenario.seconds)


def floor_share(outcome: Outcome) -> float | None:
    """Of the tokens that workers started while the free lane waited there, those of the free lane, in percent."""
    seconds = [outcome.figures.seconds[n] for n in measured_seconds(outcome.scenario)]
    contested = sum(second.contested_tokens for second in seconds)
    if not contested:
        return None
    return 100 * sum(second.floor_tokens for second in seconds) / contested


def _floor(outcome: Outcome) -> list[Law]:
    floor = 100 * floors_of(outcome.scenario.policy.lanes).get(Lane.FREE, 0.0)
    return [
        _floor_law(
            "Free floor, at the workers: part of the tokens started while the free lane waited",
            floor_share(outcome),
            floor=floor,
            unjudged="the free lane never waited",
        ),
        _floor_law(
            "Free floor, in the whole: part of the small model's tokens while free prompts were refused for load",
            free_share(outcome),
            floor=floor,
            unjudged="no free prompt was refused for load",
        ),
    ]


def _floor_law(name: str, share: float | None, *, floor: float, unjudged: str) -> Law:
    least = floor - FLOOR_SLACK_POINTS
    return Law(
        name=name,
        figure="–" if share is None else f"{share:.1f} %",
        bound=f"≥ {least:g} % (floor {floor:g} %)",
        held=None if share is None else share >= least,
        says=unjudged if share is None else "",
    )


def free_share(outcome: Outcome) -> float | None:
    """Of all tokens of the models that the free tier may use, in seconds in which it was refused for load: its own, in percent."""
    scenario, figures = outcome.scenario, outcome.figures
    models = scenario.policy.tiers[Tier.FREE].models
    free = every = 0
    for number in measured_seconds(scenario):
        second = figures.seconds[number]
        if not any(
            tier is Tier.FREE and name.startswith("overloaded") for tier, name in second.refused
        ):
            continue
        for (model, lane), tokens in second.started_tokens.items():
            if model in models:
                every += tokens
                free += tokens if lane is Lane.FREE else 0
    return 100 * free / every if every else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """Of one lane of one model: the accounts that always had a backlog there, and the index of their tokens. None: too few to say.

    `equal_each`: their requests vary as so many of one size would.
    """

    group: tuple[str, Lane]
    accounts: int
    requests_each: float
    equal_each: float
    jain: float | None


def fairness(outcome: Outcome) -> list[Fairness]:
    """Of each lane where anybody always waited."""
    found = []
    figures = outcome.figures
    for group, always in sorted(figures.always_waiting.items()):
        tokens = [figures.account_tokens[group][account] for account in sorted(always)]
        if len(tokens) < 2:
            continue
        enough = max(JAIN_EQUAL_MIN, JAIN_WORKER_MIN * (outcome.scenario.workers / 2) ** 0.5)
        requests = sum(figures.account_requests[group][account] for account in always)
        squares = sum(figures.account_squares[group][account] for account in always)
        each = sum(tokens) ** 2 / max(1, squares) / len(tokens)
        found.append(
            Fairness(
                group=group,
                accounts=len(tokens),
                requests_each=requests / len(tokens),
                equal_each=each,
                jain=jain(tokens) if each >= enough else None,
            )
        )
    return found


def jain(parts: Sequence[float]) -> float:
    """1: all are equal; 1/n: one has everything."""
    squares = sum(part * part for part in parts)
    return sum(parts) ** 2 / (len(parts) * squares) if squares else 1.0


def _fairness(outcome: Outcome) -> Law:
    judged = [each for each in fairness(outcome) if each.jain is not None]
    worst = min(judged, key=lambda each: each.jain or 0.0, default=None)
    name = "Fairness inside a lane: Jain index of the tokens of accounts with a backlog all the time, the worst lane"
    if worst is None or worst.jain is None:
        says = "no lane had two accounts with a backlog all the time that got enough requests to compare"
        return Law(name=name, figure="–", bound=f"≥ {JAIN_MIN}", held=None, says=says)
    model, lane = worst.group
    return Law(
        name=name,
        figure=f"{worst.jain:.3f}",
        bound=f"≥ {JAIN_MIN}",
        held=worst.jain >= JAIN_MIN,
        says=f"{model}, {lane.value}: {worst.accounts} accounts, about {worst.requests_each:.0f} requests each",
    )


def _queues(outcome: Outcome) -> list[Law]:
    found = []
    figures, lanes = outcome.figures, outcome.scenario.policy.lanes
    # Nobody knows a request's prompt with its history before it is assembled, so the last one may go beyond.
    request = max(
        tier.input_tokens_max + tier.output_tokens_max
        for tier in outcome.scenario.policy.tiers.values()
    )
    for what, slack, most, bounds in (
        (
            "requests",
            0,
            figures.most_queued,
            {lane: share.queued_requests_max for lane, share in lanes.items()},
        ),
        (
            "tokens",
            request,
            figures.most_queued_tokens,
            {lane: share.queued_tokens_max for lane, share in lanes.items()},
        ),
    ):
        worst, part = None, -1.0
        for (model, lane), queued in sorted(most.items()):
            bound = bounds.get(lane)
            if bound and queued / bound > part:
                worst, part = (model, lane, queued, bound), queued / bound
        if worst is not None:
            model, lane, queued, bound = worst
            found.append(
                Law(
                    name=f"Queues are bounded: the most {what} that ever waited in a lane, against its bound",
                    figure=f"{queued:,} ({100 * part:.0f} %)",
                    bound=f"≤ {bound:,}" + (" and one request" if slack else ""),
                    held=queued <= bound + slack,
                    says=f"{model}, {lane.value}",
                )
            )
    return found


def _background(outcome: Outcome) -> Law:
    """A takeover goes first of all and is none of them (K2, K4)."""
    figures = outcome.figures
    none = not figures.background_started
    return Law(
        name="Background work goes last: its requests that were started while another lane waited at their worker",
        figure="–" if none else f"{figures.background_before_others:,}",
        bound="0",
        held=None if none else not figures.background_before_others,
        says="none was started" if none else f"{figures.background_started:,} started",
    )


def audited(outcome: Outcome) -> list[Waited]:
    """Runs queued after the warm-up, early enough that their wait does not end only because nobody sends any more."""
    scenario = outcome.scenario
    longest = max(tier.queue_wait_ms_max for tier in scenario.policy.tiers.values())
    until = max(scenario.end_ms - longest, (scenario.warm_up_ms + scenario.end_ms) / 2)
    return [w for w in outcome.figures.waits if scenario.warm_up_ms <= w.queued_ms < until]


def _estimates(outcome: Outcome) -> Law:
    errors = [
        wait_error(estimated_ms=wait.told_ms, waited_ms=round(wait.waited_ms))
        for wait in audited(outcome)
    ]
    name = (
        "Honest waits: median error of the wait that was told, relative to the wait (1 s at least)"
    )
    if not errors:
        says = "nobody was queued in the time that is measured"
        return Law(name=name, figure="–", bound=f"< {WAIT_ERROR_MAX:.0%}", held=None, says=says)
    middle = median(errors)
    return Law(
        name=name,
        figure=f"{middle:.1%}",
        bound=f"< {WAIT_ERROR_MAX:.0%}",
        held=middle < WAIT_ERROR_MAX,
        says=f"{len(errors):,} runs",
    )


def _refusals(outcome: Outcome) -> Law:
    """Faults take an admission process away for seconds: then the law is about the others."""
    name = "Quick answers: p99 from the prompt's arrival to the decision at its edge"
    found = sorted(outcome.figures.decision_ms)
    if not found:
        return Law(name=name, figure="–", bound="", held=None, says="nothing was decided")
    p99 = found[int(0.99 * (len(found) - 1))]
    away = "redelivery" in outcome.scenario.faults
    at_once = outcome.figures.sometimes[f"refused: {RefusalReason.RATE_LIMITED.value} ({FLOOD})"]
    says = f"{at_once:,} others were refused at their edge, before the log" if at_once else ""
    return Law(
        name=name,
        figure=f"{p99:.0f} ms",
        bound=f"≤ {REFUSAL_MS_MAX:.0f} ms",
        held=None if away else p99 <= REFUSAL_MS_MAX,
        says="admission processes were killed" if away else says,
    )


def _books(outcome: Outcome) -> list[Law]:
    laws = (
        ("I1", "Each admitted run ends, once"),
        ("I5", "One settlement a run, of what was said; never more than was reserved"),
        ("I6", "Reserved is what open runs hold; at rest nothing is open"),
        ("I7", "Settled and reserved within the limit when reserving; no answer beyond its grant"),
        ("caps", "Never more runs of an account at once than its tier's cap"),
    )
    counts: Counter[str] = outcome.breaches.counts
    checked = f"{outcome.runs:,} runs, {outcome.settlements:,} settlements"
    return [
        Law(
            name=f"{says} ({key})" if key != "caps" else says,
            figure=f"{counts[key]:,} breaches",
            bound="0",
            held=counts[key] == 0,
            says="; ".join(outcome.breaches.told.get(key, [])) or checked,
        )
        for key, says in laws
    ]


def quantile(values: Sequence[float], part: float) -> float:
    """Of sorted values; 0 where there are none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
