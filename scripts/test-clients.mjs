// The official JavaScript clients of OpenAI and Anthropic, and the AI SDK with its providers, a call of each kind.
//   node test-clients.mjs URL     from a folder that has them in node_modules, this file among them
import assert from 'node:assert/strict'

const url = process.argv[2]
const origin = url.replace(/\/v1$/, '')
const model = 'builtin'
const prompt = 'Tell me a story about a fox named Ruby.'
const messages = [{ role: 'user', content: prompt }]
const places = ['Rome', 'Oslo']
const weather = { type: 'object', properties: { place: { type: 'string', enum: places } }, required: ['place'], additionalProperties: false }
const isPlace = ({ place }) => assert.ok(places.includes(place), place)

async function all(stream) {
  const items = []
  for await (const item of stream) items.push(item)
  return items
}

async function ofOpenai() {
  const { default: OpenAI } = await import('openai')
  const client = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0 })
  assert.equal((await client.models.list()).data[0].id, model)
  assert.equal((await client.models.retrieve(model)).id, model)

  const whole = await client.chat.completions.create({ model, messages, temperature: 0 })
  const text = whole.choices[0].message.content
  assert.match(text, /Ruby/)
  const chunks = await all(await client.chat.completions.create({ model, messages, temperature: 0, stream: true, stream_options: { include_usage: true } }))
  assert.equal(chunks.map(({ choices }) => choices[0]?.delta.content ?? '').join(''), text)
  assert.ok(chunks.at(-1).usage.prompt_tokens_details.cached_tokens > 0)
  assert.equal(await client.chat.completions.stream({ model, messages, temperature: 0 }).finalContent(), text)

  const scored = await client.chat.completions.create({ model, messages, max_tokens: 4, logprobs: true, top_logprobs: 2, n: 2, seed: 1 })
  assert.deepEqual(scored.choices.map(({ logprobs }) => logprobs.content.length), [4, 4])

  const tools = [{ type: 'function', function: { name: 'weather', parameters: weather } }]
  const called = await client.chat.completions.create({ model, messages, tools, tool_choice: 'required' })
  const [{ message, finish_reason }] = called.choices
  assert.equal(finish_reason, 'tool_calls')
  isPlace(JSON.parse(message.tool_calls[0].function.arguments))
  const streamed = await client.chat.completions.stream({ model, messages, tools, tool_choice: 'required' }).finalChatCompletion()
  assert.equal(streamed.choices[0].message.tool_calls[0].function.name, 'weather')
  const result = { role: 'tool', tool_call_id: message.tool_calls[0].id, content: 'rain' }
  await client.chat.completions.create({ model, messages: [...messages, message, result], tools, max_tokens: 4 })
  const asked = []
  const run = { type: 'function', function: { name: 'weather', parameters: weather, parse: JSON.parse, function: place => { asked.push(place); return 'rain' } } }
  // A function that is forced is called once.
  await client.chat.completions.runTools({ model, messages, tools: [run], tool_choice: { type: 'function', function: { name: 'weather' } } }).done()
  isPlace(asked[0])

  const format = { type: 'json_schema', json_schema: { name: 'w', schema: weather, strict: true } }
  isPlace((await client.chat.completions.parse({ model, messages, response_format: format })).choices[0].message.parsed)

  const echoed = await client.completions.create({ model, prompt: 'Once upon', max_tokens: 3, echo: true, logprobs: 1 })
  assert.match(echoed.choices[0].text, /^Once upon/)
  // The client asks for base64 where nothing else is said.
  const vectors = await client.embeddings.create({ model, input: ['a', 'b'], pooling: 'mean' })
  assert.deepEqual(vectors.data.map(({ embedding }) => embedding.length), [256, 256])

  const response = await client.responses.create({ model, input: prompt, temperature: 0 })
  assert.match(response.output_text, /Ruby/)
  const following = await client.responses.create({ model, input: 'And then?', previous_response_id: response.id, max_output_tokens: 3 })
  assert.equal(following.status, 'incomplete')
  const events = await all(await client.responses.create({ model, input: prompt, temperature: 0, stream: true }))
  assert.deepEqual([events[0].type, events.at(-1).type], ['response.created', 'response.completed'])
  const stream = client.responses.stream({ model, input: prompt, temperature: 0 })
  assert.equal((await stream.finalResponse()).output_text, response.output_text)
  isPlace((await client.responses.parse({ model, input: prompt, text: { format: { type: 'json_schema', name: 'w', schema: weather, strict: true } } })).output_parsed)

  await assert.rejects(client.chat.completions.create({ model: 'none', messages }), OpenAI.NotFoundError)
  await assert.rejects(client.chat.completions.create({ model, messages, temperature: -1 }), OpenAI.BadRequestError)
  // Whoever leaves is no error of the server's.
  const left = await client.chat.completions.create({ model, messages, stream: true })
  for await (const _ of left) break
}

