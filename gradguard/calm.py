"""The calm step: untraced, between two windows in which gradients are followed, with nothing odd about.

Most steps of a long training are calm, and nearly all that a guard costs there is Python that asks whether there is anything to
do. So the rules say once a step whether they have business (`Rule.idle`), and instead of their screens one look is taken at the
loss (`Rule.pulse`). Whatever is out of the ordinary sends the call the long way, through `Session.moment`, before anything has
been counted.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gradguard.callsite import user_stack
from gradguard.journal import BackwardFact
from gradguard.torch_internals import others_watch, sequence_number

if TYPE_CHECKING:
    from gradguard.rules.base import Rule
    from gradguard.session import Session

_Tensor = torch.Tensor
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


def before_backward(session: Session, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BackwardFact | None:
    """The fact of a backward() call that is as calm as its step; None where it has to be looked at more closely."""
    run = session.run
    if not args or type(args[0]) is not _Tensor or run.ledger.ended or others_watch():
        return None
    if (args[3] if len(args) > 3 else kwargs.get("create_graph")) or not run.ledger.asleep:
        return None
    root = args[0]
    node = root.grad_fn
    if node is None:
        return None
    journal = session.journal
    stack = user_stack(frame)
    retain = args[2] if len(args) > 2 else kwargs.get("retain_graph")
    fact = BackwardFact(
        journal.backward_count + 1,
        journal.tick(),
        session.step,
        stack[0] if stack else None,
        "backward",
        (node._sequence_nr(),),
        sequence_number(),
        bool(retain),
        False,
        False,
        False,
        stack,
    )
    for pulse in run.calm.pulses:
        if not pulse(run.memory, fact, root):
            return None
    journal.backward_count += 1
    journal.backwards.append(fact)
    return fact
