"""transformers' continuous batching behind `/v1/completions`, for the comparison with it.

Runs as a script in an environment of its own, which has transformers, torch and aiohttp and nothing of ours. It does as
little as it can: prompts are token ids, answers are greedy and as long as asked, streamed token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

_CONNECTIONS = 64
_BLOCK_TOKENS = 64
_BATCH_TOKENS = 1024


class Completions:
    """The HTTP side. `manager`: a running ContinuousBatchingManager."""

    def __init__(self, manager: Any, tokenizer: Any) -> None:
        self._manager = manager
        self._tokenizer = tokenizer
        self._count = 0

    def application(self) -> web.Application:
        """With `/health`, which answers once the model is there."""
        application = web.Application()
        application.router.add_get("/health", self._health)
        application.router.add_post("/v1/completions", self._complete)
        return application

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt: list[int] = body["prompt"]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        said = ""
        async with aclosing(self._outputs(prompt, int(body["max_tokens"]))) as outputs:
            async for output in outputs:
                if output.error:
                    await response.write(_event({"error": {"message": output.error}}))
                    return response
                text = self._tokenizer.decode(output.generated_tokens)
                usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output.generated_tokens)}
                await response.write(_event({"choices": [{"index": 0, "text": text[len(said) :]}], "usage": usage}))
                said = text
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _outputs(self, prompt: list[int], max_new_tokens: int) -> AsyncGenerator[Any, None]:
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._count += 1
        name = f"request-{self._count}"
        self._manager.register_result_handler(name, outputs.put_nowait)
        # -1: no token ends the answer
        self._manager.add_request(prompt, name, max_new_tokens=max_new_tokens, streaming=True, eos_token_id=-1)
        while True:
            output = await outputs.get()
            yield output
            if output.is_finished():
                return


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _manager(model: Any, max_requests: int, max_tokens: int) -> Any:
    """A running manager. What it takes for itself without being told is most of the machine's memory."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    blocks = (max_requests + 1) * -(-max_tokens // _BLOCK_TOKENS)
    batching = ContinuousBatchingConfig(
        page_size=_BLOCK_TOKENS,
        num_blocks=blocks,
        max_batch_tokens=_BATCH_TOKENS,
        max_requests_per_batch=max_requests,
    )
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    return manager


def main() -> None:
    """Load, then serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("model", str), ("port", int), ("dtype", str), ("threads", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--requests", type=int, required=True, help="at once")
    parser.add_argument("--tokens", type=int, required=True, help="of the longest request")
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    manager = _manager(model, arguments.requests, arguments.tokens)
    application = Completions(manager, tokenizer).application()
    web.run_app(application, host="127.0.0.1", port=arguments.port, print=None, backlog=_CONNECTIONS)


if __name__ == "__main__":
    main()
