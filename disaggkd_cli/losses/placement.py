"""Which should travel between the ranks of a student: the rows to the heads, or the heads to the rows? Imports no
torch.

With the heads gathered, FSDP brings the student's whole head to each rank before its loss and reduces the head's
gradient after it, for every micro-batch; the teacher's head lies whole on each rank. With the vocabulary cut, each rank
keeps its shard and sees the rows of all ranks. The bytes of the first do not depend on the rows, those of the second do
not depend on the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadTraffic:
    """One micro-batch of one rank in a group that shares the vocabulary.

    Attributes:
        ranks: G, ranks of the group.
        rows, tokens: R supervised rows and T tokens of one rank.
        vocabulary: V of the student.
        student_width, teacher_width: H_s and H_t.
        student_bytes: an element of the student's compute dtype; `teacher_bytes`: of the teacher's hidden states.
        tied: the embedding is the head's own weight, so its look-ups travel too.
        head_trained: the head has a gradient.
    """

    ranks: int
    rows: int
    tokens: int
    vocabulary: int
    student_width: int
    teacher_width: int
    student_bytes: int
    teacher_bytes: float
    tied: bool
    head_trained: bool

    @property
    def heads_bytes(self) -> float:
        """Sent by one rank when heads are gathered: the head's all-gather, and its gradient's reduce-scatter in
        float32."""
        whole = self.vocabulary * self.student_width * (self.student_bytes + 4 * self.head_trained)
        return whole * (self.ranks - 1) / self.ranks

    @property
    def rows_bytes(self) -> float:
        """Sent by one rank when rows are gathered: hidden states of both models, dH reduced, and for a tied weight the
        embedding's rows and their gradients."""
        others, student_row = self.ranks - 1, self.student_width * self.student_bytes
        rows = others * self.rows * (3 * student_row + self.teacher_width * self.teacher_bytes)
        lookups = others * self.tokens * student_row * (1 + self.head_trained) if self.tied else 0
        return rows + lookups

    @property
    def rows_should_travel(self) -> bool:
        """What `loss.vocabulary_parallel: auto` decides: whichever sends fewer bytes; never for one rank."""
        return self.ranks > 1 and self.rows_bytes < self.heads_bytes
