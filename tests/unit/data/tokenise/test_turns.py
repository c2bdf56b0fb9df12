"""The assistant's turns inside the whole rendering, whatever the template does; marked by hand."""

from itertools import pairwise

import numpy as np
import pytest

from disaggkd_cli.data.read.documents import Conversation
from disaggkd_cli.data.refusals import RefusedRecord
from disaggkd_cli.data.tokenise.chat import ChatEncoder
from disaggkd_cli.data.tokenise.template import ChatTemplate

from ..support import build_byte_tokenizer
from . import templates


@pytest.fixture(scope="module")
def tokenizer():
    made = build_byte_tokenizer()
    made.add_special_tokens({"extra_special_tokens": [each for each in templates.TOKENS if "im_" not in each]})
    return made


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def result(text):
    return {"role": "tool", "content": text}


def call(arguments):
    return [{"type": "function", "function": {"name": "w", "arguments": arguments}}]


def marked(tokenizer, template, *messages, tools=None, untrained=(), **arguments):
    """The whole rendering with what counts in ⟦ ⟧; the ids are those of the whole rendering."""
    chat = ChatTemplate(tokenizer, template, arguments)
    conversation = Conversation("here", list(messages), tools, frozenset(untrained))
    ids, counts = ChatEncoder(chat).encode(conversation)
    whole = chat.render(chat.in_its_form(conversation))
    assert ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"]
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(ids)]
    pieces = [(counts[first], tokenizer.decode(ids[first:last])) for first, last in pairwise(edges)]
    return "".join(f"⟦{piece}⟧" if counted else piece for counted, piece in pieces)


def test_thoughts_that_are_dropped_from_earlier_turns(tokenizer):
    thought = "<think>\nt\n</think>\n\n"
    text = marked(
        tokenizer, templates.DROPS_THOUGHTS, user("q"), said(thought + "yes"), user("r"), said(thought + "no")
    )
    assert text == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
        "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n<think>\n⟦t\n</think>\n\nno<|im_end|>⟧\n"
    )
    beside = marked(
        tokenizer,
        templates.DROPS_THOUGHTS,
        user("q"),
        said("yes", reasoning_content="s"),
        user("r"),
        said("no", reasoning_content="t"),
    )
    assert beside == text


def test_steps_with_tools_between_which_thoughts_stay(tokenizer):
    text = marked(
        tokenizer,
        templates.DROPS_THOUGHTS,
        user("q"),
        said("", reasoning_content="look", tool_calls=call({"city": "Paris"})),
        result("A"),
        said("", tool_calls=call({})),
        result("<|im_start|>assistant\nA"),
        said("done"),
    )
    assert text == (
        "<|im_start|>user\nq<|im_end|>\n"
        '<|im_start|>assistant\n<think>\n⟦look\n</think>\n\n<call>w {"city": "Paris"}</call><|im_end|>⟧\n'
        "<|im_start|>tool\nA<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦\n</think>\n\n<call>w {}</call><|im_end|>⟧\n"
        "<|im_start|>tool\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n⟦\n</think>\n\ndone<|im_end|>⟧\n"
    )


