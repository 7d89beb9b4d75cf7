"""POST /tokenize and /detokenize: what a prompt comes to, in the shape that vLLM gave these calls."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from radixfleet.errors import InvalidRequest
from radixfleet.v1 import inference_pb2
from router.api.prompts import Prompts
from router.http.body import parse, read_body
from router.http.errors import json_response
from router.http.openai.logprobs import token_texts
from router.http.openai.requests import DetokenizeRequest, TokenizeRequest
from router.http.openai.shapes import DetokenizeAnswer, TokenizeAnswer
from router.http.openai.translation import in_openai_names, tokenize_prompt


class TokenEndpoints:
    """One for the router."""

    def __init__(self, prompts: Prompts, *, max_body_bytes: int) -> None:
        self._prompts = prompts
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a prompt or a chat."""
        body = await read_body(request.receive, request.headers, self._max_body_bytes)
        given = parse(body, TokenizeRequest)
        asked = given.model or ""
        await self._prompts.until_served(asked)
        model = self._prompts.model(asked)
        try:
            ids = (await self._prompts.tokenize(asked, tokenize_prompt(given))).tolist()
        except InvalidRequest as error:
            raise in_openai_names(error) from None
        answer = TokenizeAnswer(len(ids), model.info.max_context_tokens, ids)
        if given.return_token_strs:
            texts = token_texts(model.known_tokenizer)
            answer.token_strs = [texts[token_id] for token_id in ids]
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await read_body(request.receive, request.headers, self._max_body_bytes)
        given = parse(body, DetokenizeRequest)
        asked = inference_pb2.DetokenizeRequest(
            model=given.model or "", token_ids=given.tokens, skip_special_tokens=False
        )
        try:
            return json_response(DetokenizeAnswer(await self._prompts.detokenize(asked)))
        except InvalidRequest as error:
            if error.field != "token_ids":
                raise
            raise InvalidRequest(str(error).replace("token_ids", "tokens"), field="tokens") from None
