"""# GG414 optimizer-parameters

## What it is
An optimizer got no parameters at all, or the same parameter in two groups.

## Why it is wrong
`nn.Module.parameters()` finds what is assigned as a Parameter or a Module: layers in a plain list or dict are not found. It is a
generator, which can be walked once: whoever counts the parameters first leaves none. A parameter in two groups would be moved
twice in each step; tied weights are one Parameter with two names.

## Example
    self.layers = [nn.Linear(8, 8) for _ in range(3)]     # in __init__ of a module with nothing else
    optimizer = torch.optim.Adam(net.parameters())

## Use instead
    self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

## Fix safety
Unsafe: what was not trained will be.

## When it speaks, what silences it
When the optimizer (or `add_param_group`) refuses what it is given. Which module and which iterator it was is looked up among the
objects that the call names.
"""

from __future__ import annotations

from types import GeneratorType
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.given_parameters import Given, given_to
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.index import program_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import attributes, elements, named_parameters, parameters_in, peek
from gradguard.fixes.at_places import made_with
from gradguard.fixes.edits import replaced
from gradguard.rules import wording
from gradguard.rules.base import Rule
from gradguard.rules.spans import attribute_set

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_ITERATORS = (GeneratorType, filter, map, zip)


def recognise(incident: Incident) -> Diagnosis | None:
    place = incident.place
    if place is None:
        return None
    if "more than one" in incident.message:
        return _in_two_groups(incident, place)
    return _empty(incident, place)


# -- the same parameter twice -----------------------------------------------------------------------------------------------


def _in_two_groups(incident: Incident, place: ResolvedSite) -> Diagnosis | None:
    view = next((view for view in incident.all_frames if view.code_name == "add_param_group"), None)
    if view is None:
        return None
    groups = elements(peek(view.locals.get("self"), "param_groups", ()))
    given = elements(dict(view.locals.get("param_group") or ()).get("params", ()))
    before = {id(p): i for i, group in enumerate(groups) for p in elements(group.get("params", ()))}
    twice = [(p, before[id(p)]) for p in given if isinstance(p, torch.Tensor) and id(p) in before]
    if not twice:
        return None
    names = [" = ".join(f"`{each}`" for each in _names(incident, p)) or "a tensor" for p, _ in twice]
    tied = [p for p, _ in twice if len(_names(incident, p)) > 1]
    where = f"the {_ordinal(twice[0][1])} group and the {_ordinal(len(groups))} one"
    shown = " and ".join(names[:3]) if len(names) < 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"
    one = (_names(incident, twice[0][0]) or ["..."])[-1]
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        headline=f"{shown} {'is' if len(twice) == 1 else 'are'} in two parameter groups of one optimizer: {where}",
        culprit=place.span(f"{where} both have {'it' if len(twice) == 1 else 'them'}", "culprit"),
        tensors=wording.facts((p for p, _ in twice), incident.names),
        explanation="Each group has its own options, and a step goes through all groups: it would move the parameter twice."
        + (" These are tied weights: one Parameter that two modules have, each under its own name." if tied else ""),
        fixes=[
            Fix(
                title=f"Leave {'it' if len(twice) == 1 else 'them'} out of one group: `[p for p in ... if p is not {one}]`",
                safety="manual",
                reason="which group's learning rate it is to have is for you to say",
            )
        ],
    )


def _names(incident: Incident, parameter: torch.Tensor) -> list[str]:
    """All the names that a parameter has in its root module; of tied weights there are several."""
    state = incident.names.state(parameter)
    if state is None:
        name = incident.names.tensor(parameter)
        return [name] if name else []
    start = state.full.removesuffix(state.path)
    return [f"{start}{path}" for path, each in named_parameters(state.root, remove_duplicate=False) if each is parameter] or [state.full]


def _ordinal(index: int) -> str:
    return _ORDINALS[index] if index < len(_ORDINALS) else f"{index + 1}th"


# -- no parameters ----------------------------------------------------------------------------------------------------------


