"""Requests that share a forward: what each gets is what it would have got alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.transport import Request, merge_requests, split_states
from disaggkd_cli.transport.protocol import request_body


@st.composite
def same_length_requests(draw):
    """One to five requests of [1..3, S] tokens with their own documents and rows, some without any row."""
    sequence = draw(st.integers(1, 9))
    requests = []
    for number in range(draw(st.integers(1, 5))):
        batch = draw(st.integers(1, 3))
        ids = torch.tensor(draw(st.lists(st.integers(0, 99), min_size=batch * sequence, max_size=batch * sequence)))
        lengths = []
        for _ in range(batch):
            first = draw(st.integers(1, sequence))
            lengths += [first, sequence - first] if first < sequence else [sequence]
        rows = sorted(draw(st.sets(st.integers(0, batch * sequence - 1))))
        requests.append(
            Request(
                number,
                ids.view(batch, sequence).int(),
                torch.tensor(lengths, dtype=torch.int32),
                torch.tensor(rows, dtype=torch.int32),
            )
        )
    return requests


def states_of(request):
    """[R, 2] float64 that tell each row's token, and its place in its document."""
    places = torch.cat([torch.arange(int(length)) for length in request.document_lengths])
    both = torch.stack([request.input_ids.reshape(-1).double(), places.double()], dim=1)
    return both[request.rows.long()]


@given(same_length_requests())
def test_the_merged_answer_split_again_is_each_ones_own(requests):
    merged = merge_requests(requests)
    request_body(merged)  # raises for shapes, lengths or rows that do not fit together
    assert merged.num_tokens == sum(request.num_tokens for request in requests)
    parts = split_states(states_of(merged), requests)
    assert len(parts) == len(requests)
    for request, part in zip(requests, parts, strict=True):
        assert torch.equal(part, states_of(request))
        assert part.is_contiguous()


def test_a_request_alone_stays_as_it_is():
    ids, lengths, rows = torch.ones(2, 3), torch.tensor([3, 3]), torch.tensor([1, 4])
    merged = merge_requests([Request(7, ids, lengths, rows)])
    assert merged.request_id == 7
    assert all(map(torch.equal, (merged.input_ids, merged.document_lengths, merged.rows), (ids, lengths, rows)))


def test_sequences_of_two_lengths_do_not_merge():
    requests = [Request(n, torch.ones(1, n), torch.tensor([n]), torch.tensor([0])) for n in (3, 4)]
    with pytest.raises(ValueError, match="equally long"):
        merge_requests(requests)
    with pytest.raises(ValueError, match="equally long"):
        merge_requests([])


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2,)])
def test_an_answer_of_another_number_of_rows_is_an_error(shape):
    requests = [Request(n, torch.ones(1, 5), torch.tensor([5]), torch.tensor([n])) for n in range(2)]
    with pytest.raises(ValueError, match="2 rows were asked for"):
        split_states(torch.zeros(shape), requests)
