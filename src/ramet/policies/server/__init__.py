"""A policy behind an OpenAI-compatible server: what is asked, how it is asked again, and new weights for a vLLM."""

from ramet.http import Retries
from ramet.policies.server.facts import ServerFacts
from ramet.policies.server.policy import ServerPolicy

__all__ = ["Retries", "ServerFacts", "ServerPolicy"]
