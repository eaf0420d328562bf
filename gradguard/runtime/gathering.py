"""Gathers what the HTML report draws, when a diagnosis is made and the graph is alive. What fails here costs a section of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from gradguard.analysis.graph.graph_part import LiveGraph
from gradguard.analysis.incident import Incident
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Diagnosis
from gradguard.core.evidence import Evidence, GradlessParameter, GraphPart, LayerGradient, ProtocolEvent
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import named_parameters
from gradguard.instrumentation.fault_barrier import say
from gradguard.monitors.numerics import Numbers
from gradguard.monitors.summary_records import OptimizerRecord
from gradguard.runtime.run import Run

_EVENTS, _NORMS, _LAYERS, _PARAMETERS = 22, 64, 200, 60
T = TypeVar("T")


def gathered(diagnosis: Diagnosis, incident: Incident, run: Run) -> Evidence:
    """The facts of an incident for its page. Holds no tensor, node or frame."""
    lost: list[str] = []

    def section(name: str, gather: Callable[[], T], otherwise: T) -> T:
        try:
            return gather()
        except internal_error() as fault:
            lost.append(name)
            say("the HTML report", f"its section on {name} is left out", fault)
            return otherwise

    roots = incident.roots or tuple(islice((root for call in reversed(incident.journal.backwards) for root in call.live_roots()), 1))
    graph = section("the graph", lambda: LiveGraph(incident, diagnosis, roots, incident.notes[Numbers].footprints.kept()), None)
    nothing: tuple[GraphPart | None, GraphPart | None] = (None, None)
    picture, steps = nothing if graph is None else section("the graph", graph.parts, nothing)
    none: tuple[GradlessParameter, ...] = ()
    gradless = section("parameters", lambda: tuple(_gradless(incident, graph)), none)
    return Evidence(
        graph=picture if picture is not None and picture.nodes else None,
        steps=steps,
        lines_of_step=None if graph is None else graph.lines.step,
        lines_known=bool(graph is not None and graph.lines.calls),
        norms=section("gradient norms", lambda: tuple(_norms(incident, run)), ()),
        timeline=section("the timeline", lambda: tuple(_timeline(diagnosis, incident, run)), ()),
        gradless=gradless[:_PARAMETERS],
        gradless_total=len(gradless),
        lost=tuple(dict.fromkeys(lost)),
    )


def _gradless(incident: Incident, graph: LiveGraph | None) -> Iterator[GradlessParameter]:
    """Parameters of the models that take part, to which this loss gives no gradient."""
    if graph is None or not graph.roots or not graph.whole:
        return
    known: set[int] = set()
    for root in incident.modules:
        for _, parameter in named_parameters(root):
            if id(parameter) in known:
                continue
            known.add(id(parameter))
            if parameter.requires_grad and id(parameter) in graph.leaves:
                continue
            why = "the loss does not depend on it" if parameter.requires_grad else "frozen: requires_grad=False"
            yield GradlessParameter(incident.names.leaf(parameter) or "a parameter", tuple(parameter.shape), why)


def _norms(incident: Incident, run: Run) -> Iterator[LayerGradient]:
    records: list[OptimizerRecord] = [] if run.ledger.recorder is None else list(run.ledger.recorder.records.values())
    complete = incident.moment != "error"  # a backward call that failed has filled some gradients only
    for record in records[:4]:
        now = record.norms_now() if complete else {}
        prefix = f"{record.type_name}: " if len({each.type_name for each in records}) > 1 else ""
        for layer in list(dict.fromkeys([*record.norms, *now]))[:_LAYERS]:
            yield LayerGradient(prefix + layer, tuple(record.norms.get(layer, ())[-_NORMS:]), now.get(layer))


def _timeline(diagnosis: Diagnosis, incident: Incident, run: Run) -> Iterator[ProtocolEvent]:
    """The last events of the step protocol, oldest first, those marked where the fault is or was noticed."""
    ledger, journal = run.ledger, incident.journal
    found: list[tuple[int, str, int, CallSite | None, str]] = []  # clock, kind, step, place, words
    if ledger.recorder is not None:
        found += [(zero.clock, "zero_grad", zero.step, zero.site, f"{zero.owner}.zero_grad()") for zero in ledger.recorder.zeroings]
    calls = {call.clock: call for call in ledger.calls() if not call.nested}
    found += [
        (call.clock, "backward", call.step, call.site, "backward()" if call.kind == "backward" else "autograd.grad()")
        for call in calls.values()
    ]
    found += [
        (fact.clock, "step", fact.step, fact.site, f"{fact.type_name}.step()") for fact in journal.steps if fact.clock > ledger.began_at
    ]
    found.sort(key=lambda event: event[0])
    oldest = ledger.began_at
    while len(found) > _EVENTS:  # by whole steps
        oldest = found[0][0]
        found = [event for event in found if event[2] != found[0][2]] or found[-_EVENTS:]
    clocks = [event[0] for event in found]
    runs: dict[int, list[Any]] = {}  # operations by how many events came before them
    at = 0
    for op in sorted((op for op in journal.ops if op[5] > oldest), key=lambda op: op[5]):
        while at < len(clocks) and clocks[at] < op[5]:
            at += 1
        runs.setdefault(at, []).append(op)
    events: list[ProtocolEvent] = []
    for i in range(len(found) + 1):
        ops = runs.get(i)
        step = found[i][2] if i < len(found) else incident.journal.step
        if ops:
            site = CallSite(ops[0][2], ops[0][3])
            events.append(_event("forward", step, site, f"{len(ops)} operation{'s' if len(ops) > 1 else ''} with a graph"))
        elif i < len(found) and found[i][1] == "backward" and not calls[found[i][0]].traced and (not i or found[i - 1][1] != "backward"):
            events.append(ProtocolEvent("forward", step, text="not traced", followed=False))
        if i < len(found):
            _, kind, step, place, words = found[i]
            events.append(_event(kind, step, place, words))
    yield from _marked(events, diagnosis, incident)


def _event(kind: Any, step: int, site: CallSite | None, text: str) -> ProtocolEvent:
    return ProtocolEvent(kind, step, None if site is None else site.code.co_filename, None if site is None else site.line, text)


def _marked(events: list[ProtocolEvent], diagnosis: Diagnosis, incident: Incident) -> list[ProtocolEvent]:
    """The events, of which the newest at the culprit's line is the culprit, and the one that was under way noticed it."""
    under_way = {"forward": "forward", "backward": "backward", "grad": "backward", "optimizer": "step"}.get(incident.where)
    if under_way is not None and (not events or events[-1].kind != under_way):  # it has not come to its end
        name = f"{type(incident.optimizer).__name__}.step()" if under_way == "step" else f"{under_way}"
        events.append(_event(under_way, incident.journal.step, incident.site, name))
    noticed = len(events) - 1
    culprit = diagnosis.culprit
    guilty = next(
        (i for i in reversed(range(len(events))) if culprit and (events[i].file, events[i].line) == (culprit.file, culprit.line)), None
    )
    if noticed >= 0:
        events[noticed] = replace(events[noticed], fault="noticed")
    if guilty is not None and events[guilty].kind != "forward":
        events[guilty] = replace(events[guilty], fault="culprit")
    return events
