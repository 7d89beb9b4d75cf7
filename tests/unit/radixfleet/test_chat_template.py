"""Chat templates as models bring them, and what they may not do."""

from __future__ import annotations

from datetime import datetime

import pytest

from radixfleet.chat_template import ChatTemplate
from radixfleet.errors import InvalidRequest
from radixfleet.types import ChatMessage, ChatPrompt

MESSAGES = [ChatMessage("system", "Be kind."), ChatMessage("user", "Hi <b>!")]
CHATML = """{% for message in messages %}
    {% if loop.first and messages[0]['role'] != 'system' %}
<|im_start|>system
You help.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def render(source: str, messages=MESSAGES, *, prompt=None, add_generation_prompt: bool = True, **options) -> str:
    prompt = prompt or ChatPrompt(tuple(messages), add_generation_prompt)
    return ChatTemplate(source, **options).render(prompt)


def test_chatml_with_blocks_trimmed():
    assert render(CHATML) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n\n<|im_start|>user\nHi <b>!<|im_end|>\n\n<|im_start|>assistant\n"
    )
    assert render(CHATML, MESSAGES[1:], add_generation_prompt=False) == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi <b>!<|im_end|>\n\n"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Be kind.</s>"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ strftime_now('%d %b %Y') }}", "05 Mar 2031"),
        ("{{ messages[1] | tojson }}", '{"role": "user", "content": "Hi <b>!"}'),
        ("{{ 'é' | tojson }}", '"é"'),
        ("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("a{% generation %}b{{ 1 }}{% endgeneration %}c", "ab1c"),
        ("{{ messages | length }}{{ nothing_such }}", "2"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3"),
    ],
)
def test_what_templates_rely_on(source, expected):
    options = {"bos_token": "<s>", "eos_token": "</s>", "now": lambda: datetime(2031, 3, 5)}
    assert render(source, **options) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ nothing_such.attribute }}",
        "{{ messages[7].content }}",
        "{{ 1 // 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages | no_such_filter }}",
        "{{ messages | tojson(no_such_option=1) }}",
        "{{ range(10000000) | list }}",
        "{{ 'x' * 10 ** 18 }}",
        "{% for m in messages %}{{ m.append(1) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_failures_are_refusals(source):
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        render(source)
    assert caught.value.field == "prompt.chat"


def test_the_words_of_the_template_reach_the_client():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ strftime_now.__code__.co_names }}",
        "{{ messages.append({'role': 'user', 'content': 'injected'}) }}",
        "{{ messages[0].update({'role': 'tool'}) }}",
        "{{ '{0.__class__.__name__}'.format(messages) }}",
    ],
)
def test_the_sandbox_holds(source):
    """Neither attributes of Python's objects nor changes of what is given."""
    with pytest.raises(InvalidRequest, match=r"unsafe|not safely callable"):
        render(source + "{{ messages }}")


def test_a_template_that_is_not_jinja():
    with pytest.raises(InvalidRequest, match="cannot be read"):
        ChatTemplate("{% for %}")


def test_tools_variables_and_what_else_a_message_has_reach_the_template():
    call = {"function": {"name": "weather", "arguments": {"city": "Bern", "days": 2}}}
    messages = (
        ChatMessage("user", "hi"),
        ChatMessage("assistant", "", {"content": None, "tool_calls": [call]}),
        ChatMessage("tool", "sunny", {"tool_call_id": "c1"}),
    )
    prompt = ChatPrompt(messages, tools=({"name": "weather"},), variables={"enable_thinking": False})
    source = (
        "{{ tools | tojson }}{{ enable_thinking }}{{ messages[1].content is none }}"
        "{{ messages[1].tool_calls[0].function.arguments | tojson }}{{ messages[2].tool_call_id }}"
    )
    expected = '[{"name": "weather"}]FalseTrue{"city": "Bern", "days": 2}c1'
    assert ChatTemplate(source).render(prompt) == expected


def test_without_tools_the_template_sees_none():
    assert render("{{ tools is none }}{{ enable_thinking is defined }}") == "TrueFalse"


def test_variables_do_not_stand_in_for_messages():
    prompt = ChatPrompt((ChatMessage("user", "hi"),), variables={"messages": [], "add_generation_prompt": False})
    assert render("{{ messages | length }}{{ add_generation_prompt }}", prompt=prompt) == "1True"
