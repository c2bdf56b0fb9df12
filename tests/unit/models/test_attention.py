"""Attention kernels by name: used, or refused with the mend."""

from __future__ import annotations

import pytest
import torch

from disaggkd_cli.config import Config, LaunchConfig, StudentConfig, TeacherConfig, check
from disaggkd_cli.errors import UserError
from disaggkd_cli.models import attention, decide_packing, set_attention
from tests.support.models import tiny_model


def test_named_kernels_give_the_same_states():
    ids = torch.arange(3, 15)[None]
    model = tiny_model("llama")
    states = {}
    for name in ("eager", "sdpa", "auto"):
        set_attention(model, name, "student.attention")
        states[name] = model(ids, use_cache=False).logits
        assert model.config._attn_implementation == ("sdpa" if name == "auto" else name)
    torch.testing.assert_close(states["eager"], states["sdpa"])


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: False)
    with pytest.raises(UserError, match="student.attention: flash_attention_2 needs the flash-attn package"):
        set_attention(tiny_model("llama"), "flash_attention_2", "student.attention")


def test_a_class_without_such_kernels_is_refused(monkeypatch):
    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", _no_such_kernels)
    with pytest.raises(UserError, match="teacher.attention: LlamaForCausalLM cannot use sdpa: no such kernels"):
        set_attention(model, "sdpa", "teacher.attention")


def _no_such_kernels(self, name):
    raise ValueError("no such\nkernels")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(student=StudentConfig(attention="flash")), "student.attention: 'flash' is not known"),
        (Config(student=StudentConfig(attention="flash_attention_2", dtype="float32")), "set student.dtype=bfloat16"),
        (
            Config(teacher=TeacherConfig(attention="flash_attention_2"), launch=LaunchConfig(device="cpu")),
            "teacher.attention: flash_attention_2 needs a GPU",
        ),
    ],
)
def test_what_cannot_be_is_refused(config, message):
    assert any(message in problem for problem in check(config))


def test_flash_attention_turns_automatic_packing_off():
    pack, reason = decide_packing(Config(teacher=TeacherConfig(attention="flash_attention_2")))
    assert not pack
    assert "flash_attention_2" in reason
