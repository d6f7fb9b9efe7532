/** `chat.completions.create` in OpenAI's shape, in this tab or by a server. */
import { SternaError } from './error.js'
import type { Generation } from './generation.js'
import type { Model } from './model.js'
import type { GenerateOptions, JsonSchema, Message, TokenLogprob } from './types.js'

export interface ChatCompletionRequest {
  messages: Message[]
  /** Which of a server's models; in a tab it is only repeated. */
  model?: string
  stream?: boolean
  stream_options?: { include_usage?: boolean }
  max_tokens?: number | null
  max_completion_tokens?: number | null
  temperature?: number | null
  top_p?: number | null
  top_k?: number | null
  min_p?: number | null
  repeat_penalty?: number | null
  presence_penalty?: number | null
  frequency_penalty?: number | null
  seed?: number | null
  stop?: string | string[] | null
  logprobs?: boolean | null
  top_logprobs?: number | null
  logit_bias?: Record<string, number> | null
  tools?: unknown[]
  n?: number | null
  response_format?: { type: string; [more: string]: unknown }
}

type Finish = 'stop' | 'length'
interface Logprobs { content: { token: string; logprob: number; bytes: number[]; top_logprobs: { token: string; logprob: number; bytes: number[] }[] }[] }
interface CompletionUsage { prompt_tokens: number; completion_tokens: number; total_tokens: number; prompt_tokens_details?: { cached_tokens: number } }

export interface ChatCompletion {
  id: string
  object: 'chat.completion'
  created: number
  model: string
  choices: { index: number; message: { role: 'assistant'; content: string | null; [more: string]: unknown }; finish_reason: Finish | (string & {}); logprobs: Logprobs | null }[]
  usage?: CompletionUsage
}
export interface ChatCompletionChunk {
  id: string
  object: 'chat.completion.chunk'
  created: number
  model: string
  choices: { index: number; delta: { role?: 'assistant'; content?: string | null; [more: string]: unknown }; finish_reason: Finish | (string & {}) | null; logprobs?: Logprobs | null }[]
  usage?: CompletionUsage | null
}

export interface OpenAi {
  chat: {
    completions: {
      /** With `stream` an async iterable of chunks, else the completion. Errors are `SternaError`s; a server's have `status`. */
      create(request: ChatCompletionRequest & { stream: true }, options?: { signal?: AbortSignal }): Promise<AsyncIterable<ChatCompletionChunk>>
      create(request: ChatCompletionRequest & { stream?: false }, options?: { signal?: AbortSignal }): Promise<ChatCompletion>
      create(request: ChatCompletionRequest, options?: { signal?: AbortSignal }): Promise<ChatCompletion | AsyncIterable<ChatCompletionChunk>>
    }
  }
}
export interface OpenAiOptions { apiKey?: string; headers?: Record<string, string> }

type Answer = { whole(): Promise<ChatCompletion>; chunks(): AsyncIterable<ChatCompletionChunk> }

export function openai(target: Model | string | URL, options: OpenAiOptions = {}): OpenAi {
  const ask = typeof target === 'string' || target instanceof URL ? serverAt(target, options) : inTab(target)
  const create = async (request: ChatCompletionRequest, { signal }: { signal?: AbortSignal } = {}) => {
    const answer = await ask(request, signal)
    return request.stream ? answer.chunks() : answer.whole()
  }
  return { chat: { completions: { create: create as OpenAi['chat']['completions']['create'] } } }
}

/** The options of a request. Throws `unsupported` for what the engine can't do. */
function optionsOf(request: ChatCompletionRequest, signal: AbortSignal | undefined): GenerateOptions {
  if ((request.n ?? 1) !== 1) throw new SternaError('unsupported', 'n: one answer at a time in a tab.')
  const all: { [K in keyof GenerateOptions]: GenerateOptions[K] | null | undefined } = {
    maxTokens: request.max_completion_tokens ?? request.max_tokens, temperature: request.temperature ?? 1, topP: request.top_p, topK: request.top_k,
    minP: request.min_p, repeatPenalty: request.repeat_penalty, presencePenalty: request.presence_penalty, frequencyPenalty: request.frequency_penalty,
    seed: request.seed, stop: request.stop, logprobs: request.logprobs ? request.top_logprobs ?? 0 : undefined, logitBias: request.logit_bias, tools: request.tools, schema: schemaOf(request.response_format), signal,
  }
  return Object.fromEntries(Object.entries(all).filter(([, value]) => value !== null && value !== undefined))
}

/** What `response_format` asks an answer to match. */
function schemaOf(format: ChatCompletionRequest['response_format']): JsonSchema | undefined {
  switch (format?.type) {
    case undefined: case 'text': return undefined
    case 'json_object': return { type: 'object' }
    case 'json_schema': {
      const { schema } = (format.json_schema ?? {}) as { schema?: JsonSchema }
      if (schema === undefined) throw new SternaError('invalid_request', 'response_format.json_schema.schema: expected a JSON schema, found none.')
      return schema
    }
    default: throw new SternaError('unsupported', `response_format: expected text, json_object or json_schema, found ${format!.type}.`)
  }
}

