"""The load-balancing loss of a student's routers: who has it, and what it keeps."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from disaggkd_cli.errors import UserError
from disaggkd_cli.models import backbone_of
from disaggkd_cli.models.head import hidden_states, states_and_router_logits
from disaggkd_cli.models.router import router_loss_of
from disaggkd_cli.planner.memory import student_rank
from disaggkd_cli.planner.memory.activations import router_scores
from disaggkd_cli.planner.models import load_preset, resolve_model
from disaggkd_cli.planner.models.router import balances_experts

from .planner_toys import toy_work

SPARSE = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "gpt-oss-20b", "deepseek-v3",
          "deepseek-v2-lite", "glm-4.5", "qwen3-8b")  # fmt: skip


@pytest.mark.parametrize("preset", SPARSE)
def test_the_same_classes_as_in_a_run(preset):
    fields = dict(load_preset(preset)["config"]) | {"num_hidden_layers": 4}
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:4]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    try:
        has_it = router_loss_of(model, 0.1) is not None
    except UserError:
        has_it = False
    shape = resolve_model(preset, "student.model")
    assert balances_experts(shape, fields, 0.1) == has_it
    assert balances_experts(shape, fields, None) == (router_loss_of(model, None) is not None)
    assert not balances_experts(shape, fields, 0)


def saved(model, tokens, with_router):
    """Bytes that autograd keeps, weights apart, when the forward is over."""
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.dtype.is_floating_point and tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    ids, positions = torch.randint(16, (1, tokens)), torch.arange(tokens)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if with_router:
            _, logits = states_and_router_logits(backbone_of(model), ids, positions)
            router_loss_of(model, 0.1)(logits, torch.ones(1, tokens))
        else:
            hidden_states(backbone_of(model), ids, positions)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize(("dtype", "element"), [(torch.bfloat16, 2), (torch.float32, 4)])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (24, 5)])
def test_what_the_loss_keeps_is_what_is_planned(dtype, element, experts, top_k):
    config = Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=experts, num_experts_per_tok=top_k,
    )  # fmt: skip
    model, tokens = Qwen3MoeForCausalLM(config).to(dtype).train(), 128
    fields = {**config.to_dict(), "model_type": "qwen3_moe"}
    from disaggkd_cli.planner.models.families import model_shape

    work = toy_work(
        student=model_shape(fields, "toy", "made up"),
        router_loss=True, micro_batch_tokens=tokens, student_bytes=element,
    )  # fmt: skip
    traced = saved(model, tokens, True) - saved(model, tokens, False)
    # Beside it: sums of a few numbers an expert.
    assert traced == pytest.approx(router_scores(work)[0].value, abs=3 * 12 * experts + 64)


def test_no_loss_keeps_nothing_and_the_loss_phase_holds_the_scores_too():
    shape = resolve_model("qwen3-30b-a3b", "student.model")
    off, on = (student_rank(toy_work(student=shape, router_loss=one)) for one in (False, True))
    scores = 64 * 2 * 128 * 48
    assert on.phases[0].bytes - off.phases[0].bytes == 2 * scores + 64 * 4
    assert on.phases[-1].bytes == off.phases[-1].bytes
