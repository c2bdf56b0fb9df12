"""The loss of hidden states against its definition, row by row in float64, gradients by hand."""

import pytest
import torch

from disaggkd_cli.losses.arguments import LossArgumentError
from disaggkd_cli.losses.hidden import fresh_projection, hidden_loss

SHAPES = [(1, 1, 1), (7, 5, 3), (13, 3, 11), (2, 17, 17)]


def by_hand(student, teacher, projection, kind, tokens):
    """Value and both gradients from closed forms, no autograd: a row is (1 - cos) or |d|^2 / H_t."""
    value, of_student, of_projection = 0.0, torch.zeros_like(student), torch.zeros_like(projection)
    for row, (states, wanted) in enumerate(zip(student, teacher, strict=True)):
        projected = projection @ states
        if kind == "cosine":
            length, other = projected.dot(projected) ** 0.5, wanted.dot(wanted) ** 0.5
            similarity = projected.dot(wanted) / (length * other)
            value += (1 - similarity).item() / tokens
            gradient = (similarity * projected / length**2 - wanted / (length * other)) / tokens
        else:
            value += ((projected - wanted) ** 2).sum().item() / len(wanted) / tokens
            gradient = 2 * (projected - wanted) / len(wanted) / tokens
        of_student[row] = projection.T @ gradient
        of_projection += torch.outer(gradient, states)
    return value, of_student, of_projection


@pytest.mark.parametrize("kind", ["cosine", "mse"])
@pytest.mark.parametrize(("rows", "student_width", "teacher_width"), SHAPES)
def test_value_and_gradients_are_those_of_the_definition(rows, student_width, teacher_width, kind):
    student = torch.randn(rows, student_width, dtype=torch.float64)
    teacher = torch.randn(rows, teacher_width, dtype=torch.float64)
    projection = torch.randn(teacher_width, student_width, dtype=torch.float64)
    value, of_student, of_projection = by_hand(student, teacher, projection, kind, 29)
    student.requires_grad_(), projection.requires_grad_(), teacher.requires_grad_()
    loss = hidden_loss(student, teacher, projection, kind, 29)
    loss.backward()
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(value, rel=1e-12, abs=1e-14)
    torch.testing.assert_close(student.grad, of_student, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(projection.grad, of_projection, rtol=1e-10, atol=1e-12)
    assert teacher.grad is None, "the teacher is frozen"


@pytest.mark.parametrize("kind", ["cosine", "mse"])
def test_equal_states_are_no_distance_and_no_rows_no_loss(kind):
    states = torch.randn(5, 9, dtype=torch.float64)
    assert abs(hidden_loss(states, states, torch.eye(9, dtype=torch.float64), kind, 5).item()) < 1e-14
    projection = torch.randn(4, 9, requires_grad=True)
    loss = hidden_loss(torch.zeros(0, 9), torch.zeros(0, 4), projection, kind, 1)
    loss.backward()
    assert loss.item() == 0 and not projection.grad.any()


def test_16_bits_are_summed_in_float32():
    student, projection = torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)
    teacher = torch.randn(6, 4, dtype=torch.bfloat16)
    loss = hidden_loss(student, teacher, projection, "mse", 6)
    wanted = hidden_loss(student.double(), teacher.double(), projection.double(), "mse", 6)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=0.02)


def test_a_fresh_projection_is_a_function_of_the_seed():
    torch.manual_seed(1)
    first = fresh_projection(16, 3, 42)
    torch.manual_seed(2)
    assert torch.equal(first, fresh_projection(16, 3, 42)) and not torch.equal(first, fresh_projection(16, 3, 43))
    assert first.shape == (3, 16) and first.dtype == torch.float32 and 0 < first.abs().max() <= 0.25


@pytest.mark.parametrize(
    ("student", "teacher", "projection", "kind", "words"),
    [
        ((4, 3), (5, 2), (2, 3), "mse", "4 rows and teacher_hidden 5"),
        ((4, 3), (4, 2), (3, 2), "mse", r"must be \[2, 3\]"),
        ((4, 3), (4, 2), (2, 3), "cosin", "is unknown"),
        ((4, 3, 1), (4, 2), (2, 3), "mse", "must be .rows, width"),
    ],
)
def test_wrong_arguments_are_named(student, teacher, projection, kind, words):
    with pytest.raises(LossArgumentError, match=words):
        hidden_loss(torch.zeros(student), torch.zeros(teacher), torch.zeros(projection), kind, 4)
