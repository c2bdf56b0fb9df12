"""The routers' load-balancing loss: transformers' own value and gradients, padding left out, off where it should be."""

import copy

import numpy as np
import pytest
import torch

from disaggkd_cli.config import LossConfig
from disaggkd_cli.data import Sequence, collate, empty_micro_batch
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import head_of, router_loss_of
from disaggkd_cli.training.student_module import StudentModule
from tests.support.models import VOCABULARY, tiny_model

ROUTED = ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "phimoe", "qwen3_5_moe_text", "qwen3_next"]
WEIGHT = 0.1


def batch_of(lengths, seed=0):
    draw = np.random.default_rng(seed)
    sequences = []
    for length in lengths:
        ids = draw.integers(0, VOCABULARY, length).astype(np.int32)
        labels = np.append(ids[1:], -100).astype(np.int32)
        labels[:3] = -100
        sequences.append(Sequence(ids, labels, (length,)))
    return collate(sequences, 0)


def module_of(model, weight=WEIGHT, micro_batches=1):
    loss = LossConfig(kd_weight=0.0, ce_weight=1.0)
    head = head_of(tiny_model("llama", seed=9)).detached()
    return StudentModule(model, head, loss, router_loss_of(model, weight), micro_batches)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ROUTED)
def test_value_and_gradients_are_transformers_own(family):
    """Its forward with labels gives cross-entropy plus coefficient times the router loss, with an attention mask."""
    ours = tiny_model(family, router_aux_loss_coef=WEIGHT).train()
    theirs = copy.deepcopy(ours)
    batch = batch_of([11, 7])
    module = module_of(ours, weight=None)
    torch.manual_seed(1)  # some routers draw noise in training
    loss, out = module(batch, torch.zeros(len(batch.rows), 32), batch.supervised_count)
    loss.backward()
    torch.manual_seed(1)
    own = theirs(
        input_ids=batch.input_ids, attention_mask=batch.token_mask.long(), output_router_logits=True, use_cache=False
    )
    log_probs = own.logits.reshape(-1, VOCABULARY).log_softmax(-1)[batch.rows]
    ce = -log_probs.gather(1, batch.row_labels[:, None]).mean()
    total = ce + WEIGHT * own.aux_loss
    total.backward()
    assert out.router_aux.item() == pytest.approx(own.aux_loss.item(), rel=1e-5)
    assert loss.item() == out.loss.item() == pytest.approx(total.item(), rel=1e-5)
    mine, other = gradients(ours), gradients(theirs)
    assert mine.keys() == other.keys()
    for name, gradient in mine.items():
        # An element that is small beside its tensor's largest carries that one's rounding.
        scale = other[name].abs().max().item()
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=1e-5 * scale, msg=name)


def test_padding_does_not_count():
    model = tiny_model("mixtral").train()
    module = module_of(model)
    short, long = batch_of([9]), batch_of([9, 30])
    alone = module(short, torch.zeros(len(short.rows), 32), 1)[1].router_aux
    both = module(long, torch.zeros(len(long.rows), 32), 1)[1].router_aux
    padded = type(short)(
        torch.nn.functional.pad(short.input_ids, (0, 21), value=5),
        ((9, 21),),
        torch.nn.functional.pad(short.labels, (0, 21), value=-100),
        (9,),
    )
    again = module(padded, torch.zeros(len(padded.rows), 32), 1)[1].router_aux
    assert alone.item() == pytest.approx(again.item(), rel=1e-5)
    assert alone.item() != pytest.approx(both.item(), rel=1e-3)


def test_a_micro_batch_of_nothing_but_padding_adds_nothing():
    module = module_of(tiny_model("qwen3_moe").train())
    loss, out = module(empty_micro_batch(1, 8, 0), torch.zeros(0, 32), 1)
    loss.backward()
    assert out.router_aux.item() == 0 == loss.item()


def test_micro_batches_are_averaged_and_evaluation_has_none():
    model = tiny_model("mixtral").train()
    batch = batch_of([11, 7])
    states = torch.zeros(len(batch.rows), 32)
    one, four = (module_of(model, micro_batches=count)(batch, states, 1)[1].router_aux for count in (1, 4))
    assert one.item() == pytest.approx(4 * four.item())
    with torch.no_grad():
        assert module_of(model)(batch, states, 1, evaluation=True)[1].router_aux == 0


def test_recomputed_layers_give_the_same_gradients():
    models = [tiny_model("qwen3_moe").train() for _ in range(2)]
    models[1].gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of([11, 7])
    for model in models:
        module_of(model)(batch, torch.zeros(len(batch.rows), 32), 1)[0].backward()
    first, second = map(gradients, models)
    assert all(torch.allclose(first[name], second[name], rtol=1e-5, atol=1e-7) for name in first)


def test_which_weight_is_taken():
    moe = tiny_model("qwen3_moe", router_aux_loss_coef=0.02)
    assert router_loss_of(moe, None).weight == 0.02
    assert router_loss_of(moe, 0.5).weight == 0.5
    assert router_loss_of(moe, 0.0) is None
    assert router_loss_of(tiny_model("qwen3_moe", router_aux_loss_coef=0.0), None) is None
    assert router_loss_of(tiny_model("llama"), None) is None
    assert router_loss_of(tiny_model("deepseek_v3"), None) is None
    with pytest.raises(UserError, match="student.router_aux_weight: LlamaForCausalLM has no load-balancing loss"):
        router_loss_of(tiny_model("llama"), 0.1)