def test_the_templates_own_variables_decide_what_generation_begins_with(tokenizer):
    text = marked(tokenizer, templates.DROPS_THOUGHTS, user("q"), said("yes"), enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n⟦yes<|im_end|>⟧\n")


def test_a_generation_prompt_that_opens_a_thought_no_answer_has(tokenizer):
    text = marked(
        tokenizer,
        templates.NO_HEADER_AFTER_TOOLS,
        user("q"),
        said("<think>t</think>", tool_calls=call({"n": 3})),
        result("A"),
        said("done"),
        user("r"),
        said("no"),
    )
    assert text == (
        '<|user|>q<|assistant|>⟦<call>w {"n": 3}</call><|im_end|>⟧<|result|>A<|done|>⟦done<|im_end|>⟧'
        "<|user|>r<|assistant|>⟦no<|im_end|>⟧"
    )


def test_channels_with_end_tokens_of_their_own(tokenizer):
    text = marked(
        tokenizer,
        templates.CHANNELS,
        user("q"),
        said("", tool_calls=call({"city": "Paris"})),
        result("Paris"),
        said("yes", thinking="gone"),
        user("r"),
        said("no", thinking="t"),
    )
    assert text == (
        "<|start|>user<|message|>q<|end|>"
        '<|start|>assistant⟦ to=w<|channel|>tool<|message|>{"city": "Paris"}<|call|>⟧'
        "<|start|>w<|channel|>tool<|message|>Paris<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>yes<|end|>⟧"
        "<|start|>user<|message|>r<|end|>"
        "<|start|>assistant⟦<|channel|>thought<|message|>t<|end|>"
        "<|start|>assistant<|channel|>final<|message|>no<|return|>⟧"
    )


def test_a_function_without_arguments_whose_name_is_repeated_with_its_result(tokenizer):
    text = marked(tokenizer, templates.CHANNELS, user("q"), said("", tool_calls=call({})), result("w"), said("w"))
    assert "<|start|>assistant⟦ to=w<|channel|>tool<|message|>{}<|call|>⟧<|start|>w<|channel|>tool<|message|>w" in text
    assert text.endswith("<|start|>assistant⟦<|channel|>final<|message|>w<|return|>⟧")


def test_where_a_turn_has_no_end_token_generation_stops_at_what_opens_the_next(tokenizer):
    text = marked(tokenizer, templates.NO_END_TOKEN, user("q"), said(" yes "), user("r"), said(""))
    assert text == ("<|user|>\nq<|assistant|>⟦\n<think></think>\nyes<|user|>⟧\nr<|assistant|>⟦\n<think></think>⟧")


def test_what_only_ends_the_conversation_is_not_the_assistants(tokenizer):
    text = marked(tokenizer, templates.ENDS_THE_CONVERSATION, user("q"), said("yes"), user("r"), said("no"))
    assert text.endswith(
        "⟦yes<|im_end|>⟧\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n⟦no<|im_end|>⟧\n<|endoftext|>"
    )


def test_the_assistant_may_begin(tokenizer):
    text = marked(tokenizer, templates.ONLY_TEXTS, said("Hello!"), user("q"), said("yes"))
    assert text == (
        "<|im_start|>assistant\n⟦Hello!<|im_end|>⟧\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    )


@pytest.mark.parametrize("template", [templates.ONLY_TEXTS, templates.ONLY_PARTS, templates.DROPS_THOUGHTS])
@pytest.mark.parametrize(
    "words",
    [
        "yes",
        "🙂 né 👩‍👩‍👧",
        "<b>x</b> [INST] <br>",
        "<br>",
        "a <|im_start|>user\nhi",
        "Zqm Zqjm",
        "assistant\n",
    ],
)
def test_the_same_answer_twice_and_as_the_question_whatever_is_in_it(tokenizer, template, words):
    text = marked(tokenizer, template, user(words), said(words), user(words), said(words))
    shown = words.strip() if template is templates.DROPS_THOUGHTS else words
    assert text.count(f"⟦{shown}<|im_end|>⟧") == 2 - (template is templates.DROPS_THOUGHTS)
    assert text.count("⟦") == 2 and f"user\n{shown}<|im_end|>\n<|im_start|>assistant\n⟦" in text


def test_words_of_an_end_token_within_an_answer_do_not_end_the_turn(tokenizer):
    text = marked(tokenizer, templates.ONLY_TEXTS, user("q"), said("a<|im_end|>\n<|im_start|>assistant\nb"), user("r"))
    assert "assistant\n⟦a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>⟧\n<|im_start|>user" in text


def test_turns_that_are_not_to_be_learned_are_found_and_left_out(tokenizer):
    for template in (templates.ONLY_TEXTS, WITH_MARKERS):
        text = marked(tokenizer, template, user("q"), said("BAD"), user("r"), said("no"), untrained={1})
        assert "BAD<|im_end|>\n" in text and text.count("⟦") == 1 and "⟦no<|im_end|>⟧" in text


WITH_MARKERS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{%- generation -%}{{ message.content + '<|im_end|>' }}{%- endgeneration -%}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def test_markers_in_a_comment_are_none(tokenizer):
    assert marked(tokenizer, templates.MARKERS_IN_A_COMMENT, user("q"), said("yes")) == (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n⟦yes<|im_end|>⟧\n"
    )


def test_contents_in_parts_are_given_as_the_template_takes_them(tokenizer):
    parts = [[{"type": "text", "text": text}, {"type": "text", "text": "!"}] for text in ("q", "yes")]
    expected = "<|im_start|>user\nq!<|im_end|>\n<|im_start|>assistant\n⟦yes!<|im_end|>⟧\n"
    for template in (templates.ONLY_TEXTS, templates.ONLY_PARTS):
        assert marked(tokenizer, template, user(parts[0]), said(parts[1])) == expected
        assert marked(tokenizer, template, user("q!"), said("yes!")) == expected


def test_arguments_are_given_as_the_template_takes_them(tokenizer):
    as_text, as_object = call('{"city":"Rome", "n": 3}'), call({"city": "Rome", "n": 3})
    for calls in (as_text, as_object):
        text = marked(tokenizer, templates.ARGUMENTS_AS_ITEMS, user("q"), said(None, tool_calls=calls))
        assert "assistant\n⟦<call>w city=Rome n=3</call><|im_end|>⟧" in text
    # JSON text is not quoted a second time.
    text = marked(tokenizer, templates.DROPS_THOUGHTS, user("q"), said("", tool_calls=as_text))
    assert '<call>w {"city": "Rome", "n": 3}</call><|im_end|>⟧' in text


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (
            templates.ONLY_TEXTS,
            [user("q"), said("", tool_calls=call({"city": "Rome"})), result("A"), said("done")],
            r"the chat template does not render the tool calls of message 2 \(1 of 1\)",
        ),
        (
            templates.SPLITS_A_TURN,
            [user("q"), said("look", tool_calls=call({"city": "Rome"})), result("A"), said("done")],
            "what the assistant says in message 2 can't be told from the rest",
        ),
        (templates.ARGUMENTS_AS_ITEMS, [user("q"), said("", tool_calls=call("no JSON"))], "refuses this conversation"),
    ],
)
def test_what_is_not_rendered_or_not_apart_is_refused_by_its_place(tokenizer, template, messages, reason):
    with pytest.raises(RefusedRecord, match=f"here: .*{reason}"):
        marked(tokenizer, template, *messages)
