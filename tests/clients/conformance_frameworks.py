"""langchain-openai, litellm and llama-index against the server: plain, streamed, with tools."""

from __future__ import annotations

from typing import Any

import litellm
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai import OpenAI as LlamaOpenAI
from pydantic import BaseModel

KEY = "sk-conformance"
MODEL = "scripted"
HELLO = "Hello there, čau \U0001f600!"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class Place(BaseModel):
    """A place."""

    city: str
    country: str


class Weather(LlamaOpenAI):
    """A context window for a name that the client does not know, as its documentation says."""

    @property
    def _tokenizer(self) -> None:
        return None

    @property
    def metadata(self) -> Any:
        from llama_index.core.base.llms.types import LLMMetadata

        return LLMMetadata(
            context_window=2048,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=MODEL,
        )


# --- langchain ---


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=url + "/v1", api_key=KEY, max_retries=0)


def test_langchain_chat_and_stream(chat: ChatOpenAI) -> None:
    made = chat.invoke([SystemMessage("Be kind."), HumanMessage("hello")])
    assert made.content == HELLO
    assert made.usage_metadata is not None
    assert made.response_metadata["finish_reason"] == "stop"
    parts = list(chat.stream("hello", stream_usage=True))
    assert "".join(str(part.content) for part in parts) == HELLO
    assert any(part.usage_metadata for part in parts)


def test_langchain_tools(chat: ChatOpenAI) -> None:
    with_tools = chat.bind_tools([WEATHER])
    first = with_tools.invoke("weather?")
    (call,) = first.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages = [HumanMessage("weather?"), first, ToolMessage("22 degrees", tool_call_id=call["id"])]
    assert with_tools.invoke(messages).content == "It is 22 degrees in Paris."
    joined: Any = None
    for part in with_tools.stream("weather?"):
        joined = part if joined is None else joined + part
    assert isinstance(joined, AIMessage)
    assert joined.tool_calls[0]["args"] == {"city": "Paris"}


def test_langchain_structured_output(chat: ChatOpenAI) -> None:
    for method in ("json_schema", "json_mode"):
        reader = chat.with_structured_output(Place, method=method)
        assert reader.invoke("as json") == Place(city="Paris", country="France")


def test_langchain_over_the_responses_api(url: str) -> None:
    chat = ChatOpenAI(model=MODEL, base_url=url + "/v1", api_key=KEY, use_responses_api=True)
    assert chat.invoke("hello").text == HELLO
    assert "".join(part.text for part in chat.stream("hello")) == HELLO


def test_langchain_completions_and_embeddings(url: str) -> None:
    text = OpenAI(model=MODEL, base_url=url + "/v1", api_key=KEY, max_tokens=60)
    assert text.invoke("count") == "1 2 3 4 5 6 7 8 9"
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=url + "/v1", api_key=KEY, check_embedding_ctx_length=False
    )
    one, other = embeddings.embed_documents(["a", "b"])
    assert len(one) == len(other) == 16
    assert one != other


# --- litellm ---


def ask(url: str, text: str, model: str = "hosted_vllm/" + MODEL, **fields: Any) -> Any:
    base = url if model.startswith("anthropic") else url + "/v1"
    messages = [{"role": "user", "content": text}]
    return litellm.completion(
        model=model, api_base=base, api_key=KEY, messages=messages, num_retries=0, **fields
    )


@pytest.mark.parametrize("provider", ["hosted_vllm/", "openai/", "anthropic/"])
def test_litellm_chat_and_stream(url: str, provider: str) -> None:
    made = ask(url, "hello", provider + MODEL, max_tokens=100)
    assert made.choices[0].message.content == HELLO
    assert made.usage.total_tokens > 0
    parts = ask(url, "hello", provider + MODEL, max_tokens=100, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == HELLO


@pytest.mark.parametrize("provider", ["hosted_vllm/", "openai/", "anthropic/"])
def test_litellm_tools(url: str, provider: str) -> None:
    made = ask(url, "weather?", provider + MODEL, tools=[WEATHER], max_tokens=100)
    (call,) = made.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert made.choices[0].finish_reason == "tool_calls"


def test_litellm_sees_what_went_wrong(url: str) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(url, "x" * 100_000)
    with pytest.raises(litellm.BadRequestError):
        ask(url, "hello", temperature=9)


def test_litellm_embeddings_and_responses(url: str) -> None:
    made = litellm.embedding(
        model="hosted_vllm/" + MODEL, api_base=url + "/v1", api_key=KEY, input=["a", "b"]
    )
    assert [row["index"] for row in made.data] == [0, 1]
    said = litellm.responses(
        model="openai/" + MODEL, api_base=url + "/v1", api_key=KEY, input="hello"
    )
    assert said.output[0].content[0].text == HELLO


# --- llama-index ---


@pytest.fixture
def llama(url: str) -> LlamaOpenAI:
    return Weather(model=MODEL, api_base=url + "/v1", api_key=KEY, max_retries=0)


def test_llama_index_chat_and_stream(llama: LlamaOpenAI) -> None:
    message = ChatMessage(role=MessageRole.USER, content="hello")
    assert llama.chat([message]).message.content == HELLO
    assert list(llama.stream_chat([message]))[-1].message.content == HELLO
    assert llama.complete("hello").text == HELLO


def test_llama_index_tools(llama: LlamaOpenAI) -> None:
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return city

    tool = FunctionTool.from_defaults(get_weather)
    made = llama.chat_with_tools([tool], user_msg="weather?")
    (call,) = llama.get_tool_calls_from_response(made)
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Paris"})
    last = list(llama.stream_chat_with_tools([tool], user_msg="weather?"))[-1]
    (call,) = llama.get_tool_calls_from_response(last)
    assert call.tool_kwargs == {"city": "Paris"}


def test_llama_index_sees_what_went_wrong(llama: LlamaOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        llama.complete("hello", temperature=9)