function inTab(model: Model): (request: ChatCompletionRequest, signal?: AbortSignal) => Promise<Answer> {
  return async (request, signal) => {
    const generation = model.generate(request.messages, optionsOf(request, signal))
    const head = { id: `chatcmpl-${Math.random().toString(36).slice(2)}`, created: Math.floor(Date.now() / 1000), model: request.model ?? model.info.name }
    return {
      async whole() {
        const content = await generation.text()
        return {
          ...head, object: 'chat.completion', usage: usageOf(generation),
          choices: [{ index: 0, message: { role: 'assistant', content }, finish_reason: finishOf(generation), logprobs: request.logprobs ? logprobsOf(generation.logprobs) : null }],
        }
      },
      async *chunks() {
        const chunk = (delta: ChatCompletionChunk['choices'][0]['delta'], finish_reason: Finish | null, logprobs: Logprobs | null = null): ChatCompletionChunk =>
          ({ ...head, object: 'chat.completion.chunk', choices: [{ index: 0, delta, finish_reason, logprobs }], ...(request.stream_options?.include_usage ? { usage: null } : {}) })
        yield chunk({ role: 'assistant', content: '' }, null)
        let told = 0
        const news = () => {
          const fresh = generation.logprobs.slice(told)
          told += fresh.length
          return request.logprobs ? logprobsOf(fresh) : null
        }
        for await (const content of generation) yield chunk({ content }, null, news())
        yield chunk({}, finishOf(generation), news())
        if (request.stream_options?.include_usage) yield { ...head, object: 'chat.completion.chunk', choices: [], usage: usageOf(generation) }
      },
    }
  }
}

const finishOf = ({ reason }: Generation): Finish => reason === 'length' || reason === 'context' ? 'length' : 'stop'

function usageOf({ usage = { promptTokens: 0, cachedTokens: 0, completionTokens: 0 } }: Generation): CompletionUsage {
  const { promptTokens, cachedTokens, completionTokens } = usage
  return { prompt_tokens: promptTokens, completion_tokens: completionTokens, total_tokens: promptTokens + completionTokens, prompt_tokens_details: { cached_tokens: cachedTokens } }
}

function logprobsOf(logprobs: TokenLogprob[]): Logprobs {
  const one = ({ text, logprob }: { text: string; logprob: number }) => ({ token: text, logprob, bytes: [...new TextEncoder().encode(text)] })
  return { content: logprobs.map(token => ({ ...one(token), top_logprobs: token.top.map(one) })) }
}

function serverAt(address: string | URL, { apiKey, headers }: OpenAiOptions): (request: ChatCompletionRequest, signal?: AbortSignal) => Promise<Answer> {
  const base = String(address).replace(/\/+$/, '')
  const url = `${/\/v\d+$/.test(base) ? base : `${base}/v1`}/chat/completions`
  return async (request, signal) => {
    let response: Response
    try {
      response = await fetch(url, {
        method: 'POST', body: JSON.stringify(request), signal: signal ?? null,
        headers: { 'Content-Type': 'application/json', ...(apiKey ? { Authorization: `Bearer ${apiKey}` } : {}), ...headers },
      })
    } catch (error) {
      throw SternaError.from(error)
    }
    if (!response.ok) {
      const text = await response.text()
      let message = text
      try { message = (JSON.parse(text) as { error?: { message?: string } }).error?.message ?? text } catch { /* Not JSON. */ }
      throw new SternaError('server', `${url} answered ${response.status}: ${message}`, { status: response.status })
    }
    return {
      whole: () => response.json().catch((error: unknown) => { throw SternaError.from(error) }) as Promise<ChatCompletion>,
      chunks: () => events(response),
    }
  }
}

/** The chunks of a server's event stream. */
async function* events(response: Response): AsyncGenerator<ChatCompletionChunk, void, undefined> {
  const reader = response.body!.pipeThrough(new TextDecoderStream() as TransformStream<Uint8Array, string>).getReader()
  let rest = ''
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error: unknown) => { throw SternaError.from(error) })
      const lines = (rest + (value ?? '')).split(/\r?\n/)
      rest = done ? '' : lines.pop()!
      for (const line of lines) {
        if (!line.startsWith('data:')) continue
        const data = line.slice(5).trim()
        if (data === '[DONE]') return
        const chunk = JSON.parse(data) as ChatCompletionChunk & { error?: { message?: string } }
        if (chunk.error) throw new SternaError('server', chunk.error.message ?? 'The server failed.', { status: response.status })
        yield chunk
      }
      if (done) return
    }
  } finally {
    await reader.cancel().catch(() => {})
  }
}
