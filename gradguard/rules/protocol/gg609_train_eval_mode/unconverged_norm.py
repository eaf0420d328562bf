"""The old `spectral_norm` of a network that only ever ran in eval mode: its power iteration never ran. Part of GG609."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import resolve
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import elements, in_training, modules_in, named_modules, peek, store_of
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording

_ALIGNED = 0.5  # after any iteration u is the direction of W v, and their product 1; for random u it is near 0


class Unconverged(NamedTuple):
    """A weight that is divided by something else than its spectral norm.

    Attributes:
        root, path: the network's name, and the module's within it.
        weight: the parameter, `weight_orig`.
        norm: the spectral norm of the weight as it is used; it should be 1.
    """

    root: str
    path: str
    module: nn.Module
    weight: torch.Tensor
    norm: float


def find(book: Book, roots: list[tuple[str, nn.Module]]) -> Unconverged | None:
    """A module in eval mode whose weight the optimizer trains, and whose u and v are no singular vectors of it."""
    trained = {id(p) for p in book.parameters() if p.grad is not None}
    for name, root in roots:
        for path, module in named_modules(root):
            if in_training(module):
                continue
            for hook in elements(peek(module, "_forward_pre_hooks")):
                if type(hook) is SpectralNorm and (found := _norm(hook, module, trained)) is not None:
                    return Unconverged(name, path, module, *found)
    return None


def _norm(hook: SpectralNorm, module: nn.Module, trained: set[int]) -> tuple[torch.Tensor, float] | None:
    weight = store_of(module, "_parameters").get(f"{hook.name}_orig")
    u, v = (store_of(module, "_buffers").get(f"{hook.name}_{each}") for each in "uv")
    if weight is None or u is None or v is None or id(weight) not in trained or not weight.isfinite().all():
        return None
    matrix = hook.reshape_weight_to_matrix(weight.detach())
    image = matrix @ v
    scale = float(u @ image)
    if scale > _ALIGNED * float(image.norm()):
        return None
    return weight, abs(float(torch.linalg.matrix_norm(matrix, 2)) / scale) if scale else float("inf")


def render(found: Unconverged, incident: Incident, code: str, name: str) -> Diagnosis:
    """The switch to eval mode, if one of them was seen."""
    full = f"{found.root}.{found.path}" if found.path else found.root
    switches = incident.notes[Ledger].modes.switches
    switch = next((s for s in reversed(switches) if not s.mode and (m := s.ref()) is not None and found.module in modules_in(m)), None)
    place = None if switch is None else resolve(switch.site)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`spectral_norm` of `{full}` does not normalise: it is trained in eval mode, in which its estimate is never updated",
        culprit=None if place is None else place.span(f"`{full}` runs in eval mode from here on", "culprit"),
        related=wording.spans(wording.span(incident.finding.book.step_site, "trains it", "context")),
        tensors=wording.facts([found.weight], incident.names),
        explanation="`torch.nn.utils.spectral_norm` divides the weight by `u @ W @ v`. `u` and `v` begin at random, and only a forward in "
        f"train mode brings them closer to the singular vectors. The norm of the weight in use is {found.norm:.3g}, not 1.",
        fixes=[
            Fix(title=f"Call `{found.root}.train()` before training", safety="unsafe"),
            Fix(
                title="Use `torch.nn.utils.parametrizations.spectral_norm`, which iterates when it is put on the module",
                safety="unsafe",
            ),
        ],
    )
