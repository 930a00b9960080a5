"""Rows of a loader at the reset of an environment."""

from __future__ import annotations

from ramet.transforms.loading.primer import DataLoadingPrimer

__all__ = ["DataLoadingPrimer"]
