"""The mask of a conversation, against what a person would mark."""

import numpy as np
import pytest

from disaggkd_cli.data.read.documents import Conversation, PromptCompletion, Text
from disaggkd_cli.data.tokenise.chat import ChatEncoder, tokens_in_spans
from disaggkd_cli.data.tokenise.encoding import DocumentEncoder
from disaggkd_cli.data.tokenise.template import ChatTemplate
from disaggkd_cli.errors import UserError

from ..support import CHATML, CHATML_WITH_MARKERS, build_byte_tokenizer, build_letter_tokenizer


def turns(*pairs, **extra):
    return Conversation("here", [{"role": role, "content": content} for role, content in pairs], **extra)


def encode_conversation(conversation, tokenizer, template):
    return ChatEncoder(ChatTemplate(tokenizer, template)).encode(conversation)


def marked(tokenizer, conversation, template=CHATML):
    """The whole text with what counts in ⟦ ⟧."""
    ids, said = encode_conversation(conversation, tokenizer, template)
    text, inside = "", False
    for index, counts in zip(ids, said, strict=True):
        if counts != inside:
            text += "⟧" if inside else "⟦"
            inside = bool(counts)
        text += tokenizer.decode([index])
    return text + ("⟧" if inside else "")


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_MARKERS])
def test_only_what_the_assistant_says_counts_and_the_end_of_its_turn(byte_tokenizer, template):
    several = turns(("system", "S"), ("user", "Hi"), ("assistant", "Yo!"), ("user", "So?"), ("assistant", "x"))
    assert marked(byte_tokenizer, several, template) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Yo!<|im_end|>⟧\n<|im_start|>user\nSo?<|im_end|>\n"
        "<|im_start|>assistant\n⟦x<|im_end|>⟧\n"
    )


def test_a_system_message_that_the_template_adds_does_not_count(byte_tokenizer):
    assert marked(byte_tokenizer, turns(("user", "Hi"), ("assistant", "Yo"))) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n⟦Yo<|im_end|>⟧\n"
    )


def test_tool_calls_count_and_tool_results_do_not(byte_tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        call,
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
        {"role": "user", "content": "Thanks"},
    ]
    assert marked(byte_tokenizer, Conversation("here", messages, tools=[{"name": "f"}])) == (
        '<|im_start|>tools\n[{"name": "f"}]<|im_end|>\n<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n'
        '<|im_start|>assistant\n⟦<call>{"name": "f"}</call><|im_end|>⟧\n<|im_start|>tool\n7<|im_end|>\n'
        "<|im_start|>assistant\n⟦It is 7.<|im_end|>⟧\n<|im_start|>user\nThanks<|im_end|>\n"
    )


def test_an_empty_answer_has_only_its_end(byte_tokenizer):
    text = marked(byte_tokenizer, turns(("system", "S"), ("user", "Q"), ("assistant", "")))
    assert text.endswith("<|im_start|>assistant\n⟦<|im_end|>⟧\n")


def test_text_of_several_bytes_a_character_counts_as_a_whole(byte_tokenizer):
    ids, said = encode_conversation(turns(("user", "é"), ("assistant", "né🙂")), byte_tokenizer, CHATML)
    assert byte_tokenizer.decode(ids[said]) == "né🙂<|im_end|>"


def test_white_space_at_the_border_of_an_answer_counts():
    # Tokens of blanks alone, whose offsets are trimmed to nothing.
    tokenizer = build_byte_tokenizer(merges=[("Ġ", "Ġ"), ("ĠĠ", "Ġ")])
    ids, said = encode_conversation(turns(("user", "Q   "), ("assistant", "   x   ")), tokenizer, CHATML)
    assert tokenizer.decode(ids[said]) == "   x   <|im_end|>"


def test_a_token_over_the_beginning_of_an_answer_counts_as_it_does_in_transformers_own_mask():
    tokenizer = build_byte_tokenizer(merges=[("Ċ", "Ċ")])
    for template in (CHATML, CHATML_WITH_MARKERS):
        ids, said = encode_conversation(turns(("system", "S"), ("assistant", "\nx")), tokenizer, template)
        assert tokenizer.decode(ids[said]) == "\n\nx<|im_end|>"


def test_white_space_that_follows_an_answer_without_an_end_token_counts(byte_tokenizer):
    plain = "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    assert marked(byte_tokenizer, turns(("user", "Q"), ("assistant", "A")), plain) == "user: Q\nassistant: ⟦A\n⟧"


def test_a_template_that_leaves_out_a_turn_once_others_follow_is_refused(byte_tokenizer):
    said = "{{ message['content'] }}"
    forgets = CHATML.replace(said, "{% if loop.last or message.role != 'assistant' %}" + said + "{% endif %}")
    single = turns(("user", "Q"), ("assistant", "A"))
    assert "⟦A<|im_end|>⟧" in marked(byte_tokenizer, single, forgets)
    with pytest.raises(UserError, match="here: the chat template does not render message 2 "):
        encode_conversation(turns(("user", "Q"), ("assistant", "A"), ("user", "R")), byte_tokenizer, forgets)


