/**
 * A language model for the Vercel AI SDK:
 *
 * ```js
 * import { streamText } from 'ai'
 * import { sterna } from 'sterna/ai-sdk'
 *
 * const { textStream } = streamText({ model: sterna(model), prompt: 'Hello' })
 * ```
 *
 * It has the shape of the SDK's interface and imports nothing of it: version 3 for AI SDK 6 and later as
 * default, 2 for AI SDK 5. Text in, text or JSON out: tools and files are reported as unsupported.
 */
import { SternaError } from './error.js'
import type { Generation } from './generation.js'
import type { Model } from './model.js'
import type { GenerateOptions, JsonSchema, Message } from './types.js'

interface Part { type: string; text?: string; [more: string]: unknown }
/** What the SDK calls with; the parts that are used. */
export interface CallOptions {
  prompt: { role: string; content: string | readonly object[] }[]
  maxOutputTokens?: number | undefined
  temperature?: number | undefined
  stopSequences?: string[] | undefined
  topP?: number | undefined
  topK?: number | undefined
  presencePenalty?: number | undefined
  frequencyPenalty?: number | undefined
  seed?: number | undefined
  responseFormat?: { type: 'text' } | { type: 'json'; schema?: JsonSchema | undefined } | undefined
  tools?: readonly object[] | undefined
  abortSignal?: AbortSignal | undefined
}

type Reason = 'stop' | 'length' | 'other'
interface Usage3 {
  inputTokens: { total: number | undefined; noCache: number | undefined; cacheRead: number | undefined; cacheWrite: number | undefined }
  outputTokens: { total: number | undefined; text: number | undefined; reasoning: number | undefined }
}
interface Usage2 { inputTokens: number | undefined; outputTokens: number | undefined; totalTokens: number | undefined; cachedInputTokens?: number }
interface Shapes {
  v2: { usage: Usage2; finish: Reason; warning: { type: 'unsupported-setting'; setting: 'tools'; details?: string } }
  v3: { usage: Usage3; finish: { unified: Reason; raw: string | undefined }; warning: { type: 'unsupported'; feature: string; details?: string } }
}
type Version = keyof Shapes
type StreamPart<V extends Version> =
  | { type: 'stream-start'; warnings: Shapes[V]['warning'][] }
  | { type: 'text-start' | 'text-end'; id: string }
  | { type: 'text-delta'; id: string; delta: string }
  | { type: 'finish'; usage: Shapes[V]['usage']; finishReason: Shapes[V]['finish'] }
  | { type: 'error'; error: unknown }

/** `LanguageModelV2` or `LanguageModelV3` of `@ai-sdk/provider`. */
export interface SternaLanguageModel<V extends Version> {
  readonly specificationVersion: V
  readonly provider: 'sterna'
  readonly modelId: string
  readonly supportedUrls: Record<string, RegExp[]>
  doGenerate(options: CallOptions): Promise<{
    content: { type: 'text'; text: string }[]; finishReason: Shapes[V]['finish']; usage: Shapes[V]['usage']; warnings: Shapes[V]['warning'][]
  }>
  doStream(options: CallOptions): Promise<{ stream: ReadableStream<StreamPart<V>> }>
}

export function sterna(model: Model, options?: { version?: 'v3' }): SternaLanguageModel<'v3'>
export function sterna(model: Model, options: { version: 'v2' }): SternaLanguageModel<'v2'>
export function sterna(model: Model, { version = 'v3' }: { version?: Version } = {}): SternaLanguageModel<Version> {
  return languageModel(model, version)
}

function languageModel<V extends Version>(model: Model, version: V): SternaLanguageModel<V> {
  const usage = ({ usage }: Generation): Shapes[V]['usage'] => {
    const { promptTokens: input, cachedTokens: cached, completionTokens: output } = usage ?? {}
    const v2: Usage2 = { inputTokens: input, outputTokens: output, totalTokens: usage && usage.promptTokens + usage.completionTokens, ...(cached === undefined ? {} : { cachedInputTokens: cached }) }
    const v3: Usage3 = {
      inputTokens: { total: input, noCache: usage && usage.promptTokens - usage.cachedTokens, cacheRead: cached, cacheWrite: undefined },
      outputTokens: { total: output, text: output, reasoning: undefined },
    }
    return version === 'v2' ? v2 : v3
  }
  const finish = ({ reason }: Generation): Shapes[V]['finish'] => {
    const unified: Reason = reason === 'stop' ? 'stop' : reason === 'length' || reason === 'context' ? 'length' : 'other'
    return version === 'v2' ? unified : { unified, raw: reason }
  }
  const warnings = ({ tools }: CallOptions): Shapes[V]['warning'][] =>
    tools?.length ? [version === 'v2' ? { type: 'unsupported-setting', setting: 'tools' } : { type: 'unsupported', feature: 'tools' }] : []
  return {
    specificationVersion: version, provider: 'sterna', modelId: model.info.name, supportedUrls: {},
    async doGenerate(options) {
      const generation = begin(model, options)
      const text = await generation.text()
      return { content: [{ type: 'text', text }], finishReason: finish(generation), usage: usage(generation), warnings: warnings(options) }
    },
    async doStream(options) {
      const generation = begin(model, options)
      const parts = (async function* (): AsyncGenerator<StreamPart<V>> {
        yield { type: 'stream-start', warnings: warnings(options) }
        yield { type: 'text-start', id: '0' }
        try {
          for await (const delta of generation) yield { type: 'text-delta', id: '0', delta }
        } catch (error) {
          yield { type: 'error', error }
          return
        }
        yield { type: 'text-end', id: '0' }
        yield { type: 'finish', usage: usage(generation), finishReason: finish(generation) }
      })()
      return {
        stream: new ReadableStream<StreamPart<V>>({
          async pull(controller) {
            const { done, value } = await parts.next()
            if (done) controller.close()
            else controller.enqueue(value)
          },
          cancel: () => generation.stop(),
        }),
      }
    },
  }
}

function begin(model: Model, call: CallOptions): Generation {
  const options: { [K in keyof GenerateOptions]: GenerateOptions[K] | undefined } = {
    maxTokens: call.maxOutputTokens, temperature: call.temperature, topP: call.topP, topK: call.topK, presencePenalty: call.presencePenalty,
    frequencyPenalty: call.frequencyPenalty, seed: call.seed, stop: call.stopSequences, signal: call.abortSignal,
    schema: call.responseFormat?.type === 'json' ? call.responseFormat.schema ?? { type: 'object' } : undefined,
  }
  return model.generate(call.prompt.map(messageOf), Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)))
}

function messageOf({ role, content }: CallOptions['prompt'][0]): Message {
  if (typeof content === 'string') return { role: role as Message['role'], content }
  const texts = (content as readonly Part[]).filter(({ type }) => type !== 'reasoning').map(({ type, text }) => {
    if (type !== 'text' || text === undefined) throw new SternaError('unsupported', `A ${role} message has a ${type}; this model takes text.`)
    return text
  })
  return { role: role as Message['role'], content: texts.join('') }
}
