"""How tree attention gets into a stock model: as an attention function of transformers' own registry.

Inside `Attending(model, attention)` each attention layer hands its queries, keys and values to `attention`, and the
model makes no mask of its own. Everything else of the model is as it was.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from ramet.attention.tree import Rule
from ramet.errors import ModelError

NAME = "ramet"
"""The name of the attention function in transformers' registry."""

_SWITCH = "_attn_implementation_internal"
"""The attribute of a configuration that names its layers' attention; its public face changes sub-configurations too."""

_GIVEN = "_ramet_attention"
"""The attribute under which a layer finds its `Attention`."""


class Attention(Protocol):
    """What computes the attention of every layer of one forward pass over one row of T tokens."""

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """Return [T, Hq, E] of `query` [Hq, T, D], `key` [Hk, T, D], `value` [Hk, T, E]."""
        ...


class Attending:
    """A context in which the attention layers of `model` call `attention`.

    It may be entered again and again, as recomputing a layer in the backward pass does. The switch is in the model's
    configuration: models that share one can not be inside at the same time, in two threads.
    """

    def __init__(self, model: nn.Module, attention: Attention) -> None:
        _register()
        self._modules = [m for m in model.modules() if _SWITCH in getattr(getattr(m, "config", None), "__dict__", {})]
        configs: dict[int, Any] = {id(module.config): module.config for module in self._modules}
        self._configs = list(configs.values())
        self._attention = attention
        self._before: list[tuple[list[str], list[Attention | None]]] = []

    def __enter__(self) -> None:
        names = [config.__dict__[_SWITCH] for config in self._configs]
        self._before.append((names, [module.__dict__.get(_GIVEN) for module in self._modules]))
        for config in self._configs:
            config.__dict__[_SWITCH] = NAME
        for module in self._modules:
            module.__dict__[_GIVEN] = self._attention

    def __exit__(self, *_: object) -> None:
        names, attentions = self._before.pop()
        for config, name in zip(self._configs, names, strict=True):
            config.__dict__[_SWITCH] = name
        for module, attention in zip(self._modules, attentions, strict=True):
            if attention is None:
                del module.__dict__[_GIVEN]
            else:
                module.__dict__[_GIVEN] = attention


def _register() -> None:
    from transformers import AttentionInterface

    if NAME not in AttentionInterface._global_mapping:
        AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    attention: Attention | None = module.__dict__.get(_GIVEN)
    if attention is None:
        raise ModelError(
            f"{type(module).__name__} was given no attention: another model that shares its configuration is inside one"
        )
    if attention_mask is not None or len(query) != 1:
        raise ModelError(
            f"{type(module).__name__}: expected one row without a mask, found {len(query)} rows "
            f"{'with' if attention_mask is not None else 'without'} a mask"
        )
    _refuse_hidden_windows(module, sliding_window)
    if dropout:
        raise ModelError(f"{type(module).__name__} wants attention dropout of {dropout}", hint="call model.eval()")
    if others.get("is_causal") is False:
        raise ModelError(f"{type(module).__name__} attends to tokens on both sides: a tree has none behind a token")
    unknown = sorted(name for name in others if name not in _HARMLESS and others[name] is not None)
    if unknown:
        raise ModelError(f"{type(module).__name__} gives its attention {unknown}, which tree attention does not know")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    rule = Rule(scale, softcap, window=sliding_window, sinks=s_aux)
    return attention.attend(module, query[0], key[0], value[0], rule)[None], None


def _refuse_hidden_windows(module: nn.Module, window: int | None) -> None:
    """Raise where a layer should not see all that is before it, and says so in the mask alone, which is not made."""
    config: Any = module.config
    kinds, number = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[number] if kinds and isinstance(number, int) else None
    sliding = kind == "sliding_attention" if kind else _windowed(config)
    if kind not in (None, "full_attention", "sliding_attention"):
        raise ModelError(f"{type(module).__name__} is a layer of {kind}, which tree attention does not know")
    if (sliding and window is None) or (getattr(config, "attention_chunk_size", None) and kind != "full_attention"):
        raise ModelError(f"{type(module).__name__} has a window that it does not tell its attention function of")


def _windowed(config: Any) -> bool:
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))


_HARMLESS = frozenset(
    {
        "output_router_logits",
        "position_ids",
        "use_cache",
        "is_causal",
        "cache",
        "output_attentions",
        "cache_position",
        "position_embeddings",
    }
)
"""Arguments that say nothing about which token attends to which, or that the layout knows better."""
