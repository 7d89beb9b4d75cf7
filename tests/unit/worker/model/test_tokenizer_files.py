import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from radixfleet.text import Tokenizer
from radixfleet.tokenizer_files import joined_template
from radixfleet.types import ChatMessage, ChatPrompt
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import CHAT_TEMPLATE, tiny_model
from worker.model.errors import BrokenModel, ModelNotFound
from worker.model.tokenizer_files import load_tokenizer_spec

TEXTS = ["", "the worker keeps the prefix", "x1234 ½ ²", "<|im_start|>user\nHello<|im_end|>\n", "naïve 東京 🙂"]


def directory(tmp_path: Path, **settings: Any) -> Path:
    """A copy of the tiny model's directory with other fields in tokenizer_config.json."""
    target = tmp_path / "model"
    shutil.copytree(tiny_model(), target)
    path = target / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return target


def test_a_directory_and_its_gguf_file_give_the_same_tokenizer(tmp_path: Path) -> None:
    from_directory = load_tokenizer_spec(tiny_model())
    from_file = load_tokenizer_spec(write_gguf(tiny_model(), tmp_path / "tiny.gguf"))
    for spec in (from_directory, from_file):
        assert spec.chat_template == CHAT_TEMPLATE
        assert (spec.bos_token, spec.bos_token_id, spec.add_bos) == ("<|im_start|>", 1, False)
        assert (spec.eos_token, spec.vocab_size) == ("<|im_end|>", 512)
    assert from_directory.eos_token_ids == (2,)
    assert from_file.eos_token_ids == (0, 2), "<|endoftext|>, too: a file has no list of them"
    one, other = Tokenizer(from_directory), Tokenizer(from_file)
    for text in TEXTS:
        assert one.encode(text).tolist() == other.encode(text).tolist()


def test_ids_are_those_of_transformers() -> None:
    ours = Tokenizer(load_tokenizer_spec(tiny_model()))
    theirs = AutoTokenizer.from_pretrained(tiny_model())
    for text in TEXTS:
        assert ours.encode(text).tolist() == theirs(text)["input_ids"]
    messages = (ChatMessage("system", "be brief"), ChatMessage("user", "Tell me about 1234"))
    expected = theirs.apply_chat_template(
        [{"role": message.role, "content": message.content} for message in messages],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert ours.render_chat(ChatPrompt(messages)) == expected


def test_bos_is_added_when_the_configuration_or_the_post_processor_adds_it(tmp_path: Path) -> None:
    stated = directory(tmp_path / "stated", add_bos_token=True)
    assert load_tokenizer_spec(stated).add_bos

    silent = directory(tmp_path / "silent", add_bos_token=None)
    assert not load_tokenizer_spec(silent).add_bos
    raw = RawTokenizer.from_file(str(silent / "tokenizer.json"))
    raw.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    raw.save(str(silent / "tokenizer.json"))
    assert load_tokenizer_spec(silent).add_bos

    nameless = directory(tmp_path / "nameless", add_bos_token=True, bos_token=None)
    assert not load_tokenizer_spec(nameless).add_bos


def test_special_tokens_may_be_given_as_objects(tmp_path: Path) -> None:
    spec = load_tokenizer_spec(directory(tmp_path, bos_token={"content": "<|endoftext|>", "lstrip": False}))
    assert (spec.bos_token, spec.bos_token_id) == ("<|endoftext|>", 0)


def test_the_tokenizers_own_end_counts_beside_those_of_the_model(tmp_path: Path) -> None:
    """A chat model of which config.json still names the end of what it was made of."""
    target = directory(tmp_path)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(content | {"eos_token_id": 0}))
    assert load_tokenizer_spec(target).eos_token_ids == (0, 2)


def test_a_model_may_name_several_end_tokens(tmp_path: Path) -> None:
    target = directory(tmp_path)
    content = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(content | {"eos_token_id": [5, 0]}))
    assert load_tokenizer_spec(target).eos_token_ids == (0, 2, 5)


def test_end_tokens_fall_back_to_the_tokenizers_own(tmp_path: Path) -> None:
    target = directory(tmp_path)
    config = json.loads((target / "config.json").read_text())
    del config["eos_token_id"]
    (target / "config.json").write_text(json.dumps(config))
    (target / "generation_config.json").unlink()
    assert load_tokenizer_spec(target).eos_token_ids == (2,)


