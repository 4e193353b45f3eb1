"""Putting another function in the place of one, for a while."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

Swap = Callable[[], AbstractContextManager[object]]
PACKAGES = ("schemas.", "processors.", "inference_workers.", "edge.", "infra.", "tests.")


@contextmanager
def swapped(owner: Any, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def swap(owner: Any, name: str, value: object) -> Swap:
    """The same, to be entered later and any number of times."""
    return lambda: swapped(owner, name, value)


def swap_everywhere(function: Any, value: object) -> Swap:
    """In every module of ours that has imported the function by its name."""

    @contextmanager
    def entered() -> Iterator[None]:
        name = function.__name__
        with ExitStack() as stack:
            for module_name, module in list(sys.modules.items()):
                if module_name.startswith(PACKAGES) and vars(module).get(name) is function:
                    stack.enter_context(swapped(module, name, value))
            yield

    return entered


@contextmanager
def all_of(swaps: tuple[Swap, ...]) -> Iterator[None]:
    """All of them at once."""
    with ExitStack() as stack:
        for each in swaps:
            stack.enter_context(each())
        yield
