"""What was computed with grad mode off on purpose (a rollout), and is computed once more in the same step with grad mode on."""

from __future__ import annotations

from itertools import islice

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import short
from gradguard.analysis.places.source import resolve
from gradguard.core.callsite import CallSite
from gradguard.core.diagnosis import Fix

_OPS = 1_024  # the last calls of the step


def anew(incident: Incident, origin: Origin) -> list[Fix]:
    """The repair that leaves the switch where it is; none where nothing shows that the values exist with a graph too."""
    place, switch = origin.place, origin.switch
    if (
        origin.kind not in ("no_grad", "inference")
        or place is None
        or switch is None
        or switch.how in ("library", "left_on", "yield", "checkpoint")
    ):
        return []
    seen: set[tuple[object, int]] = set()
    began = incident.journal.steps[-1].clock if incident.journal.steps else 0
    for _, _, code, lasti, _, clock in islice(reversed(incident.journal.ops), _OPS):
        if clock < began:
            break
        if code.co_filename != place.file or (code, lasti) in seen:
            continue
        seen.add((code, lasti))
        again = resolve(CallSite(code, lasti))
        if again is not None and (again.line, again.function, again.column) == (place.line, place.function, place.column):
            where = f"`{switch.owner}` may stay under" if switch.owner else "the values made there may stay under"
            return [
                Fix(
                    title=f"Compute this term from what `{place.function}` gives with grad mode on, where the same step calls it for the "
                    f"rest of the loss; {where} `{short(switch.text, 40)}`",
                    safety="manual",
                )
            ]
    return []
