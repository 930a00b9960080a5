"""Ramet inside other libraries: one module for each, which needs the extra of its name."""
