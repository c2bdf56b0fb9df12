"""Which kinds of models keep the documents of a packed row apart: the one list, read by runs and by the planner."""

from __future__ import annotations

from collections.abc import Iterable

_LAYERS_THAT_SEPARATE = {"full_attention", "sliding_attention", "chunked_attention"}
_FAMILIES_WITHOUT_POSITION_RESTART = {
    # Their masks are made without position ids (read in transformers 5.24), or there is state besides attention.
    "afmoe", "bamba", "biogpt", "bloom", "cohere_compass", "falcon_h1", "falcon_mamba", "gpt_neo", "gpt_oss",
    "granitemoehybrid", "jamba", "mamba", "mamba2", "mpt", "nemotron_h", "opt", "recurrent_gemma", "rwkv", "xglm",
    "xlstm", "zamba", "zamba2", "zaya",
}  # fmt: skip


def separates_documents(model_type: str, layer_types: Iterable[str]) -> tuple[bool, str]:
    """Return whether a model keeps packed documents apart by its kind, and why (not).

    Restarting position ids mark the documents; attention layers honour them, recurrent layers (gated delta net, Mamba)
    carry their state across unless special kernels are given the boundaries.

    Args:
        model_type: of the text part of a transformers configuration.
        layer_types: its kinds of layers, none when they are all plain attention.
    """
    recurrent = sorted(set(layer_types) - _LAYERS_THAT_SEPARATE)
    if recurrent:
        return False, f"{model_type} has {', '.join(recurrent)} layers, which carry state across documents"
    if model_type.removesuffix("_text") in _FAMILIES_WITHOUT_POSITION_RESTART:
        return False, f"{model_type} does not separate documents by their positions"
    return True, f"{model_type} separates documents by their positions"
