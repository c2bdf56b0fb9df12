"""Which layers a student keeps: the cheap way of trying a removal is a real cut, and the choice is greedy."""

import copy

import pytest
import torch

from disaggkd_cli.data import MicroBatch
from disaggkd_cli.errors import UserError
from disaggkd_cli.losses import reference_kd_loss
from disaggkd_cli.models import backbone_of, head_of, hidden_states, student_from_layers
from disaggkd_cli.models.choose_layers import best_layers, removals
from tests.support.models import VOCABULARY, tiny_model


def batch(rows: int = 2, length: int = 11) -> MicroBatch:
    ids = torch.randint(3, VOCABULARY, (rows, length))
    labels = torch.roll(ids, -1, 1)
    labels[:, -1] = -100
    return MicroBatch(ids, ((length,),) * rows, labels)


def kd_of_cut(model, kept, texts) -> float:
    """The oracle: a model that really has these layers only, and the loss over all logits in float64."""
    cut = student_from_layers(model, kept, torch.float32).eval()
    total = rows = 0.0
    for text in texts:
        states = [
            hidden_states(backbone_of(one), text.input_ids, text.position_ids).flatten(0, 1)[text.rows].double()
            for one in (cut, model)
        ]
        head = head_of(copy.deepcopy(model).double())
        total += reference_kd_loss(states[0], head, states[1], head, None).kd.item() * len(text.rows)
        rows += len(text.rows)
    return total / rows


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "cohere2"])
@torch.no_grad()
def test_each_loss_is_that_of_a_model_without_the_layers(family):
    model = tiny_model(family).eval()
    whole = copy.deepcopy(model)
    texts = [batch(), batch(1, 7)]
    left = list(range(4))
    for removal in removals(model, texts):
        left.remove(removal.layer)
        if family == "cohere2":  # its configuration ties layer kinds to numbers; the cut model is another one
            assert removal.kd >= 0
        else:
            assert removal.kd == pytest.approx(kd_of_cut(whole, left, texts), rel=2e-3, abs=1e-6)
    assert len(left) == 1


@torch.no_grad()
def test_the_first_removal_is_the_cheapest_of_all():
    model = tiny_model("llama").eval()
    texts = [batch()]
    costs = {layer: kd_of_cut(model, sorted(set(range(4)) - {layer}), texts) for layer in range(4)}
    first = next(removals(model, texts))
    assert first.tried == 4
    assert costs[first.layer] == pytest.approx(min(costs.values()), rel=1e-4, abs=1e-7)


@torch.no_grad()
def test_a_layer_that_does_nothing_goes_first_and_the_model_is_as_it_was():
    model = tiny_model("llama").eval()
    idle = model.model.layers[2]
    for name, parameter in idle.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    before = model(torch.arange(3, 20)[None]).logits
    lines = []
    assert best_layers(model, [batch()], 3, lines.append) == [0, 1, 3]
    assert "layer 2 goes: 3 of 4 are left, KD 0.0000" in lines[0]
    assert torch.equal(model(torch.arange(3, 20)[None]).logits, before)
    assert model.model.layers[2] is idle


def test_the_same_texts_give_the_same_layers():
    model, texts = tiny_model("llama").eval(), [batch(3, 16)]
    chosen = [best_layers(model, texts, 2, lambda line: None) for _ in range(2)]
    assert chosen[0] == chosen[1] and len(chosen[0]) == 2


def test_texts_without_supervised_rows_are_refused():
    ids = torch.full((1, 5), 4)
    empty = MicroBatch(ids, ((5,),), torch.full((1, 5), -100))
    with pytest.raises(UserError, match="supervised rows"):
        best_layers(tiny_model("llama").eval(), [empty], 2, lambda line: None)


def test_a_family_whose_layers_return_more_is_refused():
    model = tiny_model("llama").eval()
    model.model.layers[1].forward = lambda states, **others: (states, states)
    with pytest.raises(UserError, match="name the layers, or every_N"):
        best_layers(model, [batch()], 2, lambda line: None)
