"""What a GradScaler is called in a sentence and in code."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradguard.analysis.incident import Incident


def scaler_in_words(incident: Incident) -> tuple[str, str]:
    """The scaler of a run, in a sentence and in code: by its variable where one is known."""
    held = next((name for name, value in incident.names.bindings if type(value).__name__ == "GradScaler"), None)
    return f"`{held}`" if held else "the scaler", held or "scaler"
