"""The checks can fail: each rule of the protocol is broken in turn, and some seed shows it.

Where two rules overlap, either is enough and both are dropped; the mutation says so.
"""

from __future__ import annotations

import pytest

from tests.simulation.fold_mutations import FOLD_MUTATIONS
from tests.simulation.mutation import Mutation, hunt
from tests.simulation.process_mutations import (
    ADMISSION_MUTATIONS,
    OTHER_MUTATIONS,
    RECORDER_MUTATIONS,
    WORKER_MUTATIONS,
)
from tests.simulation.run import run_seed

EVERY = (
    *FOLD_MUTATIONS,
    *WORKER_MUTATIONS,
    *RECORDER_MUTATIONS,
    *ADMISSION_MUTATIONS,
    *OTHER_MUTATIONS,
)


@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.rule)
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    found = hunt(mutation)
    assert found is not None, f"no seed shows it: {mutation.rule}"
    kept = run_seed(found.seed, faults=mutation.faults)
    assert not kept.violations, f"seed {found.seed} fails with the rule kept, too"
