"""Tokenizers of every kind that matters for cutting text, small and made in code."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from radixfleet.text import TokenizerSpec

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "hello world  hello user",
    "été naïve coöperate",
    "a1b2 34 <|x|> [y]",
]
SPECIALS = ("<|start|>", "<|end|>", "<|endless|>", "</s>")


def token(content: str, *, special: bool = True, **flags: bool) -> AddedToken:
    return AddedToken(content, special=special, **{"normalized": False, **flags})


PLAIN = tuple(token(content) for content in SPECIALS)


def byte_level(added: Sequence[AddedToken] = PLAIN, *, prefix_space: bool = False) -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False), added)


def digits_then_bytes(added: Sequence[AddedToken] = PLAIN) -> Tokenizer:
    """As SmolLM2: single digits, then byte level."""
    tokenizer = byte_level(added)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def metaspace(scheme: str, added: Sequence[AddedToken] = PLAIN) -> Tokenizer:
    """As newer Llama 2 and Mistral conversions: "first" puts a space before the first word of the text alone."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False), added)


def prepending(added: Sequence[AddedToken] = PLAIN) -> Tokenizer:
    """As older Llama 2 conversions: a normalizer puts a space before every stretch."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _train(tokenizer, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False), added)


def word_piece(added: Sequence[AddedToken] = PLAIN) -> Tokenizer:
    """As BERT: lower-cases, strips accents, adds [CLS] and [SEP] when asked to."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    trained = _train(
        tokenizer, trainers.WordPieceTrainer(vocab_size=150, special_tokens=special, show_progress=False), added
    )
    ends = [("[CLS]", trained.token_to_id("[CLS]")), ("[SEP]", trained.token_to_id("[SEP]"))]
    trained.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return trained


def unigram(added: Sequence[AddedToken] = PLAIN) -> Tokenizer:
    """As T5 and Gemma: NFKC and whitespace folding before a unigram model."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace("  ", " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return _train(tokenizer, trainer, added)


def _train(tokenizer: Tokenizer, trainer: trainers.Trainer, added: Sequence[AddedToken]) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def spec_of(tokenizer: Tokenizer, **fields: object) -> TokenizerSpec:
    defaults = {
        "chat_template": None,
        "bos_token": None,
        "eos_token": None,
        "bos_token_id": None,
        "eos_token_ids": (),
        "add_bos": False,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    return TokenizerSpec(tokenizer_json=tokenizer.to_str(), **{**defaults, **fields})  # type: ignore[arg-type]
