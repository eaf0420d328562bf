"""Dotted paths of modules, as a program writes them."""

from __future__ import annotations

import pytest

from gradguard.analysis.live.names import as_code


@pytest.mark.parametrize(
    ("path", "written"), [("net", "net"), ("net.1", "net[1]"), ("model.layers.0.bn", "model.layers[0].bn"), ("a.0.1", "a[0][1]")]
)
def test_numbers_in_a_path_are_indices(path: str, written: str) -> None:
    assert as_code(path) == written
