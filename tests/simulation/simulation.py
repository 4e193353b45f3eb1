"""One seed: a world, its processes, a schedule of steps and faults, and a drain without faults after which everything must be at rest.

The scheduler draws the next step: an action of some process, or a fault. Processes are killed and start anew, are paused beyond
their session and wake as zombies, lose ownership without knowing, and their last records arrive when they are long dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import msgspec

from inference_workers.decisions.request_book import Queue
from processors.decisions import recorder
from schemas.events.accounts import LimitsChanged
from schemas.events.chats import ChatCreated
from schemas.topics import (
    ACCOUNT_SNAPSHOTS,
    ACCOUNTS,
    ADMISSIONS,
    CHATS,
    OUTCOMES,
    POLICY_ORDER_PARTITION,
    TOKENS,
    Topic,
    generations,
)
from tests.simulation.admission import Admission
from tests.simulation.clients import ACCOUNTS_OF_SEED, CHATS_PER_ACCOUNT, Client, limits
from tests.simulation.context import Context
from tests.simulation.edge import Edge
from tests.simulation.log import Group, Record
from tests.simulation.process import Process
from tests.simulation.recording import Recorder
from tests.simulation.swaps import swapped
from tests.simulation.worker import Worker
from tests.simulation.world import (
    CALM,
    KEYED_PARTITIONS,
    LANES,
    MODEL,
    TOKEN_PARTITIONS,
    Crashed,
    Faults,
    World,
    keyed_partition,
)

STEPS_MAX: Final = 300
DRAIN_ROUNDS_MAX: Final = 600
DRAIN_ROUND_MS: Final = 60
IDLE_ROUNDS: Final = 2
STALLED_ROUNDS: Final = 12
JUMP_MS_MAX: Final = 300_000
SEGMENT_RECORDS_MAX: Final = 3
RUNS_REMEMBERED: Final = 2
KINDS: Final = ("edge", "admission", "context", "worker", "recorder")
FOCUS_WEIGHT: Final = 4
JUMPS_MS_MAX: Final = 6_000
REPLAYED: Final[tuple[Topic, ...]] = (
    TOKENS,
    TOKENS,
    ACCOUNTS,
    ACCOUNT_SNAPSHOTS,
    ADMISSIONS,
    OUTCOMES,
    *(generations(MODEL, lane) for lane in LANES),
)


@dataclass(slots=True)
class _Place:
    """Where a process runs: when it dies another one of its kind takes the place."""

    kind: str
    start: Callable[[], Process]
    weight: int
    process: Process | None = None


@dataclass(slots=True)
class Simulation:
    """A seed that was run: what the checks look at."""

    world: World
    client: Client
    workers_died: bool = False
    rested: bool = False
    jumped_ms: int = 0
    places: list[_Place] = field(default_factory=list)
    expiring: list[Process] = field(default_factory=list)
    policies: list[tuple[int, LimitsChanged]] = field(default_factory=list)
    """Being applied: not in these partitions yet."""


def simulate(world: World, *, faults: Faults | None = None) -> Simulation:
    """Run one seed to rest, with faults of its own drawing where none are given.

    Raises AssertionError where a decision's own assertion broke.
    """
    run = Simulation(world=world, client=Client(world))
    _populate(run)
    world.faults = faults or _draw_faults(world)
    # Small, so that runs are forgotten and read back within a seed.
    with (
        swapped(recorder, "ENDED_RUNS_MAX", RUNS_REMEMBERED),
        swapped(recorder, "EARLY_RUNS_MAX", RUNS_REMEMBERED),
    ):
        for _ in range(world.rng.randint(STEPS_MAX // 2, STEPS_MAX)):
            _step(run)
        _drain(run)
    return run


def _draw_faults(world: World) -> Faults:
    """Some kinds of fault, some of them often."""

    def rate(usual: float) -> float:
        return usual * world.rng.choice((0, 0, 1, 1, 2, 4))

    return Faults(
        focus=world.rng.choice(("", "", "", *KINDS)),
        crash=rate(0.012),
        pause=rate(0.02),
        rebalance=rate(0.012),
        duplicate=rate(0.02),
        jump=rate(0.02),
        skew=rate(0.01),
        lose_acked=rate(0.02),
        fail_send=rate(0.004),
        late_ack=rate(0.1),
        policy=rate(0.004),
        stall=rate(0.02),
    )


def _populate(run: Simulation) -> None:
    world, client = run.world, run.client
    tokens = world.group("recorder", TOKEN_PARTITIONS)
    accounts = world.group("admission", KEYED_PARTITIONS)
    chats = world.group("context", KEYED_PARTITIONS)
    queues: Group[Queue] = Group(
        "worker",
        [Queue(lane=lane, partition=at) for lane in LANES for at in range(TOKEN_PARTITIONS)],
        rng=world.rng,
    )
    for number in range(KEYED_PARTITIONS):
        world.log.append(
            ACCOUNTS, number, limits("v1"), event_id=f"limits-{number}", writer="turnlog"
        )
    for account_id in ACCOUNTS_OF_SEED:
        for at in range(CHATS_PER_ACCOUNT):
            chat_id = f"{account_id}-chat-{at}"
            created = ChatCreated(chat_id=chat_id, account_id=account_id)
            world.log.append(
                CHATS, keyed_partition(chat_id), created, event_id=chat_id, writer="edge"
            )
    slow = world.chance(0.2)
    kinds: list[tuple[str, Callable[[], Process], int, int]] = [
        ("edge", lambda: Edge(world, client), 2, 4),
        ("admission", lambda: Admission(world, accounts), 2, 5),
        ("context", lambda: Context(world, chats), world.rng.randint(1, 2), 4),
        ("worker", lambda: Worker(world, queues), world.rng.randint(2, 3), 6),
        ("recorder", lambda: Recorder(world, tokens), world.rng.randint(1, 2), 1 if slow else 3),
    ]
    for kind, start, count, weight in kinds:
        for _ in range(count):
            run.places.append(_Place(kind, start, weight, start()))


# The schedule


def _step(run: Simulation) -> None:
    world, rng = run.world, run.world.rng
    world.log.now_ms += rng.choice((0, 1, 5, 20, 60))
    _background(run)
    draw = rng.random()
    faults = world.faults
    for rate, fault in (
        (faults.crash, _crash),
        (faults.pause, _pause),
        (faults.rebalance, _rebalance),
        (faults.duplicate, _duplicate),
        (faults.jump, _jump),
        (faults.skew, _skew),
        (faults.policy, _change_policy),
        (faults.stall, _stall),
    ):
        if draw < rate:
            fault(run)
            return
        draw -= rate
    awake = [each for each in run.places if each.process is not None and not each.process.paused]
    if awake:
        place = rng.choices(awake, [_weight(each, faults.focus) for each in awake])[0]
        for _ in range(rng.choice((1, 3, 6))):
            _act(run, place, Process.step)
    if rng.random() < 0.3:
        run.client.step(_edges(run))


def _weight(place: _Place, focus: str) -> int:
    return place.weight * FOCUS_WEIGHT if place.kind == focus else place.weight


def _act(run: Simulation, place: _Place, action: Callable[[Process], bool]) -> bool:
    process = place.process
    if process is None:
        return False
    try:
        return action(process)
    except Crashed:
        _kill(run, place)
        return True


def _kill(run: Simulation, place: _Place) -> None:
    process = place.process
    assert process is not None, "only what lives is killed"
    run.world.trace(f"{process.name}: killed")
    process.die()
    run.expiring.append(process)
    place.process = None


def _background(run: Simulation) -> None:
    """What goes on by itself: sessions expire, the paused wake, the dead come back, ghosts arrive."""
    world = run.world
    for process in list(run.expiring):
        if world.chance(0.12):
            run.expiring.remove(process)
            world.trace(f"{process.name}: session expired")
            process.leave_groups()
    for place in run.places:
        if place.process is None:
            if world.chance(0.1):
                place.process = place.start()
        elif place.process.producer.stalled and world.chance(0.05):
            place.process.producer.stalled = False
        elif place.process.paused and world.chance(0.06):
            place.process.paused = False
            world.trace(f"{place.process.name}: wakes")
    for ghost in list(world.ghosts):
        if world.chance(0.06) and not ghost.haunt():
            world.ghosts.remove(ghost)


def _victims(run: Simulation) -> list[tuple[_Place, Process]]:
    """The living to whom something may happen."""
    focus = run.world.faults.focus
    return [
        (place, place.process)
        for place in run.places
        if place.process is not None and (not focus or place.kind == focus)
    ]


def _crash(run: Simulation) -> None:
    if victims := _victims(run):
        _kill(run, run.world.rng.choice(victims)[0])


def _pause(run: Simulation) -> None:
    """SIGSTOP; often beyond the session."""
    awake = [process for _, process in _victims(run) if not process.paused]
    if not awake:
        return
    process = run.world.rng.choice(awake)
    process.paused = True
    run.world.trace(f"{process.name}: paused")
    if run.world.chance(0.8):
        run.expiring.append(process)


def _stall(run: Simulation) -> None:
    """The network of one process."""
    if victims := _victims(run):
        run.world.rng.choice(victims)[1].producer.stalled = True


def _rebalance(run: Simulation) -> None:
    """A member joined and left: sources move, and nobody has heard of it yet."""
    if victims := _victims(run):
        run.world.rng.choice(victims)[1].provoke_rebalance()


def _duplicate(run: Simulation) -> None:
    """Part of a topic is appended again."""
    world = run.world
    topic = world.rng.choice(REPLAYED)
    number = world.rng.randrange(len(world.log.partitions(topic)))
    records = world.log.partition(topic, number).records
    if not records:
        return
    first = world.rng.randrange(max(0, len(records) - 12), len(records))
    for record in records[first : first + world.rng.randint(1, SEGMENT_RECORDS_MAX)]:
        world.log.append(
            topic,
            number,
            record.event,
            event_id=record.event_id,
            cause_id=record.cause_id,
            writer=record.writer,
        )
    world.sometimes["segment replayed"] += 1
    world.trace(f"replayed {topic.name}/{number} from {first}")


def _jump(run: Simulation) -> None:
    """Everybody was slow. Bounded, so that the bounds of I6 in seconds mean something."""
    jump_ms = run.world.rng.choice((300, 1_200, 2_500))
    if run.jumped_ms + jump_ms <= JUMPS_MS_MAX:
        run.jumped_ms += jump_ms
        run.world.log.now_ms += jump_ms


def _skew(run: Simulation) -> None:
    """A partition's leader moves, and its stamps step (by a second between any two leaders)."""
    world = run.world
    topic = world.rng.choice((TOKENS, ACCOUNTS))
    number = world.rng.randrange(len(world.log.partitions(topic)))
    world.log.partition(topic, number).skew_ms = world.rng.choice((-500, 0, 500))


