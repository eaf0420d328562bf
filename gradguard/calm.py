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

from gradguard.callsite import CallSite, user_stack
from gradguard.journal import BackwardFact
from gradguard.torch_internals import node_sequence, others_watch, sequence_number

if TYPE_CHECKING:
    from gradguard.rules.base import Rule
    from gradguard.session import Session

Idle = Callable[[dict[str, Any]], bool]
Pulse = Callable[[dict[str, Any], CallSite | None, int, torch.Tensor], bool]


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
        if not self.possible:
            return False
        for idle in self._idle:  # noqa: SIM110  (a generator for `all` costs as much again as what it asks)
            if not idle(memory):
                return False
        return True


def calm_call(session: Session, frame: FrameType, args: tuple[Any, ...]) -> BackwardFact | None:
    """A call of `loss.backward()` in a calm step, if it is as calm as its step: its entry of the journal, already made.

    What `gradguard.backward_calls.backward_fact` and the rules' screens do in other steps is done here in one go, since between
    two of torch's operators what costs is how much code and memory is touched. None, and nothing noted, where the call is not
    calm, or not of the form in which `Tensor.backward` hands it on.
    """
    if len(args) != 4 or type(root := args[0]) is not torch.Tensor or args[3] or others_watch():
        return None
    run = session.run
    node = root.grad_fn
    if node is None or run.ledger.ended or not run.ledger.asleep:
        return None
    stack = user_stack(frame)
    site = stack[0] if stack else None
    journal = session.journal
    index = journal.backward_count + 1
    for pulse in run.calm.pulses:
        if not pulse(run.memory, site, index, root):
            return None
    call = BackwardFact(
        index,
        journal.tick(),
        session.step,
        site,
        "backward",
        (node_sequence(node),),
        sequence_number(),
        bool(args[2]),
        False,
        False,
        False,
        stack,
    )
    journal.backward_count = index
    journal.backwards.append(call)
    return call
