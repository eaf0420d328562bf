"""The calm step: untraced, between two windows in which gradients are followed, with nothing odd about.

Most steps of a long training are calm, and nearly all that a guard costs there is Python that asks whether there is anything to
do. So the rules say once a step whether they have business (`Rule.idle`), and instead of their screens one look is taken at the
loss (`Rule.pulse`). Whatever is out of the ordinary sends the call the long way, through `Session.moment`, before anything has
been counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gradguard.journal import BackwardFact
from gradguard.torch_internals import others_watch

if TYPE_CHECKING:
    from gradguard.rules.base import Rule
    from gradguard.run import Run

Idle = Callable[[dict[str, Any]], bool]
Pulse = Callable[[dict[str, Any], BackwardFact, torch.Tensor], bool]


class Calm:
    """What has to be asked of the rules in a calm step; made once a run.

    Args:
        rules: all that look at untraced steps.
    """

    def __init__(self, rules: tuple[Rule, ...]) -> None:
        self.possible = all(rule.idle is not None or rule.pulse is not None for rule in rules)
        self._idle: tuple[Idle, ...] = tuple(dict.fromkeys(rule.idle for rule in rules if rule.idle is not None))
        self.pulses: tuple[Pulse, ...] = tuple(dict.fromkeys(rule.pulse for rule in rules if rule.pulse is not None))

    def begins(self, memory: dict[str, Any]) -> bool:
        """Whether no rule has any business in the step that begins, as far as that can be known now."""
        return self.possible and all(idle(memory) for idle in self._idle)


def is_calm(run: Run, call: BackwardFact, roots: tuple[Any, ...]) -> bool:
    """Whether a backward() call of a calm step is as calm as its step; nothing has been noted where it is not."""
    if call.create_graph or run.ledger.ended or not run.ledger.asleep or others_watch():
        return False
    if len(roots) != 1 or type(roots[0]) is not torch.Tensor or call.root_seqs[0] < 0:
        return False
    return all(pulse(run.memory, call, roots[0]) for pulse in run.calm.pulses)
