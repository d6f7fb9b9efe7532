/** The public shapes, and the calls between the page and the Worker. Sizes are bytes. */
import type { Message, ModelInfo as EngineInfo, OfferAnswer } from './engine.js'
import type { Signalling } from './signalling.js'

export type { Message }

/**
 * Where a model is.
 *
 * - `https://host/folder/` or `…/manifest.json`: a package
 * - `https://host/model.gguf`: a GGUF file, or the first of a split set
 * - `OWNER/REPO` or `https://huggingface.co/OWNER/REPO`: a Hugging Face repository
 * - a `File` or several: a GGUF file, a split set, or the files of a folder; read where they are, not copied
 * - a directory handle: a package, a checkpoint or a folder with a GGUF file; read where it is
 * - the `id` of a stored model
 *
 * A relative address begins with `/`, `./` or `../`, or ends in `/`, `.gguf` or `manifest.json`.
 */
export type Source = string | URL | File | readonly File[] | FileSystemDirectoryHandle

/** Where downloads are kept. `auto`: OPFS, else IndexedDB, else memory. */
export type StoreKind = 'opfs' | 'indexeddb' | 'memory'

export interface Progress {
  /**
   * `waiting`: another tab fetches this model, whose progress this is; `download`: bytes arrive, and what has
   * arrived is loaded; `load`: the rest is loaded from the store; `convert`: the source is read and converted.
   */
  phase: 'waiting' | 'download' | 'load' | 'convert'
  doneBytes: number
  totalBytes: number
  /** Bytes per second over the last seconds of a download. */
  bytesPerSecond?: number
  /** Of a download: each source, and the bytes that it sent in requests that have ended. */
  sources?: { name: string; bytes: number }[]
}

/** Something that a user may want to know, with a stable code: `device_lost`, `damaged_file`, `offline`, `conversion`, `false_bytes`, `no_peers`. */
export interface Notice { code: string; message: string }

/** A key that packages may be signed with: what `minisign` calls a public key, and a name for messages. */
export interface TrustedKey { name: string; key: string }

/** Options of everything that starts a Worker. */
export interface WorkerOptions {
  /** Address of the package's `worker/main.js` if it isn't beside its scripts. */
  workerUrl?: string | URL
}

/** Options of everything that needs the engine. */
export interface EngineOptions extends WorkerOptions {
  /** Threads on the CPU; more than one only where the page is cross-origin isolated. */
  threads?: number
  /** `false`: no relaxed SIMD, also where the browser has it. */
  relaxedSimd?: boolean
  /** Address of the `.wasm` file if it isn't beside the package's scripts; for all builds by an object. */
  wasmUrl?: string | URL | WasmUrls
}

/** Addresses of the engine's builds, of which one is loaded. */
export interface WasmUrls {
  plain: string | URL
  relaxed?: string | URL
  threads?: string | URL
  threadsRelaxed?: string | URL
  /** What the first `schema` loads. */
  constraint?: string | URL
}

/** Options of everything that reads a source. */
export interface SourceOptions {
  onProgress?: (progress: Progress) => void
  /** Stops the download; what has arrived is kept, so that the next call continues it. */
  signal?: AbortSignal
  store?: StoreKind | 'auto'
  /** Other addresses of the same package. */
  mirrors?: (string | URL)[]
  /** The file of a Hugging Face repository. */
  file?: string
  /** How stored files are checked before they are used: some blocks of each (as default), all, or none. */
  verify?: 'sample' | 'full' | 'none'
  /** Upper bound of the rate of a download. */
  bytesPerSecond?: number
  /** A package with a signature is refused (`untrusted`) unless one of these made it. */
  trust?: TrustedKey[]
}

/** How other tabs are found and reached. */
export interface PeerOptions {
  signalling: Signalling
  /** STUN and TURN servers, which tabs on different networks need. None as default: no server of others takes part. */
  iceServers?: RTCIceServer[]
  /** Tabs that are connected at most; 8 as default. */
  maxPeers?: number
}

/** What a tab gives to others, and how much of it. */
export interface ShareOptions extends Omit<PeerOptions, 'maxPeers'>, EngineOptions {
  /** Bytes per second to all tabs together. */
  bytesPerSecond?: number
  /** Bytes that one tab gets: one connection's key. What it asks for counts. */
  bytesPerPeer?: number
  /** Bytes that all tabs get together, until it is stopped. */
  totalBytes?: number
  /** Requests at a time; more are told that it is busy. 32 as default. */
  maxRequests?: number
  /** Tabs that are connected at most; others get no answer. 16 as default. */
  maxConnections?: number
  /** Stops it. */
  signal?: AbortSignal
}

