"""Conversations as tokens: what a template writes around messages, and exactly what a model saw and wrote."""

from ramet.chat.conversation import Conversation
from ramet.chat.markers import Markers
from ramet.chat.pieces import Fork, Parting, Piece
from ramet.chat.seams import Seams
from ramet.chat.template import ChatTemplate, PlainTemplate, Rewrites, Schemas, Template

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Fork",
    "Markers",
    "Parting",
    "Piece",
    "PlainTemplate",
    "Rewrites",
    "Schemas",
    "Seams",
    "Template",
]
