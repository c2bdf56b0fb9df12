"""Write disaggkd_cli/layouts/tensor_plans.json: what the installed transformers cuts in the layers of each causal LM.

python scripts/tensor_plans.py        # after an upgrade of transformers; takes some 20 seconds
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections import defaultdict

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from disaggkd_cli.layouts.tensor_plans import FILE
from disaggkd_cli.models import backbone_of

_LAYERS = ("layers.*.", "h.*.")


def read_plans() -> dict[str, dict[str, str]]:
    """model_type (of the text part too) -> the plan of one layer, as transformers' configuration classes give it."""
    found = {}
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        outer = CONFIG_MAPPING[model_type]
        config = outer.sub_configs.get("text_config", outer)
        config = outer if config.__name__ == "AutoConfig" else config
        plan = {}
        for name, style in (config.base_model_tp_plan or {}).items():
            for start in _LAYERS:
                if name.startswith(start):
                    plan[name.removeprefix(start)] = style
        found[model_type] = found[config.model_type] = plan
    return found


def layers_share_parameters(model_type: str) -> bool:
    """Whether a model of this class holds one parameter under two names in its backbone; False where none can be
    built from defaults."""
    try:
        with torch.device("meta"):
            backbone = backbone_of(AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type]()))
    except Exception as error:  # classes raise of many kinds where defaults do not go together
        print(f"{model_type}: not looked at, since none can be built ({type(error).__name__})", file=sys.stderr)
        return False
    return len(list(backbone.parameters())) != len(list(backbone.named_parameters(remove_duplicate=False)))


def contents() -> dict:
    """The file's contents."""
    types = defaultdict(list)
    for model_type, plan in sorted(read_plans().items()):
        types[tuple(plan.items())].append(model_type)
    return {
        "source": "scripts/tensor_plans.py",
        "transformers": transformers.__version__,
        "layers_share_parameters": [name for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
                                    if layers_share_parameters(name)],
        "plans": [{"model_types": names, "layer": dict(plan)} for plan, names in types.items()],
    }  # fmt: skip


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    FILE.write_text(json.dumps(contents(), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}")