def test_a_template_that_gives_only_the_last_answer_a_thought(byte_tokenizer):
    """As Qwen3's does: earlier answers are found by their own words."""
    thought = "{% if loop.last and message.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    thinks = CHATML.replace("{% if message.content %}", thought + "{% if message.content %}")
    several = turns(("system", "S"), ("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "A"))
    assert marked(byte_tokenizer, several, thinks) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n⟦A<|im_end|>⟧\n<|im_start|>user\nR<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nA<|im_end|>⟧\n"
    )
    system, question, answer, *rest = several.messages
    called = Conversation("here", [system, question, {**answer, "tool_calls": [{"name": "f"}]}, *rest])
    assert '⟦A<call>{"name": "f"}</call><|im_end|>⟧' in marked(byte_tokenizer, called, thinks)


def test_a_turn_begins_where_it_parts_from_a_generation_prompt_that_opens_a_thought(byte_tokenizer):
    """As DeepSeek-R1's does."""
    thinks = CHATML.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>' }}")
    text = marked(byte_tokenizer, turns(("system", "S"), ("user", "Q"), ("assistant", "A")), thinks)
    assert text.endswith("<|im_start|>assistant\n⟦A<|im_end|>⟧\n")


def test_what_the_template_says_against_a_conversation_is_passed_on(byte_tokenizer):
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}" + CHATML
    with pytest.raises(UserError, match=r"here: the chat template refuses this conversation \(start with the user\)"):
        encode_conversation(turns(("assistant", "A")), byte_tokenizer, strict)


def test_messages_without_a_chat_template_are_refused_with_the_mend():
    encoder = DocumentEncoder(build_byte_tokenizer(template=None))
    with pytest.raises(UserError, match="data.chat_template"):
        encoder.encode([turns(("user", "Q"), ("assistant", "A"))])
    given = DocumentEncoder(build_byte_tokenizer(template=None), CHATML)
    assert given.encode([turns(("user", "Q"), ("assistant", "A"))])[0].supervised.sum() == 2


def test_tokens_in_spans_takes_a_token_without_width_to_begin_where_the_one_before_ended():
    offsets = [(0, 2), (4, 4), (4, 5), (5, 5)]  # "ab", two trimmed blanks, "c", nothing
    assert tokens_in_spans(offsets, [(2, 4)]).tolist() == [False, True, False, False]
    assert tokens_in_spans(offsets, [(4, 5)]).tolist() == [False, False, True, False]
    assert tokens_in_spans([], [(0, 1)]).tolist() == []


def supervised_text(encoder, document):
    encoded = encoder.encode([document])[0]
    return encoder.tokenizer.decode(encoded.input_ids), encoder.tokenizer.decode(encoded.input_ids[encoded.supervised])


def test_a_text_counts_whole_and_is_ended(byte_tokenizer):
    assert supervised_text(DocumentEncoder(byte_tokenizer), Text("here", "ab")) == ("ab<|im_end|>", "ab<|im_end|>")
    without_end = DocumentEncoder(build_byte_tokenizer(eos=False))
    assert supervised_text(without_end, Text("here", "ab")) == ("ab", "ab")
    with_start = DocumentEncoder(build_byte_tokenizer(bos=True))
    assert supervised_text(with_start, Text("here", "ab")) == ("<|im_start|>ab<|im_end|>", "ab<|im_end|>")


def test_a_text_without_tokens_has_nothing_to_learn_not_even_its_end():
    encoder = DocumentEncoder(build_byte_tokenizer(bos=True))
    assert not encoder.encode([Text("here", "")])[0].supervised.any()


def test_of_a_prompt_with_completion_the_completion_counts_and_the_end():
    document = PromptCompletion("here", "Q:\n", "\nA")
    whole, counts = supervised_text(DocumentEncoder(build_byte_tokenizer(bos=True)), document)
    assert (whole, counts) == ("<|im_start|>Q:\n\nA<|im_end|>", "\nA<|im_end|>")
    # The boundary is exact even where the tokenizer would join what is on both sides of it.
    joins = build_byte_tokenizer(merges=[("Ċ", "Ċ")])
    assert supervised_text(DocumentEncoder(joins), document) == ("Q:\n\nA<|im_end|>", "\nA<|im_end|>")
    assert supervised_text(DocumentEncoder(joins), PromptCompletion("here", "", "A")) == ("A<|im_end|>", "A<|im_end|>")


def test_no_mark_of_a_beginning_is_put_between_prompt_and_completion(word_tokenizer):
    encoder = DocumentEncoder(word_tokenizer)
    assert encoder.marks_beginnings
    encoded = encoder.encode([PromptCompletion("here", "a b", " c d")])[0]
    assert word_tokenizer.convert_ids_to_tokens(encoded.input_ids) == ["▁a", "▁b", "▁c", "▁d", "</s>"]
    assert encoded.supervised.tolist() == [False, False, True, True, True]


def test_nor_where_prompt_and_completion_meet_within_a_word():
    encoder = DocumentEncoder(build_letter_tokenizer())
    encoded = encoder.encode([PromptCompletion("here", "ab", "cd")])[0]
    assert encoder.tokenizer.convert_ids_to_tokens(encoded.input_ids) == ["▁", "a", "b", "c", "d", "</s>"]
    assert encoded.supervised.tolist() == [False, False, False, True, True, True]


def test_kinds_may_be_mixed_and_keep_their_order(byte_tokenizer):
    chat = turns(("user", "Q"), ("assistant", "B"))
    documents = [PromptCompletion("1", "Q", "A"), Text("2", "t"), chat, Text("4", "u")]
    encoded = DocumentEncoder(byte_tokenizer).encode(documents)
    assert [document.is_text for document in encoded] == [False, True, False, True]
    counts = [byte_tokenizer.decode(document.input_ids[document.supervised]) for document in encoded]
    assert counts == ["A<|im_end|>", "t<|im_end|>", "B<|im_end|>", "u<|im_end|>"]
    assert all(document.input_ids.dtype == np.int32 for document in encoded)
