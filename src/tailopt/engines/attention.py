"""Transformers under vmap: attention whose masks do not depend on values.

transformers skips a mask that masks nothing, and looks at its values to find out, which vmap refuses. A pair of an
attention and a mask function that never look is registered by transformers' own interfaces, and a copy of the model is
switched to it: the arithmetic stays that of the model's own attention.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch

PREFIX = "tailopt_batched_"
SUPPORTED = ("sdpa", "eager")


def batchable_copy(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model for vmap: the models of transformers in it have attention that vmap takes."""
    copied = copy.deepcopy(model)
    transformers = sys.modules.get("transformers")  # without it no part of the model can be one of its models
    kind = getattr(transformers, "PreTrainedModel", None) if transformers is not None else None
    if kind is None:
        return copied
    for part in copied.modules():  # a model switches the models inside it, but in some versions not all of them
        if isinstance(part, kind):
            _switch(part)
    return copied


def _switch(model: Any) -> None:
    own = getattr(model.config, "_attn_implementation", None)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # in training nobody reads the cache, and each copy would keep one
    if own in SUPPORTED:
        _register()
        model.set_attn_implementation(PREFIX + own)


@functools.cache
def _register() -> None:
    """Register the pairs, once in a process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import eager_mask, sdpa_mask

    def without_skips(mask: Any) -> Any:
        @functools.wraps(mask)
        def built(*args: Any, attention_mask: Any = None, **more: Any) -> Any:
            if attention_mask is not None:  # without a mask the skips look at no values, and are fast
                more |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            return mask(*args, attention_mask=attention_mask, **more)

        return built

    AttentionInterface.register(PREFIX + "sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register(PREFIX + "sdpa", without_skips(sdpa_mask))
    AttentionInterface.register(PREFIX + "eager", _eager_attention)
    AttentionMaskInterface.register(PREFIX + "eager", without_skips(eager_mask))


def _eager_attention(module: torch.nn.Module, *args: Any, **more: Any) -> Any:
    """Call the eager attention of the module's own file; every architecture has one there."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **more)
