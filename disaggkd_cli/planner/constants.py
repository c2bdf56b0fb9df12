"""Every constant that is not a shape or a datasheet figure: value, unit, where it came from, and how far to trust
it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A number with its provenance. `kind`: measured, published, counted (from code), or assumed (until calibrated)."""

    value: float
    unit: str
    kind: str
    source: str


CONSTANTS: dict[str, Constant] = {
    "context_gib": Constant(
        1.0,
        "GiB",
        "published",
        "CUDA context and kernels: 0.47 lazily loaded, 0.92 eagerly, up to 1.8 (stas00/ml-engineering)",
    ),
    "first_communicator_gib": Constant(
        1.0,
        "GiB",
        "published",
        "torch.distributed and the first NCCL communicator: 0.55 -> 2.0 GiB with context (ml-engineering)",
    ),
    "communicator_gib": Constant(
        0.6,
        "GiB",
        "published",
        "each further NCCL communicator: 544 MB for 2 ranks, 688 MB for more (nccl issue 964, A100)",
    ),
    "most_replies": Constant(
        8, "replies", "counted", "that a teacher computes ahead, over all its links (transport/send_buffers.py)"
    ),
    "link_communicator_gib": Constant(
        0.06,
        "GiB",
        "assumed",
        "NCCL communicator of a link, two ranks, four channels (transport/nccl_payloads.py): some 6 MiB of buffers for "
        "each channel and direction and its own bookkeeping; not measured",
    ),
    "reserve": Constant(
        1.05,
        "factor",
        "published",
        "reserved / allocated with expandable_segments: 1.04-1.13 (Megatron-LM issue 6429); 1.5 seen without "
        "(llama-cookbook 120)",
    ),
    "margin": Constant(0.04, "share", "assumed", "kept free of what the driver reports, for the unexplained"),
    "float32_slowdown": Constant(
        8.0,
        "factor",
        "assumed",
        "float32 matrix products without TF32 against bf16 on an H100 (67 against 989 TFLOP/s is 15; TF32 is 2)",
    ),
    "nvlink_efficiency": Constant(0.80, "share", "measured", "all-gather on 8 x H200, of the one-direction rate"),
    "nic_efficiency": Constant(
        0.74, "share", "published", "collectives of 1 GiB and more on 4 x P6-B200; .44 at 256 MiB, .125 at 16 MiB"
    ),
    "point_to_point_efficiency": Constant(
        0.70, "share", "assumed", "one NCCL send/recv stream over RDMA; TCP gives .5-.7"
    ),
    "pcie_efficiency": Constant(0.87, "share", "measured", "55 of 63 GB/s over PCIe 5 x16"),
    "hbm_efficiency": Constant(0.80, "share", "assumed", "achieved share of memory bandwidth in the optimizer step"),
    "decode_layer_seconds": Constant(
        0.5e-3,
        "s",
        "assumed",
        "a decoder layer's share of a forward of one token through transformers' eager modules, where starting "
        "kernels takes longer than they run; not measured",
    ),
    "jitter": Constant(0.15, "cv", "assumed", "coefficient of variation of batch times, teacher and student"),
}


TEMPERED_LOGITS_BYTES = 8.0
"""Bytes per row and vocabulary entry that a temperature other than 1 adds to what a divergence takes over full logits
(`losses/divergences`): a copy of both sides' logits, traced with MemTracker."""

LOW_PRECISION_LOGITS_BYTES = 2.0
"""What bfloat16 compute adds to them: the gradient of the logits in both dtypes, traced likewise."""

FUSED_LOGIT_TRAFFIC = 32.0
"""Bytes of memory traffic per row and vocabulary entry in the fused loss: two float32 logits written and read twice,
one gradient."""

OTHER_FULL_LOGITS: dict[str, tuple[float, str]] = {
    "cross-entropy, float32 logits": (14.0, "MemTracker; NeMo-RL PR 3314 measures 14.0 B on a 4090"),
    "cross-entropy, bf16": (6.0, "MemTracker; Liger's CSV 6.13 B on an A100"),
    "cross-entropy, compiled in chunks": (4.0, "torchtune's 42.9 GiB row; NeMo-RL PR 3314 after"),
    "forward KL, float32 (log_softmax twice)": (28.0, "Liger's CSV kl_div, torch, H100: 28.00 B"),
    "forward KL, bf16": (14.0, "MemTracker"),
    "JSD, float32 (TRL GKD style)": (60.0, "Liger's CSV distill_jsd_loss, torch, H100: 60.19 B"),
    "JSD, bf16": (30.0, "MemTracker"),
    "Liger fused_linear_jsd": (4.63, "Liger's CSV; it keeps a float32 [rows, V] loss buffer"),
    "Liger chunked distill_jsd_loss": (0.22, "Liger's CSV"),
}
"""What other implementations take, bytes per row and vocabulary entry, and who measured it."""

NOT_MODELLED = [
    "fragmentation beyond the reserve factor; CUDA graphs' private pools",
    "imbalance of expert routing where experts are cut over ranks; expert parallelism of students (there is none)",
    "activations inside low-rank adapters (rank elements a token for each adapted matrix)",
    "vision towers and multi-token-prediction heads",
    "attention of multi-head latent attention on GPUs (head sizes that flash kernels pad)",
    "chunk states that fla's delta-net kernel may keep; torch's own delta net needs far more (`--verify` shows it)",
    "inference engines' own KV reservation: teachers here run a plain forward without a cache",
    "slow parts of a cluster other than jitter: congestion, stragglers (see --simulate), checkpoint writes, evaluation",
    "the host's memory and its data pipeline",
    "writing (on_policy): completions that stop early, activations of a prompt's forward, top-k's and top-p's sorting",
]

ERROR_BANDS = {
    "parameters and bytes on the wire": "exact",
    "memory of tensors, dense students under FSDP": "±2 %",
    "memory of tensors, mixtures of experts and delta nets": "±10 %",
    "activations of classes that are counted on the meta device": "±25 %",
    "memory reserved on the GPU (expandable_segments)": "-6 % to +3 %",
    "times, dense models, published runs held out of the fit": "median 3 %, nine in ten within 9 %, worst 21 %",
    "times, mixtures of experts, published runs held out of the fit": "median 24 %, worst +111 %",
    "times of delta nets, and on architectures without published runs": "not known; calibrate with one run",
}


def constant(name: str) -> float:
    """The value of a constant."""
    return CONSTANTS[name].value
