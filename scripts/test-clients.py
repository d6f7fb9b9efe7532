"""The official clients of OpenAI and Anthropic, a call of each kind: what they return is typed by them."""

import json
import sys

import anthropic
import openai

url = sys.argv[1]
prompt = "Tell me a story about a fox named Ruby."
chat = [{"role": "user", "content": prompt}]
weather = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}


def of_openai():
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    assert client.models.list().data[0].id == "builtin"
    assert client.models.retrieve("builtin").id == "builtin"

    whole = client.chat.completions.create(model="builtin", messages=chat, temperature=0)
    text = whole.choices[0].message.content
    assert "Ruby" in text and whole.usage.prompt_tokens > 0, whole
    chunks = list(
        client.chat.completions.create(
            model="builtin", messages=chat, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == text and chunks[-1].usage.prompt_tokens_details.cached_tokens > 0, chunks[-1]

    scored = client.chat.completions.create(
        model="builtin", messages=chat, max_tokens=4, logprobs=True, top_logprobs=2, n=2, seed=1
    )
    assert len(scored.choices) == 2 and len(scored.choices[1].logprobs.content) == 4

    tools = [{"type": "function", "function": {"name": "weather", "parameters": weather}}]
    called = client.chat.completions.create(model="builtin", messages=chat, tools=tools, tool_choice="required")
    call = called.choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["place"] in ("Rome", "Oslo")
    with client.chat.completions.stream(
        model="builtin", messages=chat, tools=tools, tool_choice="required"
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls", final
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    client.chat.completions.create(
        model="builtin", messages=[*chat, called.choices[0].message, result], tools=tools, max_tokens=4
    )

    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": weather, "strict": True}}
    matched = client.chat.completions.create(model="builtin", messages=chat, response_format=schema)
    assert json.loads(matched.choices[0].message.content)["place"] in ("Rome", "Oslo")

    echoed = client.completions.create(model="builtin", prompt="Once upon", max_tokens=3, echo=True, logprobs=1)
    assert echoed.choices[0].text.startswith("Once upon") and echoed.choices[0].logprobs.tokens
    vectors = client.embeddings.create(model="builtin", input=["a", "b"], extra_body={"pooling": "mean"})
    assert len(vectors.data) == 2 and len(vectors.data[0].embedding) == 256

    response = client.responses.create(model="builtin", input=prompt, temperature=0)
    assert "Ruby" in response.output_text and response.status == "completed"
    following = client.responses.create(
        model="builtin", input="And then?", previous_response_id=response.id, max_output_tokens=3
    )
    assert following.status == "incomplete" and following.usage.input_tokens > response.usage.input_tokens
    with client.responses.stream(model="builtin", input=prompt, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == response.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"

    for wrong, kind in (
        (dict(model="none", messages=chat), openai.NotFoundError),
        (dict(model="builtin", messages=chat, temperature=-1), openai.BadRequestError),
    ):
        try:
            client.chat.completions.create(**wrong)
        except kind:
            continue
        raise AssertionError(wrong)


def of_anthropic():
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0)
    assert next(iter(client.models.list())).id == "builtin"
    more = dict(model="builtin", messages=chat, max_tokens=300)
    whole = client.messages.create(**more, extra_body={"temperature": 0})
    assert "Ruby" in whole.content[0].text and whole.stop_reason == "end_turn", whole
    with client.messages.stream(**more, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.cache_read_input_tokens > 0
    assert client.messages.count_tokens(model="builtin", messages=chat).input_tokens > 5
    tools = [{"name": "weather", "input_schema": weather}]
    called = client.messages.create(**more, tools=tools, tool_choice={"type": "any"})
    block = called.content[0]
    assert block.type == "tool_use" and block.input["place"] in ("Rome", "Oslo")
    with client.messages.stream(**more, tools=tools, tool_choice={"type": "any"}) as stream:
        assert stream.get_final_message().content[0].input["place"] in ("Rome", "Oslo")
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    turns = [*chat, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    client.messages.create(model="builtin", messages=turns, tools=tools, max_tokens=4)
    try:
        client.messages.create(model="none", messages=chat, max_tokens=1)
    except anthropic.NotFoundError:
        return
    raise AssertionError("expected an error")


for judge in (of_openai, of_anthropic):
    judge()
    print(f"{judge.__name__}: ok")
