"""How a server is asked over HTTP: one exchange, another try, and the wait for a server that is away."""

from ramet.http.exchange import Endpoint, LateError, RefusedError, TransientError, clean_url
from ramet.http.outage import Ask, Outage
from ramet.http.retries import Retries, with_retries

__all__ = [
    "Ask",
    "Endpoint",
    "LateError",
    "Outage",
    "RefusedError",
    "Retries",
    "TransientError",
    "clean_url",
    "with_retries",
]