export interface LoadOptions extends SourceOptions, EngineOptions {
  /** Takes the package from other tabs, too, beside its address and mirrors. Not without being asked for. */
  peers?: PeerOptions
  /** `auto` takes the GPU if there is one that computes correctly. */
  backend?: 'auto' | 'cpu' | 'gpu'
  /** Which GPU, where there are two; the browser may not follow. */
  device?: 'high-performance' | 'low-power'
  /** Milliseconds after which a GPU that doesn't answer is given up, and the CPU goes on; 60,000 as default. */
  gpuTimeout?: number
  /** Tokens of context of a session; as default what the model was trained for, at most 4096. */
  contextLength?: number
  /**
   * What the first conversation or text begins with: instructions, or all of its messages. It is computed layer by layer
   * while the weights arrive, at most its first 512 tokens, and counts among the `cachedTokens` of the first answer.
   */
  prefill?: string | Message[]
  /** What messages call the model. */
  name?: string
  onNotice?: (notice: Notice) => void
}

/** What can be converted: a GGUF file, a split set, or a checkpoint. */
export type ConvertSource = File | readonly File[] | FileSystemDirectoryHandle

export interface ConvertOptions extends EngineOptions {
  /** What the package is called; as default after the source and the types of its tensors. */
  name?: string
  onProgress?: (progress: Progress) => void
  onNotice?: (notice: Notice) => void
  /** Stops the conversion; nothing of it is kept. */
  signal?: AbortSignal
  /** Where the package is kept; `auto` takes OPFS, else IndexedDB. */
  store?: Exclude<StoreKind, 'memory'> | 'auto'
}

export interface AdapterUse { name: string; /** 1 as default. */ scale?: number }

/** A JSON schema. */
export type JsonSchema = boolean | { readonly [keyword: string]: unknown }
export type Schema = JsonSchema | { regex: string } | { grammar: string }

export interface GenerateOptions {
  /** As default until the model ends or the context is full. */
  maxTokens?: number
  /** 0 takes the most probable token. */
  temperature?: number
  topK?: number
  topP?: number
  minP?: number
  repeatPenalty?: number
  presencePenalty?: number
  frequencyPenalty?: number
  seed?: number
  stop?: string | string[]
  /** How many alternatives to report for each token; 0 is the token alone. */
  logprobs?: number
  /** Added to the logits of token ids. */
  logitBias?: Record<string, number>
  /**
   * What the answer matches, unless it is cut off: JSON that a schema describes, a regular expression, or a grammar in
   * llguidance's variant of Lark. `{ type: 'object' }` is any JSON object.
   */
  schema?: Schema
  /** Tools for the chat template. */
  tools?: unknown[]
  /** Instead of those set by `adapters.use`. */
  adapters?: AdapterUse[]
  signal?: AbortSignal
}

export interface Usage {
  promptTokens: number
  /** Those of the prompt that did not have to be computed. */
  cachedTokens: number
  completionTokens: number
}
/** `stopped`: by `Generation.stop()`. */
export type FinishReason = 'stop' | 'length' | 'context' | 'stopped'
export interface TokenLogprob {
  id: number
  text: string
  logprob: number
  top: { id: number; text: string; logprob: number }[]
}

export interface ModelInfo extends EngineInfo {
  name: string
  /** 1 without the build with threads. */
  threads: number
  /** Tokens of context of a session. */
  contextLength: number
}

export interface StoredModel {
  /** Names it for `load`, `models.remove` and `models.verify`; its address does so, too. */
  id: string
  /** Its address; the `id` of one that was converted here. */
  source: string
  /** The file of a Hugging Face repository that was asked for. */
  file?: string
  name: string
  /** Bytes that are stored. */
  bytes: number
  /** Bytes that it will have; unknown before its list of files was read. */
  totalBytes?: number
  complete: boolean
  /** Milliseconds since 1970. */
  usedAt: number
  store: StoreKind
}

/** What loading a source would take. */
export interface Plan {
  files: { name: string; size: number; here: boolean }[]
  totalBytes: number
  missingBytes: number
  /** What the browser would still store, if it says so. */
  freeBytes?: number
  /** Estimate of the memory for weights; the cache comes on top. */
  memoryBytes: number
  fits: boolean
}

export interface StorageUsage {
  store: StoreKind
  /** Of all models. */
  modelBytes: number
  /** Of the whole origin, and what it may use, as the browser estimates. */
  originBytes?: number
  quotaBytes?: number
  /** Whether the browser promised not to evict it. */
  persisted?: boolean
}

/** What this browser offers, and what would be used. */
export interface Doctor {
  version?: string
  engine: { ok: boolean; error?: Notice; build: 'plain' | 'relaxed' | 'threads' | 'threadsRelaxed' }
  simd: boolean
  /** Whether relaxed SIMD is there, and exact where the engine uses it. */
  relaxedSimd: boolean
  crossOriginIsolated: boolean
  cores: number
  /** GiB, rounded and capped by the browser. */
  deviceMemory?: number
  webgpu: { ok: boolean; reason?: Notice; adapter?: string; features: string[]; limits: Record<string, number> }
  storage: StorageUsage & { opfs: boolean; syncAccess: boolean; sharedReads: boolean; indexeddb: boolean; locks: boolean }
}

