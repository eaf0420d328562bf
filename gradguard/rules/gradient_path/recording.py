"""What is advised where a library calls a function of the user's without grad, and derivatives are needed there all the same."""

from __future__ import annotations

from gradguard.core.diagnosis import Fix


def recording(inference: bool, root: str, runner: str | None = None) -> Fix:
    """Grad mode switched on around the computation; inference mode has to be left altogether.

    Args:
        inference: whether it is called in inference mode.
        root: what has no path, in words.
        runner: the call that made what calls, where that takes the option `inference_mode` and grad mode was switched on already.
    """
    if inference and runner is not None:
        return Fix(
            title=f"Pass `inference_mode=False` to `{runner}`",
            safety="safe",
            detail="It then evaluates under no_grad, inside of which `torch.enable_grad()` works.",
        )
    if inference:
        return Fix(
            title=f"Leave inference mode for what {root} is computed from: `with torch.inference_mode(False):`, on `clone()`s of what was "
            "made in it",
            safety="manual",
            detail="Or evaluate under no_grad (Lightning: `Trainer(inference_mode=False)`) with `torch.enable_grad()` around it.",
        )
    return Fix(
        title=f"Compute {root}, and what it is computed from, under `with torch.enable_grad():`",
        safety="manual",
        detail="Derivatives are needed there whoever calls; detach what is handed on.",
    )
