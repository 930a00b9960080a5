"""An MCP server, run as a program by test_mcp_server.py."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp import MCPError
from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("on purpose")


@server.tool()
def number(code: int) -> str:
    """Fail with a number of the protocol's."""
    raise MCPError(code, "on purpose")


@server.tool()
def die() -> str:
    """End the server in the middle of the call."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Answer never."""
    await asyncio.sleep(3600)
    return "late"


@server.tool()
def env(name: str) -> str:
    """Return a variable of the environment."""
    return os.environ.get(name, "")


if __name__ == "__main__":
    if "noisy" in sys.argv:
        print("Welcome!\n{rubbish\n[1, 2]", flush=True)
    server.run("stdio")