PLAIN_TEMPLATE = "{%- for m in messages %}\n  {{ m.content }}\n{% endfor %}\n  \n"
TOOL_TEMPLATE = (
    "\n  {%- macro name(tool) %}{{ tool.function.name }}{% endmacro %}\n{{ name(tools[0]) }}:\n" + PLAIN_TEMPLATE
)


def named_in_settings(target: Path) -> Path:
    path = target / "tokenizer_config.json"
    named = [{"name": "default", "template": PLAIN_TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    return target


def files_of_their_own(target: Path) -> Path:
    (target / "additional_chat_templates").mkdir()
    (target / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (target / "additional_chat_templates" / "tool_use.jinja").write_text(TOOL_TEMPLATE)
    return target


@pytest.mark.parametrize("arrange", [named_in_settings, files_of_their_own])
def test_chats_with_tools_have_the_template_that_is_made_for_them(
    tmp_path: Path, arrange: Callable[[Path], Path]
) -> None:
    target = arrange(directory(tmp_path))
    ours, theirs = Tokenizer(load_tokenizer_spec(target)), AutoTokenizer.from_pretrained(target)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for shown in ([], tools):
        expected = theirs.apply_chat_template(
            [{"role": "user", "content": "hello"}], tools=shown or None, tokenize=False
        )
        assert ours.render_chat(ChatPrompt((ChatMessage("user", "hello"),), tools=tuple(shown))) == expected
        assert ("look" in expected) == bool(shown)
    file = write_gguf(tiny_model(), tmp_path / "t.gguf", metadata={"tokenizer.chat_template.tool_use": TOOL_TEMPLATE})
    spec = load_tokenizer_spec(file)
    assert spec.chat_template == joined_template(CHAT_TEMPLATE, TOOL_TEMPLATE)


@pytest.mark.parametrize("begin", ["", "  ", "\n", "\n  ", "  \n", "  {%- if 1 %}a{% endif %}"])
@pytest.mark.parametrize("end", ["", "  ", "\n", "\n\n", "\n  ", "\n  {% if 1 %}", "  {# b #}\n"])
def test_a_template_renders_beside_another_as_it_does_alone(begin: str, end: str) -> None:
    """Blanks before a tag are dropped where the tag begins a line, as in the first line of a template."""
    template = f"{begin}{{% for m in messages %}}\n  {{{{ m.content }}}}\n{{% endfor %}}{end}"
    template += "{% endif %}" if end.endswith("if 1 %}") else ""
    spec = load_tokenizer_spec(tiny_model())
    for joined, tools in (((template, "t"), ()), (("p", template), ({"type": "function"},))):
        chat = ChatPrompt((ChatMessage("user", "hello"),), tools=tools)
        alone = Tokenizer(replace(spec, chat_template=template)).render_chat(chat)
        assert Tokenizer(replace(spec, chat_template=joined_template(*joined))).render_chat(chat) == alone


def test_chat_templates_come_from_their_file_first_then_from_the_field(tmp_path: Path) -> None:
    target = directory(tmp_path, chat_template=[{"name": "default", "template": "D"}, {"name": "x", "template": "X"}])
    assert load_tokenizer_spec(target).chat_template == "D"
    (target / "chat_template.jinja").write_text("F")
    assert load_tokenizer_spec(target).chat_template == "F"
    assert load_tokenizer_spec(directory(tmp_path / "none", chat_template=None)).chat_template is None


def test_broken_directories_say_what_is_wrong(tmp_path: Path) -> None:
    target = directory(tmp_path)
    (target / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(BrokenModel, match=r"tokenizer\.json cannot be read"):
        load_tokenizer_spec(target)
    (target / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json; save it"):
        load_tokenizer_spec(target)


def test_gguf_special_tokens_outside_the_vocabulary_are_told(tmp_path: Path) -> None:
    file = write_gguf(tiny_model(), tmp_path / "t.gguf", metadata={"tokenizer.ggml.eot_token_id": 1})
    assert load_tokenizer_spec(file).eos_token_ids == (0, 1, 2)
    data = file.read_bytes()
    key = b"tokenizer.ggml.bos_token_id"
    at = data.index(key) + len(key) + 4
    (tmp_path / "bad.gguf").write_bytes(data[:at] + (9999).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(BrokenModel, match="token 9999 is outside the vocabulary of 512"):
        load_tokenizer_spec(tmp_path / "bad.gguf")


def test_the_front_needs_no_torch_for_tokenizer_and_configuration() -> None:
    code = (
        "import sys, worker.model.tokenizer_files, worker.model.configuration, worker.model.sources\n"
        "import worker.runner.torch_config\n"
        "raise SystemExit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
