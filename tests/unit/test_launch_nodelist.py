"""SLURM's short lists of hosts and counts, spelled out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disaggkd_cli.nodelist import expand_counts, expand_hosts


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("node7", ["node7"]),
        ("node[01-03,7],gpu-a[1,3]", ["node01", "node02", "node03", "node7", "gpu-a1", "gpu-a3"]),
        ("a, b", ["a", "b"]),
        ("r[1-2]n[08-10]s", ["r1n08s", "r1n09s", "r1n10s", "r2n08s", "r2n09s", "r2n10s"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n]1[", "n[[1]]", "n[1-x]", "n[3-1]", "n[]", "n[1-999999999]",
                                  "n[1-9999]m[1-9999]"])  # fmt: skip
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(ValueError):
        expand_hosts(text)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True), st.integers(0, 4))
def test_numbers_in_brackets_are_names_one_by_one(numbers, width):
    names = [str(number).zfill(width) for number in numbers]
    assert expand_hosts(f"a[{','.join(names)}]b,last") == [f"a{name}b" for name in names] + ["last"]


@pytest.mark.parametrize("text, counts", [("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x1), 8(x3)", [1, 2, 8, 8, 8])])
def test_counts(text, counts):
    assert expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(2)", "4(x)", "4,,3", "-1", "1(x9999999)"])
def test_what_is_no_list_of_counts(text):
    with pytest.raises(ValueError):
        expand_counts(text)
