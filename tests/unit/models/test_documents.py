"""A forward asks no GPU whether documents share rows when the host knows it, and computes the same."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers.masking_utils as masking
import transformers.modeling_flash_attention_utils as flash
from torch.utils._python_dispatch import TorchDispatchMode

from disaggkd_cli.config import LossConfig
from disaggkd_cli.config.attention import FLASH
from disaggkd_cli.data import Sequence, collate, position_ids_from_lengths
from disaggkd_cli.models import backbone_of, head_of, requested, stages
from disaggkd_cli.models.attention import document_boundaries
from disaggkd_cli.models.documents import documents_known
from disaggkd_cli.models.head import hidden_states, states_and_router_logits
from disaggkd_cli.replica import run_stages
from disaggkd_cli.training import sources, student_module
from disaggkd_cli.transport.faults import Faults
from tests.support.models import VOCABULARY, tiny_model

ALONE, PACKED = ((9,), (9,)), ((5, 4), (9,), (1, 1, 7))
aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten._unique2, aten.equal)
LAYOUTS = pytest.mark.parametrize("documents", [ALONE, PACKED, ((1,),), ((2, 1, 1),)], ids=str)


def ids_and_positions(documents):
    positions = position_ids_from_lengths(documents)
    return torch.randint(0, VOCABULARY, positions.shape), positions


@LAYOUTS
def test_documents_are_numbered_as_transformers_does(documents):
    positions = position_ids_from_lengths(documents)
    own = masking.find_packed_sequence_indices(positions)
    with documents_known(documents):
        known = masking.find_packed_sequence_indices(positions)
    assert (own is None) == (known is None) == all(len(row) == 1 for row in documents)
    assert own is None or torch.equal(own, known)
    assert masking.find_packed_sequence_indices(position_ids_from_lengths(PACKED)) is not None  # known no more


@LAYOUTS
def test_boundaries_are_those_that_positions_tell(documents):
    backbone = backbone_of(tiny_model("llama"))
    backbone.config._attn_implementation = FLASH
    positions = position_ids_from_lengths(documents)
    read = document_boundaries(backbone, positions)
    with documents_known(documents):
        known = document_boundaries(backbone, positions)
    assert read.keys() == known.keys()
    for name in read:
        assert torch.equal(torch.as_tensor(read[name]), torch.as_tensor(known[name])), name
    if read:
        assert known["cu_seq_lens_q"].dtype == torch.int32


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("documents", [ALONE, PACKED], ids=["one a row", "packed"])
def test_the_states_are_the_same_bits(family, documents):
    model = tiny_model(family)
    ids, positions = ids_and_positions(documents)
    states = hidden_states(backbone_of(model), ids, positions)
    assert torch.equal(states, hidden_states(backbone_of(model), ids, positions, documents))
    if family == "qwen3_moe":
        assert torch.equal(states, states_and_router_logits(backbone_of(model), ids, positions, documents)[0])


class HostRead(AssertionError):
    """The host would have waited for values of a GPU."""


class NoHostReads(TorchDispatchMode):
    """Raises where the host needs a tensor's values. Fake tensors would not show it: transformers takes them for a
    trace, in which it reads nothing."""

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket in READS:
            raise HostRead(str(function))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("documents", [ALONE, PACKED], ids=["one a row", "packed"])
def test_a_models_forward_reads_no_tensor_on_the_host(family, documents):
    backbone = backbone_of(tiny_model(family))
    ids, positions = ids_and_positions(documents)
    with NoHostReads():
        hidden_states(backbone, ids, positions, documents)
        with pytest.raises(HostRead):
            hidden_states(backbone, ids, positions)


@pytest.mark.parametrize(("documents", "asks"), [(((9,),), False), (None, True)], ids=["known", "not known"])
def test_flash_attention_of_one_row_does_not_ask_in_each_layer(documents, asks):
    positions = torch.arange(9)[None]
    with documents_known(documents):
        assert isinstance(flash._is_packed_sequence(positions, 1), torch.Tensor) is asks


def test_whoever_computes_states_says_which_documents_it_has(monkeypatch):
    told = []

    def watched(backbone, ids, positions, documents=None):
        told.append(documents)
        return hidden_states(backbone, ids, positions, documents)

    model, student = tiny_model("llama"), tiny_model("llama")
    backbone = backbone_of(model)
    anatomy = stages.anatomy_of(backbone, VOCABULARY)
    for module in (requested, sources, stages, student_module):
        monkeypatch.setattr(module, "hidden_states", watched)
    rows = [Sequence(np.arange(9, dtype=np.int32), np.arange(9, dtype=np.int32), row) for row in PACKED]
    batch, cpu = collate(rows, pad_id=0), torch.device("cpu")
    requested.requested_states(backbone, batch.input_ids, batch.flat_document_lengths, batch.rows, cpu)
    states = sources.ColocatedSource(backbone, iter(()), cpu)._forward(batch)
    module = student_module.StudentModule(student, head_of(model).detached(), LossConfig())
    module(batch, states, 27)
    module(batch, None, 27)
    stage = stages.Stage(backbone, anatomy, 0, model.config.num_hidden_layers)
    request = SimpleNamespace(input_ids=batch.input_ids, document_lengths=batch.flat_document_lengths, rows=batch.rows)
    run_stages.stage_forward(stage, cpu, Faults("teacher 0"))(request, None)
    assert told == [batch.document_lengths] * 5 == [PACKED] * 5
