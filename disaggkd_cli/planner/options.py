"""What `disaggkd plan` may be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line, which documents them."""

    json: bool = False
    html: str | None = None
    explain: str | None = None
    gpus: int | None = None
    hardware: str | None = None
    sweep: list[str] = field(default_factory=list)
    simulate: bool = False
    verify: bool = False
    measure: str | None = None
    calibrate: str | None = None
    output: str | None = None