def _change_policy(run: Simulation) -> None:
    """Somebody applies a policy, or what one was on the way to writes lands: of several at a time in any order."""
    world = run.world
    if run.policies and world.chance(0.7):
        number, policy = run.policies.pop(world.rng.randrange(len(run.policies)))
        _write_policy(run, number, policy)
        return
    version, scale = world.rng.choice((("v1", 1), ("v2", 2)))
    policy = limits(version, scale=scale)
    first = _write_policy(run, POLICY_ORDER_PARTITION, policy)
    ordered = msgspec.structs.replace(policy, order=first.offset)
    others = [each for each in range(KEYED_PARTITIONS) if each != POLICY_ORDER_PARTITION]
    run.policies += [(number, ordered) for number in others]
    world.sometimes["policy changed"] += 1


def _write_policy(run: Simulation, number: int, policy: LimitsChanged) -> Record:
    event_id = run.world.fresh("limits-")
    return run.world.log.append(ACCOUNTS, number, policy, event_id=event_id, writer="turnlog")


# The drain


def _drain(run: Simulation) -> None:
    world = run.world
    world.trace("drain")
    for number, policy in run.policies:
        _write_policy(run, number, policy)
    run.workers_died = world.chance(0.08)
    world.faults, world.draining = CALM, True
    for ghost in world.ghosts:
        while ghost.haunt():
            pass
    world.ghosts.clear()
    for place in run.places:
        if run.workers_died and place.kind == "worker":
            if place.process is not None:
                _kill(run, place)
            continue
        if place.process is None:
            place.process = place.start()
        place.process.paused = place.process.producer.stalled = False
    for process in run.expiring:
        if all(place.process is not process for place in run.places):
            process.leave_groups()
    run.expiring.clear()
    idle = stalled = 0
    for _ in range(DRAIN_ROUNDS_MAX):
        # Where only time can help (a deadline, a parked prompt), time goes faster and faster.
        world.log.now_ms += min(DRAIN_ROUND_MS * 2 ** max(0, stalled - STALLED_ROUNDS), JUMP_MS_MAX)
        before = world.log.written
        did = False
        for place in run.places:
            did = _act(run, place, Process.run_through) or did
        did = run.client.step(_edges(run)) or did
        idle = 0 if did else idle + 1
        stalled = stalled + 1 if world.log.written == before else 0
        if idle >= IDLE_ROUNDS and not _awaited(run):
            run.rested = True
            return


def _awaited(run: Simulation) -> bool:
    """Whether time alone would still bring something."""
    return any(
        isinstance(place.process, Recorder) and place.process.open_runs for place in run.places
    )


def _edges(run: Simulation) -> list[Edge]:
    return [place.process for place in run.places if isinstance(place.process, Edge)]