export interface ReceiptCheck {
  /** Whether the answer is what the model answers. */
  ok: boolean
  /** Of an answer of a GPU: how many tokens aren't the best, but within the margin. */
  withinMargin?: number
  /** What differs first. */
  difference?: string
  /** The place in the answer of the token that does, counted from 0. */
  index?: number
}

export interface SwapResult {
  group: string
  from: { version?: string; hash?: string }
  to: { version?: string; hash?: string }
}

// From here on: between the page and the Worker.

/** A source that can be posted. */
export type WireSource =
  | { kind: 'address'; addresses: string[] }
  | { kind: 'files'; files: File[] }
  | { kind: 'folder'; handle: FileSystemDirectoryHandle }
  | { kind: 'stored'; id: string }

export interface WireSourceOptions {
  source: WireSource
  store: StoreKind | 'auto'
  verify: 'sample' | 'full' | 'none'
  file?: string
  bytesPerSecond?: number
  trust?: TrustedKey[]
}
export interface WireEngine {
  wasmUrl: { [build in keyof WasmUrls]?: string }
  threads?: number
  relaxedSimd?: boolean
}
export interface WireLoad extends WireSourceOptions {
  backend: 'auto' | 'cpu' | 'gpu'
  device?: 'high-performance' | 'low-power'
  gpuTimeout?: number
  contextLength?: number
  prefill?: string | Message[]
  name: string
  /** Where the page answers `PeerCalls`. */
  peers?: MessagePort
}
export interface WireConvert {
  source: WireSource
  store: StoreKind | 'auto'
  name?: string
}
export type Sampling = Omit<GenerateOptions, 'signal' | 'stop' | 'adapters' | 'tools' | 'schema'> & { stop?: string[] }
export interface WireGrammar { kind: 'schema' | 'regex' | 'grammar'; text: string }
export interface WireGenerate {
  /** A session of `open`; without it one that is shared by such calls. */
  session?: number
  /** Text to continue, or messages for the template. */
  prompt: string | Message[]
  /** Leave out the oldest turns if they don't fit. */
  forget: boolean
  options: Sampling
  grammar?: WireGrammar
  tools?: unknown[]
  adapters?: AdapterUse[]
}
export type WireEvent = { text: string; logprob?: TokenLogprob } | { notice: Notice }
export interface WireEnd { reason: FinishReason; usage: Usage; forgotten: number }

/** What the Worker answers. */
export type Calls = {
  engine: { args: WireEngine; value: null }
  load: { args: WireLoad; item: Progress | { notice: Notice }; value: ModelInfo }
  fetch: { args: WireSourceOptions; item: Progress | { notice: Notice }; value: null }
  convert: { args: WireConvert; item: Progress | { notice: Notice }; value: StoredModel }
  plan: { args: WireSourceOptions; value: Plan }
  info: { args: null; value: ModelInfo }
  memory: { args: null; value: { wasmBytes: number; gpuBytes: number } }
  generate: { args: WireGenerate; item: WireEvent; value: WireEnd }
  open: { args: { contextLength?: number }; value: number }
  close: { args: number; value: null }
  tokenize: { args: string | Message[]; value: Uint32Array }
  detokenize: { args: Uint32Array; value: string }
  logits: { args: { ids: Uint32Array; all: boolean }; value: Float32Array }
  check: { args: { receipt: string; adapters: AdapterUse[] }; value: ReceiptCheck }
  addAdapter: { args: { name: string; from: WireSourceOptions }; item: Progress | { notice: Notice }; value: null }
  removeAdapter: { args: string; value: null }
  useAdapters: { args: AdapterUse[]; value: null }
  swap: { args: { groups: string[]; from: WireSourceOptions }; item: Progress | { notice: Notice }; value: SwapResult[] }
  list: { args: null; value: StoredModel[] }
  remove: { args: string; value: boolean }
  verify: { args: { id: string; mend: boolean }; item: Progress | { notice: Notice }; value: string[] }
  usage: { args: null; value: StorageUsage }
  purge: { args: null; value: number }
  /** Opens a stored package, which is checked, to be given to other tabs: the SHA-256 of its manifest. */
  offer: { args: string; value: string }
  /** What a request of another tab is answered. */
  offered: { args: string; value: OfferAnswer }
  /** Bytes of the offered package. */
  read: { args: { file: string; start: number; end: number }; value: Uint8Array }
  readText: { args: { id: string; name: string }; value: string | null }
  doctor: { args: null; value: Doctor }
  dispose: { args: null; value: null }
}


/** What the page answers to its Worker, which has no connections to other tabs. */
export type PeerCalls = {
  /** Finds tabs that have the package, until it is cancelled; items are their keys. */
  find: { args: { manifest: string }; item: { peer: string }; value: null }
  /** Asks one of them: the first item is the head of its answer. */
  ask: { args: { peer: string; request: string }; item: string | Uint8Array; value: null }
  /** One of them sent something false. */
  lied: { args: { peer: string; why: string }; value: null }
}
