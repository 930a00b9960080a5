"""What a model may use: typed functions as tools, the calls that models write, and how they are run."""

from ramet.tools.calculator import calculator
from ramet.tools.calls import BadCall, Call, read_calls
from ramet.tools.mcp_server import MCPServer
from ramet.tools.python import python_tool, run_python
from ramet.tools.tool import Tool, ToolError, tool
from ramet.tools.toolbox import Toolbox

__all__ = [
    "BadCall",
    "Call",
    "MCPServer",
    "Tool",
    "ToolError",
    "Toolbox",
    "calculator",
    "python_tool",
    "read_calls",
    "run_python",
    "tool",
]
