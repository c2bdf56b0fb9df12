"""What is traced where the run's own attention kernels need a GPU: kernels that keep as much, without masks."""

import pytest

from disaggkd_cli.config import Config
from disaggkd_cli.planner import memory
from disaggkd_cli.planner.inputs import workload_of
from disaggkd_cli.planner.verify import cut


def cut_of(attention, layers=6):
    config = Config()
    config.teacher.model = config.student.model = "qwen3-8b"
    config.data.packing, config.student.attention = "on", attention
    return cut(workload_of(config), layers)


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_kernels_of_gpus_are_traced_as_others_that_build_no_mask(attention):
    work = cut_of(attention)
    assert (work.student_attention, work.packed) == ("sdpa", False)
    on_gpu = work.with_(student_attention=attention, packed=True)
    assert memory.student_rank(work, fused=True).peak_bytes == memory.student_rank(on_gpu, fused=True).peak_bytes


def test_other_names_are_traced_as_they_are():
    assert [(work.student_attention, work.packed) for work in map(cut_of, ("auto", "eager"))] == [
        ("auto", True), ("eager", True),
    ]  # fmt: skip
    assert len(cut_of("auto", 9).student.layers) == 9 and len(cut_of("auto").student.layers) == 6
