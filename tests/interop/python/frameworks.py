"""Libraries for agents and structured answers: BASE_URL in the environment, the name of one as the argument."""

import asyncio
import os
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

URL = os.environ["BASE_URL"]
KEY = "none"
SIMULATED, COMPUTED = "tiny", "computed"
TOKENS = 400
"""Enough for any typed answer: the model writes a character or two a token."""
QUESTION = "Tell me about the weather in Paris."


class Weather(BaseModel):
    """Short, whatever the model is."""

    city: Literal["Bern", "Paris"]
    days: int = Field(ge=1, le=9)


def weather(city: Literal["Bern", "Paris"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def openai_agents() -> None:
    import agents

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY)
    settings = agents.ModelSettings(max_tokens=TOKENS, temperature=0)

    async def ask(api: type[agents.Model]) -> None:
        def agent(model: str, **options) -> agents.Agent:
            used = api(model=model, openai_client=client)
            return agents.Agent(name="agent", model=used, **({"model_settings": settings} | options))

        # An answer that its limit cuts is an error to agents that use Responses: this one ends by itself.
        ends = agents.ModelSettings(temperature=0, extra_body={"structured_outputs": {"regex": "[a-z]{30}"}})
        speaker = agent(COMPUTED, model_settings=ends)
        whole = (await agents.Runner.run(speaker, QUESTION)).final_output
        streamed = agents.Runner.run_streamed(speaker, QUESTION)
        async for _ in streamed.stream_events():
            pass
        assert len(whole) == 30
        assert whole == streamed.final_output
        demanded = agents.ModelSettings(
            max_tokens=TOKENS, temperature=0, tool_choice="required", parallel_tool_calls=False
        )
        options = {"tools": [agents.function_tool(weather)], "model_settings": demanded}
        caller = agent(COMPUTED, tool_use_behavior="stop_on_first_tool", **options)
        for result in (await agents.Runner.run(caller, QUESTION), agents.Runner.run_streamed(caller, QUESTION)):
            if isinstance(result, agents.RunResultStreaming):
                async for _ in result.stream_events():
                    pass
            assert result.final_output.startswith("sunny in ")
        typed = agent(COMPUTED, output_type=Weather)
        for asked in (QUESTION, result.to_input_list()):  # also behind the call, and what it returned
            assert isinstance((await agents.Runner.run(typed, asked)).final_output, Weather)

    async def both() -> None:
        for api in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
            await ask(api)

    asyncio.run(both())


def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def agent(model: str, output: object) -> Agent:
        chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=URL, api_key=KEY))
        return Agent(chat, output_type=output, model_settings={"max_tokens": TOKENS, "temperature": 0})

    whole = agent(SIMULATED, str).run_sync(QUESTION)
    assert whole.usage.output_tokens == TOKENS

    async def streamed() -> str:
        async with agent(SIMULATED, str).run_stream(QUESTION) as answer:
            return [text async for text in answer.stream_text()][-1]

    assert asyncio.run(streamed()) == whole.output
    for output in (Weather, NativeOutput(Weather)):
        assert isinstance(agent(COMPUTED, output).run_sync(QUESTION).output, Weather)


def langchain() -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    def chat(model: str) -> ChatOpenAI:
        return ChatOpenAI(model=model, base_url=URL, api_key=KEY, temperature=0, max_tokens=TOKENS, max_retries=0)

    whole = chat(SIMULATED).invoke(QUESTION)
    assert whole.usage_metadata["output_tokens"] == TOKENS
    assert "".join(piece.content for piece in chat(SIMULATED).stream(QUESTION)) == whole.content
    assert [answer.content for answer in chat(SIMULATED).batch([QUESTION] * 3)] == [whole.content] * 3
    likely = chat(SIMULATED).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert [len(token["top_logprobs"]) for token in likely.response_metadata["logprobs"]["content"]] == [2] * TOKENS
    assert OpenAI(model=SIMULATED, base_url=URL, api_key=KEY, max_tokens=8).invoke(QUESTION)
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat(COMPUTED).with_structured_output(Weather, method=method).invoke(QUESTION), Weather)
    caller = chat(COMPUTED).bind_tools([tool(weather)], tool_choice="any", parallel_tool_calls=False)
    (call,) = caller.invoke(QUESTION).tool_calls
    first, *others = caller.stream(QUESTION)
    (streamed,) = sum(others, first).tool_calls
    assert (call["name"], call["args"]) == (streamed["name"], streamed["args"])
    assert call["name"] == "weather"


def llama_index() -> None:
    from llama_index.core import PromptTemplate
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def model(name: str, **options) -> OpenAILike:
        fixed = {
            "model": name,
            "api_base": URL,
            "api_key": KEY,
            "max_tokens": TOKENS,
            "temperature": 0,
            "max_retries": 0,
        }
        return OpenAILike(**fixed, is_chat_model=True, is_function_calling_model=True, **options)

    messages = [ChatMessage(role="user", content=QUESTION)]
    whole = model(SIMULATED).chat(messages).message.content
    assert "".join(piece.delta or "" for piece in model(SIMULATED).stream_chat(messages)) == whole
    texts = OpenAILike(model=SIMULATED, api_base=URL, api_key=KEY, max_tokens=8, temperature=0)
    assert "".join(piece.delta for piece in texts.stream_complete(QUESTION)) == texts.complete(QUESTION).text
    assert isinstance(model(COMPUTED).structured_predict(Weather, PromptTemplate(QUESTION)), Weather)
    tools = [FunctionTool.from_defaults(weather)]
    answer = model(COMPUTED).chat_with_tools(tools, user_msg=QUESTION, tool_required=True)
    (call,) = model(COMPUTED).get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"


def instructor() -> None:
    import instructor as library

    for mode in (library.Mode.TOOLS, library.Mode.TOOLS_STRICT, library.Mode.JSON_SCHEMA):
        client = library.from_openai(openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0), mode=mode)
        asked = {"model": COMPUTED, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS}
        answer = client.chat.completions.create(response_model=Weather, max_retries=0, **asked)
        assert isinstance(answer, Weather)
        *_, last = client.chat.completions.create_partial(response_model=Weather, **asked)
        assert Weather(**last.model_dump()) == last


RUNS = {
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langchain": langchain,
    "llama-index": llama_index,
    "instructor": instructor,
}

if __name__ == "__main__":
    RUNS[sys.argv[1]]()
