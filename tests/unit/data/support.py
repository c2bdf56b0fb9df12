"""Small real tokenizers and files, built here: no test of this room needs a network."""

from __future__ import annotations

import json
from types import SimpleNamespace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# Of the shape of SmolLM2's: a system message of its own, ChatML turns, a line break after the end token; and tools.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message.content %}{{ message['content'] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + (call | tojson) + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_WITH_MARKERS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def build_byte_tokenizer(
    merges: list[tuple[str, str]] = (), bos: bool = False, template: str | None = CHATML, eos: bool = True
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: a token a byte, but for `merges` (applied across words); pad == eos, as in SmolLM2."""
    alphabet = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", vocab["<|im_start|>"])]
        )
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"} if eos else {}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", unk_token="<|endoftext|>", **ends
    )
    fast.chat_template = template
    return fast


def build_word_tokenizer(words: str = "a b c d e f g h") -> PreTrainedTokenizerFast:
    """Words between spaces, marked at their beginning as SentencePiece does."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"▁{word}": index for index, word in enumerate(words.split(), 2)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def build_letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token a letter, with SentencePiece's mark before each word."""
    vocab = {token: index for index, token in enumerate(["<unk>", "</s>", "▁", *"abcdefgh"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def data_config(train, **settings) -> SimpleNamespace:
    """The `data` section with its defaults."""
    defaults = {"eval": 0.5, "format": "auto", "sequence_length": 16, "packing": "auto"}
    return SimpleNamespace(train=str(train), **{**defaults, **settings})


def write_jsonl(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)
