"""The models hold within their quick bounds, and each broken variant is caught."""

from __future__ import annotations

import os

import pytest

from tests.proof import models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.proof,
    pytest.mark.skipif(
        not models.is_installed() and "CI" not in os.environ, reason="Spin is not installed: apt-get install spin"
    ),
]


@pytest.mark.parametrize("model", models.VARIANTS)
def test_a_model_holds_and_each_broken_variant_is_caught(model: str) -> None:
    for variant in models.CORRECT[model]:
        found = models.run(model, variant)
        assert (found.failed, found.is_complete) == ("", True), variant
        assert found.states > 1_000, "the model does nothing"
    for variant in models.VARIANTS[model]:
        assert models.run(model, variant).failed, f"{variant} is not caught"
    assert len(models.VARIANTS[model]) >= 4
