"""A model and a tokenizer small enough to be trained from nothing in a minute on a laptop."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import torch

from ramet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each printable ASCII character and the line break.

    A text starts with `<bos>` (id 1); `<pad>` is 0, `<eos>` 2, and any other character is `<unk>`, 3. Decoding gives
    the same text back, and `<eos>` written out in a text is five characters, not the token.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer("2+2=")["input_ids"]
    [1, 6, 76, 6, 84]
    >>> tokenizer.decode([6, 76, 6, 84])
    '2+2='
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate([PAD, BOS, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    made: PreTrainedTokenizerFast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    return made


def tiny_llama(
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    hidden_size: int = 128,
    layers: int = 2,
    heads: int = 4,
    intermediate_size: int = 256,
    context: int = 128,
    initializer_range: float = 0.08,
) -> LlamaForCausalLM:
    """Make a Llama with random weights that are a function of `seed`, float32 on the CPU, with tied embeddings.

    The default shape has 0.28 million parameters. `context` is the largest number of tokens of a prompt and its
    completion. torch's global random state is the same afterwards as before. Raises `ConfigError` for a shape that can
    not be.

    >>> model = tiny_llama(tiny_tokenizer(), layers=1)
    >>> sum(parameter.numel() for parameter in model.parameters())
    177024
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden_size, "layers": layers, "heads": heads, "intermediate_size": intermediate_size}
    for name, size in {**sizes, "context": context}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"model.options.{name}: expected a whole number from 1 on, found {size!r}")
    if hidden_size % (2 * heads):
        raise ConfigError(
            f"model.options.hidden_size = {hidden_size} does not divide into heads = {heads} of an even size each",
            hint=f"rotary positions turn pairs of numbers: take a multiple of {2 * heads}",
        )
    if isinstance(initializer_range, str) or not 0 < initializer_range < float("inf"):
        raise ConfigError(f"model.options.initializer_range: expected a number above 0, found {initializer_range!r}")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        model: LlamaForCausalLM = LlamaForCausalLM(config)
    model.train(False)
    return model
