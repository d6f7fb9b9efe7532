import { Chat, type ChatBackend, type ChatOptions } from './chat.js'
import { SternaError } from './error.js'
import { Generation } from './generation.js'
import { openai, type OpenAi } from './openai.js'
import type { Remote } from './rpc.js'
import { wireGrammar } from './schema.js'
import { wireSource } from './source.js'
import type {
  AdapterUse, Calls, GenerateOptions, Message, ModelInfo, Notice, Progress, ReceiptCheck, Sampling, Source, SourceOptions, SwapResult,
} from './types.js'

/** `model.chat(options)` begins a chat; `model.chat.completions.create` is shaped like OpenAI's. */
export type ChatFactory = ((options?: ChatOptions) => Chat) & OpenAi['chat']

const adapterUse = (adapter: string | AdapterUse): AdapterUse => typeof adapter === 'string' ? { name: adapter } : adapter

/** A loaded model, in its Worker. Made by `Sterna.load`. */
export class Model {
  /** As of the last change. */
  info: ModelInfo
  readonly chat: ChatFactory
  readonly #remote: Remote<Calls>
  readonly #end: () => void
  readonly #onNotice: (notice: Notice) => void
  #disposed = false

  /** @internal */
  constructor(remote: Remote<Calls>, info: ModelInfo, onNotice: (notice: Notice) => void, end: () => void) {
    this.#remote = remote
    this.#end = end
    this.#onNotice = onNotice
    this.info = info
    const backend: ChatBackend = {
      open: contextLength => remote.call('open', contextLength === undefined ? {} : { contextLength }),
      close: async session => void await remote.call('close', session).catch(error => { if (!this.#disposed) throw error }),
      answer: (session, messages, forget, options) => this.#generate(session, messages, forget, options),
    }
    this.chat = Object.assign((options: ChatOptions = {}) => new Chat(backend, options), openai(this).chat)
  }

  /** Continues a text, or answers messages by the model's chat template. */
  generate(prompt: string | Message[], options: GenerateOptions = {}): Generation {
    return this.#generate(undefined, prompt, false, options)
  }

  #generate(session: Promise<number> | undefined, prompt: string | Message[], forget: boolean, options: GenerateOptions): Generation {
    const { signal, stop, schema, tools, adapters, ...sampling } = options
    const grammar = schema === undefined ? undefined : wireGrammar(schema)
    const wire: Sampling = { ...sampling, ...(stop === undefined ? {} : { stop: typeof stop === 'string' ? [stop] : stop }) }
    return new Generation(async (signal, onItem) => this.#remote.call('generate', {
      prompt, forget, options: wire, ...(session ? { session: await session } : {}), ...(grammar ? { grammar } : {}), ...(tools ? { tools } : {}), ...(adapters ? { adapters } : {}),
    }, { signal, onItem }), signal, notice => this.#notice(notice))
  }

  #notice(notice: Notice): void {
    this.#onNotice(notice)
    // The backend may be another from now on.
    this.#remote.call('info', null).then(info => { this.info = info }, () => {})
  }

  /** Token ids of a text, or of messages with the chat template. */
  async tokenize(text: string | Message[]): Promise<number[]> {
    return [...await this.#remote.call('tokenize', text)]
  }

  async detokenize(ids: ArrayLike<number>): Promise<string> {
    return this.#remote.call('detokenize', Uint32Array.from(ids))
  }

  /** Logits after the last of `ids`: `[info.vocabulary]`; with `all` after each: `[ids.length, info.vocabulary]`. */
  async logits(ids: ArrayLike<number>, { all = false, signal }: { all?: boolean; signal?: AbortSignal } = {}): Promise<Float32Array> {
    return this.#remote.call('logits', { ids: Uint32Array.from(ids), all }, { signal })
  }

  /** Computes the answer of a receipt again, on the CPU: whether its bits are those of this model. Adapters in the receipt's order. */
  check(receipt: string | object, { adapters = [] }: { adapters?: Array<string | AdapterUse> } = {}): Promise<ReceiptCheck> {
    return this.#remote.call('check', { receipt: typeof receipt === 'string' ? receipt : JSON.stringify(receipt), adapters: adapters.map(adapterUse) })
  }

  /** LoRA adapters. */
  readonly adapters = {
    /** Loads an adapter under a name. */
    add: async (name: string, source: Source, options: SourceOptions = {}): Promise<void> => {
      await this.#remote.call('addAdapter', { name, from: wireSource(source, options) }, this.#loading(options))
    },
    remove: async (name: string): Promise<void> => {
      await this.#remote.call('removeAdapter', name)
    },
    /** Those of the answers from now on, in place of the ones before. A name alone has strength 1. */
    use: async (...adapters: (string | AdapterUse)[]): Promise<void> => {
      await this.#remote.call('useAdapters', adapters.map(adapterUse))
    },
  }

  /** Replaces groups of weights, all if none is named, by those of another package of the same shape. */
  async swap(source: Source, { groups = [], ...options }: SourceOptions & { groups?: string[] } = {}): Promise<SwapResult[]> {
    const swapped = await this.#remote.call('swap', { groups, from: wireSource(source, options) }, this.#loading(options))
    this.info = await this.#remote.call('info', null)
    return swapped
  }

  #loading({ signal, onProgress }: SourceOptions) {
    const onItem = (item: Progress | { notice: Notice }) => 'notice' in item ? this.#onNotice(item.notice) : onProgress?.(item)
    return { signal, onItem }
  }

  /** Bytes in use. */
  memory(): Promise<{ wasmBytes: number; gpuBytes: number }> {
    return this.#remote.call('memory', null)
  }

  /** Ends running answers and frees all memory. What is stored stays. */
  async dispose(): Promise<void> {
    if (this.#disposed) return
    this.#disposed = true
    // A Worker in the middle of a long step is ended all the same.
    const late = new Promise(resolve => setTimeout(resolve, 1000))
    await Promise.race([this.#remote.call('dispose', null).catch(() => {}), late])
    this.#end()
    this.#remote.fail(new SternaError('disposed', 'The model was disposed.'))
  }
}
