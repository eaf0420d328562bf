"""Layers that are made where they are used: new, random parameters in each step, which no optimizer has. Part of GG603."""

from __future__ import annotations

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Confidence, Diagnosis, Fix, SourceSpan
from gradguard.monitors.optimizer_books import Book
from gradguard.monitors.surveys import Making
from gradguard.rules import wording
from gradguard.rules.protocol.new_leaves import new_leaf

_ONCE = "Make the layer once, in `__init__`, as an attribute of the module, and call that"


def made_anew(
    incident: Incident, book: Book, shapes: list[tuple[int, ...]], found: list[Making | None], code: str, name: str
) -> Diagnosis | None:
    """The lines that made the parameters, as seen in the last steps."""
    makings = [made for made in found if made is not None]
    optimizer = wording.optimizer_name(book, incident)
    makings = sorted(makings, key=lambda made: made.site.line)
    sites = list(dict.fromkeys(made.site for made in makings))
    places = [place for site in sites if (place := resolve(site)) is not None]
    computed = new_leaf(incident)  # of values with a path: that the path ends there is the bug, told by GG605
    if not places or (computed is not None and any((computed.file, computed.line) == (place.file, place.line) for place in places)):
        return None
    attributes = list(dict.fromkeys(made.attribute for made in makings if made.attribute is not None))
    many = len(places) > 1
    function = places[0].function
    when = f"call in `{function}`" if function != "<module>" else "step"
    if attributes and len(attributes) == len(set(makings)):
        subject = wording.listed([f"{makings[0].owner}.{attribute}" for attribute in attributes], len(attributes))
        them = " and ".join(f"`{attribute}`" for attribute in attributes[:4])
        label, title = "a new parameter at each call; no step ever changes it", f"Make {them} once, in `__init__`, and only use {{}} here"
        title = title.format("them" if len(attributes) > 1 else "it")
        many, random = len(attributes) > 1, "their values start anew every time"
    else:
        subject = f"`{wording.short(places[0].text, 60)}`" + (f" and {len(places) - 1} more" if many else "")
        label, title, random = (
            "a new layer at each call; no step ever changes its parameters",
            _ONCE,
            "the parameters start anew every time",
        )
    headline = f"{subject} {'are' if many else 'is'} made anew in each {when}: {random}, and `{optimizer}` never has them"
    others = [place.span(label, "context") for place in places[1:4]]
    return _told(book, optimizer, headline, places[0].span(label, "culprit"), others, shapes, title, (code, name), "certain")


def _told(
    book: Book,
    optimizer: str,
    headline: str,
    culprit: SourceSpan,
    others: list[SourceSpan],
    shapes: list[tuple[int, ...]],
    title: str,
    rule: tuple[str, str],
    confidence: Confidence,
) -> Diagnosis:
    sizes = " and ".join(str(list(shape)) for shape in shapes[:3])
    return Diagnosis(
        code=rule[0],
        name=rule[1],
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=wording.spans(
            *others,
            wording.span(book.made, f"`{optimizer}` is made without them", "declared"),
            None
            if book.last_part is None
            else wording.span(book.last_part.call.site, "fills the gradients of the newest ones", "backward"),
        ),
        explanation=f"At each look another set of parameters ({sizes}) got gradients, those of the look before were gone, and no optimizer "
        "knew any of them. What is learnt in front of such a layer has to fit another random one in the next step.",
        fixes=[Fix(title=title, safety="unsafe")],
        confidence=confidence,
    )