def _empty(incident: Incident, place: ResolvedSite) -> Diagnosis | None:
    program = None if place.source is None else program_of(place.source)
    given = None if program is None else given_to(place, incident.user_frames[0], program)
    if given is None:
        return None
    if isinstance(given.value, _ITERATORS):
        told = _used_up(place, given)
        if told is not None:
            return told
    for shown, module in given.modules():
        found = [*parameters_in(module)]
        if found and given.is_filtered and all(not p.requires_grad for p in found):
            return _told(
                place,
                f"the optimizer gets no parameters: all {len(found)} of `{shown}` are frozen where it is made",
                f"asks for those of `{shown}` that require grad: there is none",
                f"`requires_grad` is False for every parameter of `{shown}` at this point.",
                [Fix(title=f"Switch on what is to be trained before this line: `{shown}.<part>.requires_grad_(True)`", safety="manual")],
            )
        if found:
            continue
        hidden = [(name, held) for name, held in attributes(module).items() if _has_modules(held)]
        if hidden:
            return _hidden(place, shown, module, *hidden[0])
        return _told(
            place,
            f"the optimizer gets no parameters: `{shown}` ({type(module).__name__}) has none",
            f"`{shown}` has no parameters",
            f"None of the attributes of `{shown}` is a Parameter, or a module with parameters, when the optimizer is made.",
            [Fix(title="Make the layers in `__init__`, as attributes of the module, before the optimizer", safety="manual")],
        )
    return None


def _has_modules(held: Any) -> bool:
    return isinstance(held, (list, tuple, dict)) and any(
        isinstance(item, nn.Module) and next(parameters_in(item), None) is not None for item in elements(held, 64)
    )


def _hidden(place: ResolvedSite, shown: str, module: nn.Module, attribute: str, held: Any) -> Diagnosis:
    container = "ModuleDict" if isinstance(held, dict) else "ModuleList"
    put = attribute_set(type(module), attribute)
    kind = type(held).__name__
    patch = None if put is None else made_with([put], f"torch.nn.{container}")
    return _told(
        place,
        f"the optimizer gets no parameters: `{shown}` keeps its layers in a plain {kind}, `self.{attribute}`, which `parameters()` does "
        "not look into",
        f"`{shown}.parameters()` gives nothing",
        f"A module knows the modules that are its attributes; it does not look into a {kind}. `.to(device)`, `state_dict()` and "
        "`train()` pass them over as well.",
        [Fix(title=f"Use `nn.{container}` for `self.{attribute}`", safety="unsafe", reason="what was not trained will be", patch=patch)],
        None if put is None else put.statement_span(f"a plain {kind}: its layers are no part of `{shown}.parameters()`", "culprit"),
    )


def _used_up(place: ResolvedSite, given: Given) -> Diagnosis | None:
    """An iterator that another line has walked."""
    source, name, definition, walked = place.source, given.name, given.definition, given.read_before()
    if source is None or definition is None or definition.value is None or walked is None:
        return None
    text = source.segment(definition.value)
    patch = None if text is None else replaced(source, [(definition.value, f"list({text})")])
    made = source.span_of(definition.node, f"`{name}` is an iterator: it can be walked once", "declared")
    used = source.span_of(walked, f"walks `{name}` to its end", "culprit")
    return _told(
        place,
        f"the optimizer gets no parameters: `{name}` is an iterator, and line {walked.lineno} has walked it to its end",
        "nothing is left of it here",
        f"What `parameters()` gives is a generator. Line {walked.lineno} reads `{name}` first, and a generator cannot be walked again.",
        [Fix(title=f"Keep a list: `{name} = list(...)`", safety="safe", patch=patch)],
        used,
        [made],
    )


def _told(
    place: ResolvedSite,
    headline: str,
    label: str,
    explanation: str,
    fixes: list[Fix],
    culprit: SourceSpan | None = None,
    related: list[SourceSpan] | None = None,
) -> Diagnosis:
    """The culprit is the line that left nothing, where that is known; the optimizer's own line is right as it stands."""
    own = place.span(label, "context")
    return Diagnosis(
        code=RULE.code,
        name=RULE.name,
        headline=headline[0].upper() + headline[1:],
        culprit=culprit,
        related=[*(related or ()), own],
        explanation=explanation,
        fixes=fixes,
    )


RULE = Rule(
    code="GG414",
    name="optimizer-parameters",
    summary="an optimizer got no parameters, or the same one twice",
    recognise=recognise,
    priority=50,
    messages=("optimizer got an empty parameter list", "some parameters appear in more than one parameter group"),
)
