"""Memory of one rank, component by component and phase by phase."""

from disaggkd_cli.planner.memory.ranks import Phase, RankMemory, colocated_rank, student_rank, teacher_rank

__all__ = ["Phase", "RankMemory", "colocated_rank", "student_rank", "teacher_rank"]
