"""Environments: what answers to the tokens of a policy."""