async function ofAnthropic() {
  const { default: Anthropic } = await import('@anthropic-ai/sdk')
  const client = new Anthropic({ baseURL: origin, apiKey: 'none', maxRetries: 0 })
  assert.equal((await all(client.models.list()))[0].id, model)
  assert.equal((await client.models.retrieve(model)).id, model)
  const more = { model, messages, max_tokens: 300 }
  const whole = await client.messages.create({ ...more, temperature: 0 })
  assert.match(whole.content[0].text, /Ruby/)
  assert.equal(whole.stop_reason, 'end_turn')
  const stream = client.messages.stream({ ...more, temperature: 0 })
  assert.equal(await stream.finalText(), whole.content[0].text)
  assert.ok((await stream.finalMessage()).usage.cache_read_input_tokens > 0)
  const events = await all(await client.messages.create({ ...more, temperature: 0, stream: true }))
  assert.deepEqual([events[0].type, events.at(-1).type], ['message_start', 'message_stop'])
  assert.ok((await client.messages.countTokens({ model, messages })).input_tokens > 5)
  const tools = [{ name: 'weather', input_schema: weather }]
  const called = await client.messages.create({ ...more, tools, tool_choice: { type: 'any' } })
  assert.equal(called.stop_reason, 'tool_use')
  isPlace(called.content[0].input)
  isPlace((await client.messages.stream({ ...more, tools, tool_choice: { type: 'any' } }).finalMessage()).content[0].input)
  const result = { type: 'tool_result', tool_use_id: called.content[0].id, content: 'rain' }
  await client.messages.create({ model, max_tokens: 4, tools, messages: [...messages, { role: 'assistant', content: called.content }, { role: 'user', content: [result] }] })
  await assert.rejects(client.messages.create({ ...more, model: 'none' }), Anthropic.NotFoundError)
}

async function ofAiSdk() {
  const { embedMany, generateText, jsonSchema, Output, streamText, tool } = await import('ai')
  const { createOpenAICompatible } = await import('@ai-sdk/openai-compatible')
  const { createAnthropic } = await import('@ai-sdk/anthropic')
  const compatible = createOpenAICompatible({ name: 'sterna', baseURL: url, supportsStructuredOutputs: true })
  const anthropic = createAnthropic({ baseURL: url, apiKey: 'none' })
  const tools = { weather: tool({ inputSchema: jsonSchema(weather) }) }
  for (const of of [compatible(model), anthropic(model)]) {
    const options = { model: of, prompt, temperature: 0, maxRetries: 0, maxOutputTokens: 300 }
    const { text, usage } = await generateText(options)
    assert.match(text, /Ruby/)
    assert.ok(usage.inputTokens > 5 && usage.outputTokens > 5, usage)
    assert.equal((await all(streamText(options).textStream)).join(''), text)
    const { toolCalls, finishReason } = await generateText({ ...options, tools, toolChoice: 'required' })
    isPlace(toolCalls[0].input)
    assert.equal(finishReason, 'tool-calls')
    isPlace((await streamText({ ...options, tools, toolChoice: { type: 'tool', toolName: 'weather' } }).toolCalls)[0].input)
    isPlace((await generateText({ ...options, output: Output.object({ schema: jsonSchema(weather) }) })).output)
  }
  // The provider has no way to say how vectors are pooled.
  const pooled = (to, { body, ...init }) => fetch(to, { ...init, body: JSON.stringify({ ...JSON.parse(body), pooling: 'mean' }) })
  const embedder = createOpenAICompatible({ name: 'sterna', baseURL: url, fetch: pooled }).embeddingModel(model)
  const { embeddings } = await embedMany({ model: embedder, values: ['a', 'b'] })
  assert.deepEqual(embeddings.map(({ length }) => length), [256, 256])
}

for (const judge of [ofOpenai, ofAnthropic, ofAiSdk]) {
  await judge()
  console.log(`${judge.name}: ok`)
}
