"""The story of the saved value that an error is about: made once for all rules that ask."""

from __future__ import annotations

from gradguard.analysis.graph.walk import Mismatch
from gradguard.analysis.incident import Incident
from gradguard.rules.inplace.suspects import guesses_for
from gradguard.rules.inplace.write_history import Story, writes_since


def story_of(incident: Incident) -> Story | None:
    """The story of the saved value that this incident's error is about; None when the graph does not show it."""
    cached = incident.__dict__.get("_inplace_story")
    if cached is not None:
        return cached if isinstance(cached, Story) else None
    found = _story(incident)
    incident.__dict__["_inplace_story"] = found if found is not None else False
    return found


def _story(incident: Incident) -> Story | None:
    candidates = incident.mismatches
    if not candidates:
        return None
    # backward met one of them first; the order of a walk is nearly the engine's, its very words decide
    mismatch = next((item for item in candidates if item.message == incident.message), candidates[0])
    return build(incident, mismatch)


def build(incident: Incident, mismatch: Mismatch) -> Story:
    """The story of one saved value."""
    op = incident.journal.op_at(mismatch.seq)
    story = Story(incident, mismatch, op, writes_since(incident, mismatch, op))
    if not story.writes and mismatch.found > mismatch.expected:
        story.guesses, story.unlikely = guesses_for(story)  # reads the source: only where nothing was recorded
    return story
