"""Data sets on the Hub, or what `datasets` keeps of them on this machine."""

from __future__ import annotations

from typing import Any

from disaggkd_cli.errors import UserError


def load_hub(name: str, config: str | None, split: str | None) -> Any:
    """One split of a data set; raises what `datasets` raises."""
    import datasets

    return datasets.load_dataset(name, config, split=split)


def hub_splits(name: str, config: str | None, key: str) -> list[str]:
    """Names of the splits of a data set.

    Raises:
        UserError: it can't be asked.
    """
    import datasets

    try:
        return datasets.get_dataset_split_names(name, config)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{key}: the splits of {name} can't be asked for ({reason})") from error
