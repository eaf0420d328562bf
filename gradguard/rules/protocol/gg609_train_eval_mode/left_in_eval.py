"""Modules that are trained in eval mode after a validation, and where they belong back into train mode. Part of GG609."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import in_training
from gradguard.fixes.at_places import Stretch, put_behind, stretch
from gradguard.monitors.train_modes import LeftInEval, Switch
from gradguard.rules import wording
from gradguard.rules.protocol.gg609_train_eval_mode.telling import act, acting, uncalled


class Way(NamedTuple):
    """The function that led to a switch and then to the forwards without grad."""

    place: ResolvedSite  # the call that led to the switch, or was it
    stretch: Stretch | None  # to the end of the statement that led to the last of these forwards
    name: str | None  # what the module is called there


class Left(NamedTuple):
    """A module in eval mode."""

    module: nn.Module
    name: str
    place: ResolvedSite | None  # the switch itself
    way: Way | None


def left_in_eval(incident: Incident, finding: LeftInEval, code: str, name: str) -> Diagnosis | None:
    """The calls that put trained modules into eval mode, and the line after which train() belongs."""
    left = [each for switch in finding.switches if (each := _left(incident, switch)) is not None]
    if not left:
        return None
    first = left[0]
    named = " and ".join(f"`{each.name}`" for each in left) if len(left) < 3 else wording.listed([each.name for each in left])
    what = acting(*(each.module for each in left))
    there = first.way.place if first.way is not None else first.place
    shared = all(_same(each.way.place if each.way is not None else each.place, there) for each in left)
    puts = named if shared else f"`{first.name}`"
    culprit = None if there is None else there.span(f"puts {puts} into eval mode; steps follow before any `train()`", "culprit")
    fix = _fix(incident, left)
    kept = finding.switches[0].kept
    back = None if kept is None else resolve(kept)
    given_back = None
    if back is not None and back.call is not None and back.call.args and (back.callee or "").endswith(".train"):
        given_back = back.span(f"is given False: `{first.name}` stays in eval mode", "context")
        given = wording.short(back.text, 40)
        if culprit is not None:
            culprit = culprit.model_copy(update={"label": f"puts {puts} into eval mode; `{given}` does not take it back"})
        before = f"Remember the mode before `{first.name}.eval()`: what `{given}` is given must be the mode from before"
        fix = Fix(title=before, safety="unsafe")
    told = None
    for each in left:
        if told is None:
            culprit, fix, told = uncalled(incident, each.name, "train", culprit, fix)
    since = f"since `{wording.short(there.text, 40)}`" if there is not None else "after a validation"
    were = "was" if len(left) == 1 else "were"
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"{named} {'is' if len(left) == 1 else 'are'} trained in eval mode {since}: {what} no longer {act(what)} as in training",
        culprit=culprit,
        related=wording.spans(
            told,
            *(
                each.place.span(f"puts `{each.name}` into eval mode", "context")
                for each in left
                if each.place is not None and not _same(each.place, there)
            ),
            given_back,
            None if finding.book is None else wording.span(finding.book.step_site, "these steps train in eval mode", "context"),
        ),
        explanation=f"{named} {were} trained in train mode before, {were} put into eval mode for forwards without grad, and the optimizer "
        "has stepped several times since.",
        fixes=[fix],
    )


def _same(one: ResolvedSite | None, other: ResolvedSite | None) -> bool:
    return one is not None and other is not None and one.span() == other.span()


def _left(incident: Incident, switch: Switch) -> Left | None:
    module, place = switch.ref(), resolve(switch.site)
    if module is None or in_training(module):
        return None
    name = incident.names.of(module) or (place.receiver if place is not None else None) or type(module).__name__
    return Left(module, name, place, _way(switch))


def _way(switch: Switch) -> Way | None:
    """Where the calls that led to the switch and those that led to the forward part: in the function that wanted eval mode."""
    for back, (one, other) in enumerate(zip(reversed(switch.stack), reversed(switch.run), strict=False), 1):
        if one.code is not other.code:
            return None
        if one.lasti != other.lasti:
            place, run = resolve(one), resolve(other)
            return None if place is None else Way(place, None if run is None else stretch(place, run), switch.names[-back])
    return None


def _fix(incident: Incident, left: list[Left]) -> Fix:
    """The calls of train() that are missing, after the line where they belong; the words alone where that is not known."""
    calls = [f"{each.way.name if each.way is not None and each.way.name else each.name}.train()" for each in left]
    wanted = " and ".join(f"`{call}`" for call in dict.fromkeys(calls))
    unknown = Fix(title=f"Call {wanted} right after what was to run in eval mode", safety="unsafe")
    stretches = [each.way.stretch for each in left if each.way is not None and each.way.stretch is not None and each.way.name is not None]
    if len(stretches) < len(left) or len(set(calls)) < len(calls):
        return unknown
    last = max(stretches, key=lambda each: each.lines[-1])
    if any(each.begin.enclosing_function is not last.begin.enclosing_function or each.begin.file != last.begin.file for each in stretches):
        return unknown
    if any(view.site.code.co_filename == last.begin.file and view.site.line in last.lines for view in incident.user_frames):
        return unknown  # the steps are in it, too
    if last.is_left:
        return Fix(title=f"Call {wanted} when what runs in lines {last.lines[0]} to {last.lines[-1]} is done", safety="unsafe")
    title = f"Call {wanted} after line {last.lines[-1]}, when what was to run in eval mode has run"
    return Fix(title=title, safety="unsafe", patch=put_behind(last, calls))
