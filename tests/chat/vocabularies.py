"""Tokenizers made here: of bytes, of pieces with a mark for the space in front, and of characters."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ramet.models.tiny import tiny_tokenizer

TEXT = [
    "user assistant system tool model And then? It is four. Where to? The rules are these: answer in one word.",
    "Instruction Response USER: ASSISTANT: Falcon: User: name arguments parameters content call results",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} [{"tool_name": "add"}] functions.add to=assistant json',
    "analysis commentary final developer ipython think tool_call tool_response\n\n\n\nhello hello\n\nworld  world",
]
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = ("bytes", "pieces", "characters")


def vocabulary(kind: str, special: Sequence[str], bos: str, eos: str) -> PreTrainedTokenizerBase:
    """Return a tokenizer of its own of one of `KINDS` that knows the special tokens."""
    if kind == "characters":
        made = tiny_tokenizer()
        made.split_special_tokens = False
    else:
        made = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=Tokenizer.from_str(_trained(kind))
        )
        made.unk_token = "<unk>" if kind == "pieces" else None
    made.add_special_tokens({"bos_token": bos, "eos_token": eos})
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


@functools.cache
def _trained(kind: str) -> str:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>" if kind == "pieces" else None, byte_fallback=kind == "pieces"))
    alphabet: list[str] = []
    special: list[str] = []
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        # As sentencepiece does it: a mark stands for the space, one is put in front, and the decoder takes it away.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁?\w+|\s+|▁|[^\w\s▁]"), "isolated")
        special = ["<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    if kind == "bytes":
        return str(tokenizer.to_str())
    state = json.loads(tokenizer.to_str())
    words = state["model"]["vocab"]
    for byte in range(256):  # a character that has no token is written in these
        words[f"<0x{byte:02X}>"] = len(words)
    return json.dumps(state)
