"""lm-eval's models for OpenAI's API: BASE_URL, and MODEL, a folder with the tokenizer, in the environment."""

import os

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

URL = os.environ["BASE_URL"]
PAIRS = [("The router sends", " the next request"), ("You are", " a helpful assistant."), ("Tell me", " about Paris")]
UNTIL = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}

if __name__ == "__main__":
    options = {"model": "tiny", "num_concurrent": 4, "max_retries": 1}
    completions = LocalCompletionsAPI(
        base_url=f"{URL}/completions",
        tokenizer_backend="huggingface",
        tokenizer=os.environ["MODEL"],
        batch_size=2,
        **options,
    )
    # By echo and logprobs: the probabilities of a prompt's own tokens.
    scores = completions.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in PAIRS])
    assert [score < 0 for score, _ in scores] == [True] * 3
    wholes = completions.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, ("".join(pair),), 0) for pair in PAIRS]
    )
    assert all(whole < score for whole, (score, _) in zip(wholes, scores, strict=True))
    texts = completions.generate_until([Instance("generate_until", {}, (text, dict(UNTIL)), 0) for text, _ in PAIRS])
    assert all(texts)
    chats = LocalChatCompletion(base_url=f"{URL}/chat/completions", **options)
    asked = [chats.apply_chat_template([{"role": "user", "content": text}]) for text, _ in PAIRS]
    assert all(chats.generate_until([Instance("generate_until", {}, (text, dict(UNTIL)), 0) for text in asked]))
