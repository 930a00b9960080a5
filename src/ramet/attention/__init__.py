"""Attention over trees of tokens, and how it gets into stock models."""
