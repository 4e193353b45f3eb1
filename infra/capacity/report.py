"""The report: one HTML file that needs nothing else. First each law with its figure, then the plots, then what was simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from html import escape
from random import Random
from typing import Final

from edge.decisions.load_view import wait_error
from infra.capacity.calibration import Calibration
from infra.capacity.faults import FAULTS
from infra.capacity.figures import Second, Waited
from infra.capacity.laws import WAIT_ERROR_MAX, Law, audited, fairness, quantile
from infra.capacity.plots import Axes, Series, areas, lines, points
from infra.capacity.simulation import Outcome
from infra.policies import policy_text
from schemas.lane_shares import floors_of
from schemas.vocabulary import Lane, Tier

DOTS_MAX: Final = 1_500
REASONS_MAX: Final = 8
TIME: Final = "time (s)"

STYLE: Final = """
:root{--ink:#1b1f24;--soft:#5b6470;--rule:#d9dee4;--page:#fff;--card:#f6f8fa;--good:#12733b;--bad:#b3261e;
--c0:#0b62c4;--c1:#c2410c;--c2:#0f7b4f;--c3:#8b3fb8;--c4:#a16207;--c5:#be185d;--c6:#0e7490;--c7:#57606a}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ed;--soft:#9aa4b0;--rule:#333a44;
--page:#14171b;--card:#1c2127;--good:#5fd08f;--bad:#ff8a80;
--c0:#6cb0ff;--c1:#ff9a62;--c2:#57d39b;--c3:#cf9bf2;--c4:#e3b341;--c5:#ff8ac0;--c6:#5bcbe0;--c7:#a8b1bb}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1640px;padding:28px;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 8px}h3{font-size:15px;margin:0 0 6px}p{margin:4px 0}
.soft{color:var(--soft)}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:6px 12px 6px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:500}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.yes{color:var(--good);font-weight:600}.no{color:var(--bad);font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(560px,100%),1fr));gap:16px}
.plot{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px}
svg{width:100%;height:auto;display:block}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}
.grid{stroke:var(--rule);fill:none}.line{fill:none;stroke-width:2;stroke-linejoin:round}.axis{stroke:var(--soft);stroke-width:1}
.area{opacity:.85}.dot{opacity:.45}.legend{margin-top:6px;font-size:13px}.key{margin-right:14px;white-space:nowrap}
.key i{display:inline-block;width:14px;height:0;border-top:3px solid;margin-right:5px;vertical-align:middle}
.key i.dash{border-top-style:dashed}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px
;overflow:auto;font-size:13px}
""" + "".join(
    f".c{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}.k{n}{{border-color:var(--c{n})!important}}"
    for n in range(8)
)


def page(outcome: Outcome, laws: Sequence[Law], *, command: str) -> str:
    """The whole file."""
    scenario = outcome.scenario
    bad = sum(law.held is False for law in laws)
    verdict = (
        '<span class="yes">Every law that could be judged held.</span>'
        if not bad
        else f'<span class="no">{bad} of {len(laws)} laws did not hold.</span>'
    )
    plots = "".join(
        f'<section class="plot"><h3>{escape(title)}</h3>{svg}</section>'
        for title, svg in _plots(outcome)
    )
    head = (
        f"{outcome.prompts:,} prompts in {scenario.seconds} s (peak {scenario.prompts_per_s:,.0f}/s, {escape(scenario.pattern.says)}), "
        f"{scenario.workers} workers, {scenario.edges} edges, {scenario.account_partitions} admission processes; seed {scenario.seed}."
    )
    tail = (
        f"Simulated in {outcome.wall_s:.0f} s. Everything that was open had ended {outcome.drained_ms / 1000:.0f} s after the last prompt. "
        f"Measured from second {scenario.warm_up_ms / 1000:.0f} on."
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Turnlog: rationing, simulated</title><style>{STYLE}</style></head><body>"
        f"<h1>Rationing, simulated</h1><p>{verdict} {head}</p><p class='soft'>{tail}</p>"
        f"<p class='soft'><code>{escape(command)}</code></p>"
        f"<h2>Laws</h2>{_laws(laws)}<h2>Waits</h2>{_waits(outcome)}"
        f"<h2>Over time</h2><div class='plots'>{plots}</div>"
        f"<h2>Fairness between accounts</h2>{_fairness(outcome)}"
        f"<h2>What happened</h2>{_sometimes(outcome)}<h2>Faults</h2>{_faults(outcome)}"
        f"<h2>Workers</h2>{_calibration(scenario.worker)}"
        f"<h2>Policy</h2><pre>{escape(policy_text(scenario.policy))}</pre></body></html>\n"
    )


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """Cells are HTML."""

    def cell(tag: str, n: int, text: str) -> str:
        return f"<{tag}{' class=n' if n in numbers else ''}>{text}</{tag}>"

    top = "".join(cell("th", n, text) for n, text in enumerate(heads))
    body = "".join(
        f"<tr>{''.join(cell('td', n, text) for n, text in enumerate(row))}</tr>" for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _laws(laws: Sequence[Law]) -> str:
    words = {
        True: '<span class="yes">✓ held</span>',
        False: '<span class="no">✗ broken</span>',
        None: '<span class="soft">not judged</span>',
    }
    rows = [
        (words[law.held], escape(law.name), escape(law.figure), escape(law.bound), escape(law.says))
        for law in laws
    ]
    return _table(("", "Law", "Figure", "Bound", ""), rows, numbers=(2, 3))


def _waits(outcome: Outcome) -> str:
    by_tier: dict[Tier, list[float]] = {
        tier: sorted(w.waited_ms / 1000 for w in outcome.figures.waits if w.tier is tier)
        for tier in Tier
    }
    refused: dict[Tier, int] = defaultdict(int)
    for second in outcome.figures.seconds.values():
        for (tier, _), count in second.refused.items():
            refused[tier] += count
    rows = [
        (
            tier.value,
            f"{len(waits):,}",
            f"{refused[tier]:,}",
            *(f"{quantile(waits, part):.2f} s" for part in (0.5, 0.95, 0.99)),
        )
        for tier, waits in by_tier.items()
    ]
    heads = ("Tier", "started", "refused", "wait p50", "p95", "p99")
    return _table(heads, rows, numbers=range(1, 6))


def _fairness(outcome: Outcome) -> str:
    rows = [
        (
            f"{each.group[0]}, {each.group[1].value}",
            f"{each.accounts:,}",
            f"{each.requests_each:.1f}",
            f"{each.equal_each:.1f}",
            "too few requests to say" if each.jain is None else f"{each.jain:.3f}",
        )
        for each in fairness(outcome)
    ]
    heads = (
        "Lane",
        "accounts with a backlog all the time",
        "requests each",
        "as many equal ones",
        "Jain index",
    )
    return _table(heads, rows, numbers=(1, 2, 3, 4))


def _sometimes(outcome: Outcome) -> str:
    rows = [(escape(name), f"{n:,}") for name, n in sorted(outcome.figures.sometimes.items()) if n]
    third = -(-len(rows) // 3)
    parts = [rows[at : at + third] for at in range(0, len(rows), third)] if rows else []
    tables = "".join(f"<div>{_table(('', 'times'), part, numbers=(1,))}</div>" for part in parts)
    return f'<div class="plots">{tables}</div>'


def _faults(outcome: Outcome) -> str:
    if not outcome.scenario.faults:
        return "<p class='soft'>None.</p>"
    rows = [
        (
            name,
            FAULTS[name].says,
            ", ".join(f"{at * outcome.scenario.seconds:.0f} s" for at in FAULTS[name].at),
        )
        for name in outcome.scenario.faults
    ]
    return _table(("Fault", "What", "From"), rows)


def _calibration(worker: Calibration) -> str:
    full = worker.token_ms(worker.slots)
    rows = [
        ("answers at once", f"{worker.slots}"),
        ("between two tokens of an answer, alone", f"{worker.token_ms(1):.1f} ms"),
        ("the same, all slots busy, no prompt read", f"{full:.1f} ms"),
        ("output, all slots busy, no prompt read", f"{1000 * worker.slots / full:,.0f} tokens/s"),
        ("prompts", f"{worker.prefill_tokens_per_s:,.0f} tokens/s"),
        ("KV memory", f"{worker.kv_tokens:,} tokens"),
    ]
    return _table(("One worker", ""), rows, numbers=(1,))


def _plots(outcome: Outcome) -> list[tuple[str, str]]:
    seconds = [outcome.figures.seconds[n] for n in range(outcome.scenario.seconds)]
    return [
        ("Waiting time by tier, of runs queued in each second", _wait_lines(outcome)),
        ("Prompts", _prompts(seconds)),
        ("Grants", _grants(seconds)),
        ("Refusals by reason", _refusals(seconds)),
        ("Utilisation", _utilisation(outcome, seconds)),
        ("Floor kept", _floor(outcome, seconds)),
        ("Queues against their bounds", _queues(outcome, seconds)),
        ("Ladder", _ladder(outcome, seconds)),
        ("Waits: told and true", _told_and_true(outcome)),
        ("Error of the wait that was told, by quantile", _errors(outcome)),
    ]


def _time(seconds: Sequence[object], *, y: str, y_most: float | None = None) -> Axes:
    return Axes(x=TIME, y=y, x_most=len(seconds), y_most=y_most)


def _over(seconds: Sequence[Second], value: Callable[[Second], float]) -> list[tuple[float, float]]:
    return [(n + 0.5, float(value(second))) for n, second in enumerate(seconds)]


def _wait_lines(outcome: Outcome) -> str:
    found: dict[tuple[Tier, int], list[float]] = defaultdict(list)
    for wait in outcome.figures.waits:
        found[wait.tier, int(wait.queued_ms // 1000)].append(wait.waited_ms / 1000)
    series = []
    for colour, tier in enumerate(Tier):
        for part, dashed in ((0.5, False), (0.95, True)):
            at = [
                (n + 0.5, quantile(sorted(found[tier, n]), part))
                for n in range(outcome.scenario.seconds)
                if found[tier, n]
            ]
            name = f"{tier.value} p{100 * part:.0f}"
            series.append(Series(name=name, points=at, colour=colour, dashed=dashed))
    return lines(_time(range(outcome.scenario.seconds), y="wait (s)"), series)


def _prompts(seconds: Sequence[Second]) -> str:
    return lines(
        _time(seconds, y="prompts per second"),
        [
            Series(name="sent", points=_over(seconds, lambda s: s.prompts), colour=7),
            Series(name="admitted", points=_over(seconds, lambda s: s.admitted), colour=2),
        ],
    )


def _grants(seconds: Sequence[Second]) -> str:
    kinds = ("as asked", "shortened by the ladder", "shortened by the quota")
    series = [
        Series(name=kind, points=_over(seconds, lambda s, kind=kind: s.grants[kind]), colour=n)  # type: ignore[misc]
        for n, kind in enumerate(kinds)
    ]
    return areas(_time(seconds, y="admitted per second"), series)


def _refusals(seconds: Sequence[Second]) -> str:
    totals: dict[str, int] = defaultdict(int)
    for second in seconds:
        for (_, name), count in second.refused.items():
            totals[name] += count
    names = sorted(totals, key=lambda name: (-totals[name], name))[:REASONS_MAX]

    def of(second: Second, name: str) -> int:
        return sum(n for (_, each), n in second.refused.items() if each == name)

    series = [
        Series(name=name, points=_over(seconds, lambda s, name=name: of(s, name)), colour=n)  # type: ignore[misc]
        for n, name in enumerate(names)
    ]
    return areas(_time(seconds, y="refused per second"), series)


def _utilisation(outcome: Outcome, seconds: Sequence[Second]) -> str:
    worker = outcome.scenario.worker
    most = outcome.scenario.workers * 1000 * worker.slots / worker.token_ms(worker.slots)
    return lines(
        _time(seconds, y="percent", y_most=100),
        [
            Series(name="slots busy", points=_over(seconds, lambda s: 100 * s.busy), colour=0),
            Series(
                name=f"output tokens, of {most / 1000:,.0f} k/s if no prompt had to be read",
                points=_over(seconds, lambda s: 100 * s.tokens_per_s / most),
                colour=2,
            ),
        ],
    )


def _floor(outcome: Outcome, seconds: Sequence[Second]) -> str:
    floor = 100 * floors_of(outcome.scenario.policy.lanes).get(Lane.FREE, 0.0)
    kept = [
        (n + 0.5, 100 * second.floor_tokens / second.contested_tokens)
        for n, second in enumerate(seconds)
        if second.contested_tokens
    ]
    return lines(
        _time(seconds, y="percent of tokens started"),
        [
            Series(name="free lane, while it waits", points=kept, colour=0),
            Series(
                name="its floor",
                points=[(0, floor), (len(seconds), floor)],
                colour=1,
                dashed=True,
            ),
        ],
    )


def _queues(outcome: Outcome, seconds: Sequence[Second]) -> str:
    groups = sorted(outcome.figures.most_queued)
    lanes = outcome.scenario.policy.lanes
    series = [
        Series(
            name=f"{model}, {lane.value}",
            points=_over(
                seconds,
                lambda s, model=model, lane=lane: (  # type: ignore[misc]
                    100 * s.queued.get((model, lane), 0) / (lanes[lane].queued_requests_max or 1)
                ),
            ),
            colour=n,
        )
        for n, (model, lane) in enumerate(groups)
    ]
    bound = Series(name="bound", points=[(0, 100), (len(seconds), 100)], colour=7, dashed=True)
    return lines(_time(seconds, y="requests, percent of the bound"), [*series, bound])


def _ladder(outcome: Outcome, seconds: Sequence[Second]) -> str:
    levels = len(outcome.scenario.policy.ladder.levels)
    return lines(
        _time(seconds, y="level", y_most=max(1, levels)),
        [
            Series(
                name="mean of all partitions", points=_over(seconds, lambda s: s.level), colour=0
            ),
            Series(
                name="the highest",
                points=_over(seconds, lambda s: s.level_most),
                colour=1,
                dashed=True,
            ),
        ],
    )


def _told_and_true(outcome: Outcome) -> str:
    waits = audited(outcome)
    if len(waits) > DOTS_MAX:
        waits = Random(0).sample(waits, DOTS_MAX)

    def at(wait: Waited) -> tuple[float, float]:
        return max(0.1, wait.waited_ms / 1000), max(0.1, wait.told_ms / 1000)

    series = [
        Series(name=tier.value, points=[at(w) for w in waits if w.tier is tier], colour=n)
        for n, tier in enumerate(Tier)
    ]
    axes = Axes(x="true wait (s; below 0.1 is 0.1)", y="told wait (s)", logarithmic=True)
    return points(axes, series, diagonal="told as it was")


def _errors(outcome: Outcome) -> str:
    waits = audited(outcome)
    series = []
    for colour, tier in enumerate(Tier):
        errors = sorted(
            wait_error(estimated_ms=w.told_ms, waited_ms=round(w.waited_ms))
            for w in waits
            if w.tier is tier
        )
        if errors:
            at = [(part, 100 * quantile(errors, part / 100)) for part in range(1, 100)]
            series.append(Series(name=tier.value, points=at, colour=colour))
    line = [(0.0, 100 * WAIT_ERROR_MAX), (100.0, 100 * WAIT_ERROR_MAX)]
    series.append(Series(name="bound of the median", points=line, colour=7, dashed=True))
    return lines(Axes(x="percent of runs", y="error (%)", x_most=100, y_most=200), series)
