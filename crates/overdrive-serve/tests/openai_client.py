"""Calls every route of a server of the tests with OpenAI's Python client: openai_client.py URL KEY MODEL."""

import json
import sys

import openai

url, key, model = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
messages = [{"role": "user", "content": "hello"}]


def refused(error, call):
    try:
        call()
    except error as raised:
        return raised
    raise AssertionError(f"{error.__name__} was not raised")


def check_models():
    assert [card.id for card in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model
    refused(openai.NotFoundError, lambda: client.models.retrieve("other"))


def check_completions():
    options = dict(model=model, prompt="one two", max_tokens=12, seed=3, n=2, logprobs=2)
    whole = client.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.tokens) <= 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    texts = ["", ""]
    usage = None
    for chunk in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert usage == whole.usage


def check_chat():
    options = dict(model=model, messages=messages, max_completion_tokens=12, seed=3, logprobs=True, top_logprobs=2)
    whole = client.chat.completions.create(**options)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and choice.finish_reason in ("length", "stop")
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    text = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == choice.message.content
    # The client's own collector of streams refuses an answer that ends by its length.
    stop = text[4]
    with client.chat.completions.stream(
            model=model, messages=messages, max_completion_tokens=12, seed=3, stop=[stop]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text[:text.index(stop)]


def check_schema():
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"],
              "additionalProperties": False}
    response = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    answer = client.chat.completions.create(
        model=model, messages=messages, response_format=response, max_tokens=100, temperature=0)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content)["yes"], bool)


def check_tools():
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}},
                                                  "required": ["city"], "additionalProperties": False}}
    options = dict(model=model, messages=messages, tools=[{"type": "function", "function": function}],
                   tool_choice="required", max_tokens=200, temperature=0)
    answer = client.chat.completions.create(**options).choices[0]
    if answer.finish_reason == "tool_calls":
        call = answer.message.tool_calls[0]
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome"}
        with client.chat.completions.stream(**options) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.name == "weather"
        # The next turn: the call, and what the tool returned.
        history = [*messages, answer.message.model_dump(exclude_none=True),
                   {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        client.chat.completions.create(model=model, messages=history, max_tokens=2)


def check_echo():
    answer = client.completions.create(model=model, prompt="echo", max_tokens=0, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs[0] is None and len(logprobs.top_logprobs[1]) >= 2
    assert answer.choices[0].text == "".join(logprobs.tokens), answer
    assert answer.usage.completion_tokens == 0, answer


def check_responses():
    options = dict(model=model, input=messages, instructions="be brief", max_output_tokens=12, temperature=0)
    whole = client.responses.create(**options)
    assert whole.status in ("completed", "incomplete") and whole.store is False
    assert whole.output_text == whole.output[0].content[0].text
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "system", "content": "be brief"}, *messages], max_tokens=12, temperature=0)
    assert whole.output_text == chat.choices[0].message.content
    text, kinds = "", []
    for event in client.responses.create(**options, stream=True):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] == f"response.{whole.status}"
    # The client's own collector of events.
    with client.responses.stream(**options) as stream:
        assert [event.type for event in stream] == kinds
    tool = {"type": "function", "name": "weather", "strict": True,
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"],
                           "additionalProperties": False}}
    options = dict(model=model, tools=[tool], temperature=0)
    answer = client.responses.create(input=messages, tool_choice="required", max_output_tokens=200, **options)
    if answer.status == "completed":
        call = answer.output[0]
        assert call.name == "weather" and json.loads(call.arguments) == {"city": "Rome"}
        # The next turn: the call, and what the tool returned.
        history = [*messages, *answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
        client.responses.create(input=history, max_output_tokens=2, **options)
    error = refused(openai.BadRequestError, lambda: client.responses.create(model=model, input="a", store=True))
    assert error.param == "store", error


def check_embeddings():
    plain = client.embeddings.create(model=model, input=["a", "b"], encoding_format="float")
    packed = client.embeddings.create(model=model, input=["a", "b"])  # the client asks for base64
    for one, other in zip(plain.data, packed.data, strict=True):
        assert all(abs(x - y) < 1e-6 for x, y in zip(one.embedding, other.embedding, strict=True))
        assert abs(sum(x * x for x in one.embedding) - 1) < 1e-5


def check_errors():
    stranger = openai.OpenAI(base_url=url, api_key="sk-other", max_retries=0)
    refused(openai.AuthenticationError, lambda: list(stranger.models.list()))
    call = lambda **more: client.chat.completions.create(model=model, messages=messages, **more)
    error = refused(openai.BadRequestError, lambda: call(temperature=-1))
    assert error.param == "temperature" and error.body["type"] == "invalid_request_error", error
    error = refused(openai.BadRequestError, lambda: call(max_tokens=100000))
    assert error.code == "context_length_exceeded", error


for check in (check_models, check_completions, check_chat, check_schema, check_tools, check_echo, check_responses, check_embeddings,
              check_errors):
    check()
    print(check.__name__, "agrees")
print("all of it agrees with openai", openai.__version__)
