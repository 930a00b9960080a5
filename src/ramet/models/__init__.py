"""Where models come from."""

from ramet.models.load import check_vocabulary, load_model, pick_device

__all__ = ["check_vocabulary", "load_model", "pick_device"]
