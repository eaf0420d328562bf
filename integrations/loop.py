"""gradguard for plain training loops, as functions: the guard's own methods under names that read well in a script.

from gradguard.integrations.loop import guarded_steps

for batch in guarded_steps(loader, model, optimizer, level="strict"):
    ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from gradguard.runtime.guard import Guard

T = TypeVar("T")


def guarded_steps(loader: Iterable[T], *objects: Any, guard: Guard | None = None, **settings: Any) -> Iterator[T]:
    """Iterates over a loader under a guard, one step an item.

    Args:
        loader: anything iterable.
        objects: models and optimizers, for better names.
        guard: a guard to use; by default one is made.
        settings: what `gradguard()` takes, for the guard that is made.

    Raises:
        ConfigError: a setting that does not exist or fit.
        TypeError: settings for a guard that is made already.
    """
    if guard is None:
        guard = Guard(*objects, **settings)
    elif settings:
        raise TypeError("settings belong to the guard; give either a guard or settings")
    else:
        guard.watch(*objects)
    yield from guard.steps(loader)
    guard.close()
