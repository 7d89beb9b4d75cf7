"""A tokenizer in which each byte is a token, so tests know every length and id."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from radixfleet.text import TokenizerSpec
from tests.support.token_texts import byte_characters

END_ID = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_spec(*, chat_template: str | None = CHAT_TEMPLATE) -> TokenizerSpec:
    """Id = byte; 256 ends a generation."""
    tokenizer = Tokenizer(models.BPE({character: byte for byte, character in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return TokenizerSpec(
        tokenizer_json=tokenizer.to_str(),
        chat_template=chat_template,
        bos_token=None,
        eos_token="<|end|>",
        bos_token_id=None,
        eos_token_ids=(END_ID,),
        add_bos=False,
        vocab_size=END_ID + 1,
    )
