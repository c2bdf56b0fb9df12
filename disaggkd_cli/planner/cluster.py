"""From `hardware` of a config, the catalogue and `--hardware` to the cluster that is planned: GPUs, network, prices."""

from __future__ import annotations

from disaggkd_cli.config import Config
from disaggkd_cli.config.schema import HardwareConfig
from disaggkd_cli.planner.hardware import Gpu, load_catalogue
from disaggkd_cli.planner.workload import Cluster


def cluster_of(config: Config, hardware: str | None = None) -> Cluster:
    """Return the cluster that `config` describes.

    Args:
        config: the typed config.
        hardware: a GPU or node of the catalogue that takes the place of the config's GPUs. A node brings its size and
            network, a GPU those of its usual machine where the config gives none. A price of the config is that of the
            config's own GPU and stays behind.

    Raises:
        UserError: an unknown GPU or node, or a catalogue that cannot be read.
    """
    section = config.hardware
    catalogue = load_catalogue(section.catalogue)
    name, per_node, nic = section.gpu, section.gpus_per_node, section.nic_gbps
    if hardware is not None and hardware not in catalogue.gpus:
        node = catalogue.node(hardware)
        name, per_node, nic = node.gpu, node.gpus_per_node, node.nic_gbps
    elif hardware is not None:
        name = hardware
    student = catalogue.gpu(name, "hardware.gpu")
    teacher = student
    if hardware is None and section.teacher_gpu is not None:
        teacher = catalogue.gpu(section.teacher_gpu, "hardware.teacher_gpu")
    prices = _prices(section, student, teacher)
    return Cluster(
        student_gpu=student,
        teacher_gpu=teacher,
        gpus_per_node=student.gpus_per_node if per_node is None else per_node,
        nic_gb_per_s=(min(student.nic_gbps, teacher.nic_gbps) if nic is None else nic) / 8,
        device="cpu" if config.launch.device == "cpu" else "cuda",
        student_price=prices[0],
        teacher_price=prices[1],
        price_source=_price_source(section, student, teacher),
    )


def _prices(section: HardwareConfig, student: Gpu, teacher: Gpu) -> tuple[float | None, float | None]:
    """Price of an hour of the student's GPU and of the teacher's."""
    of_student = student.price_per_hour
    if section.gpu_hour_price is not None and student.name == section.gpu:
        of_student = section.gpu_hour_price
    of_teacher = of_student if teacher.name == student.name else teacher.price_per_hour
    if section.teacher_gpu_hour_price is not None and teacher.name == (section.teacher_gpu or section.gpu):
        of_teacher = section.teacher_gpu_hour_price
    return of_student, of_teacher


def _price_source(section: HardwareConfig, student: Gpu, teacher: Gpu) -> str:
    """Where the prices are from, for the reader of the cost."""
    if section.gpu_hour_price is not None or section.teacher_gpu_hour_price is not None:
        return "as the config gives"
    dates = sorted({gpu.price_date for gpu in (student, teacher) if gpu.price_date})
    return f"catalogue, as of {' and '.join(dates)}" if dates else ""
