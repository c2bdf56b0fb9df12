import numpy as np
import pytest

from disaggkd_cli.data.layout.flat_documents import join, next_token_labels
from disaggkd_cli.data.layout.micro_batch import IGNORE
from disaggkd_cli.data.tokenise.encoding import EncodedDocument


@pytest.mark.parametrize(
    "ids, counts, labels",
    [
        ([5, 6, 7, 8], "0011", [IGNORE, 7, 8, IGNORE]),  # a prompt of two, an answer of two
        ([5, 6, 7, 8], "0010", [IGNORE, 7, IGNORE, IGNORE]),  # an answer of one token, in the middle
        ([5, 6], "01", [6, IGNORE]),  # an answer of one token, at the end
        ([5, 6], "10", [IGNORE, IGNORE]),  # the first token follows nothing
        ([5], "1", [IGNORE]),
        ([7, 7, 7], "111", [7, 7, IGNORE]),
    ],
)
def test_a_label_is_the_token_that_follows_where_that_one_counts(ids, counts, labels):
    supervised = np.asarray([count == "1" for count in counts])
    assert next_token_labels(np.asarray(ids, np.int32), supervised).tolist() == labels


def test_documents_are_joined_without_a_label_from_one_to_the_next():
    texts = ([1, 2], [3], [4, 5])
    documents = join(EncodedDocument(np.asarray(ids, np.int32), np.ones(len(ids), bool), True) for ids in texts)
    assert documents.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert documents.labels.tolist() == [2, IGNORE, IGNORE, 5, IGNORE]
    assert documents.ends.tolist() == [2, 3, 5]
    assert documents.supervised_counts.tolist() == [1, 0, 1]
    chosen = documents.select(np.asarray([2, 0]))
    assert chosen.input_ids.tolist() == [4, 5, 1, 2] and chosen.ends.tolist() == [2, 4]
    assert len(join([])) == 0
