// What `crates/web` exports through wasm-bindgen, as the Worker sees it. The page never does.
// Bytes, offsets and lengths are numbers below 2^53. Every method may throw an `EngineFailure`.

/** Thrown by every export: `code` is one of the library's stable codes (snake_case), such as `invalid_request`. */
export interface EngineFailure extends Error { code: string }

/** A model's files as the engine asks for them. Implemented in TypeScript; each may return a promise. */
export interface Files {
  /** Length of the file, `undefined` if there is none. Waits until that is known. */
  len(name: string): number | undefined | Promise<number | undefined>
  /** Bytes `start..end`; fewer are allowed, at least one. Waits until the file is verified. */
  read(name: string, start: number, end: number): Uint8Array | Promise<Uint8Array>
}

/** The folder of one model, complete files and arriving ones. Implemented in TypeScript over OPFS, IndexedDB or memory. */
export interface Disk {
  /** Length of a complete file. */
  len(name: string): number | undefined | Promise<number | undefined>
  read(name: string, start: number, end: number): Uint8Array | Promise<Uint8Array>
  /** The journal that an earlier download left for the arriving file. */
  journal(name: string): string | undefined | Promise<string | undefined>
  /** Stores bytes of the arriving file. `bytes` is JavaScript's own copy, never a view of the module's memory. */
  writeAt(name: string, offset: number, bytes: Uint8Array): void | Promise<void>
  /** Reads bytes of the arriving file. */
  readBack(name: string, start: number, end: number): Uint8Array | Promise<Uint8Array>
  /** Flushes the arriving file, then replaces its journal. */
  note(name: string, journal: string): void | Promise<void>
  /** The arriving file is complete and verified: flushes it, gives it its name, drops its journal. */
  commit(name: string): void | Promise<void>
  /** Deletes the complete and the arriving file. */
  remove(name: string): void | Promise<void>
}

/** `fetch`, as the downloader asks for it. Implemented in TypeScript. */
export interface Http {
  /** Rejects with an Error if nothing answers. `start..end` becomes a Range header. */
  open(url: string, start?: number, end?: number): Promise<HttpAnswer>
}
export interface HttpAnswer {
  readonly status: number
  header(name: string): string | undefined
  /** The next piece of the body; `undefined` at its end. Rejects if the connection breaks. */
  read(): Promise<Uint8Array | undefined>
  cancel(): void
}

/** Another tab that has the package. Implemented in TypeScript. */
export interface Peer {
  /** Sends a request of the peers' protocol. Rejects if there is no answer, with an Error called `NotFoundError` if there will be none. */
  ask(request: string): Promise<PeerAnswer>
}
export interface PeerAnswer {
  /** The head. */
  readonly reply: string
  /** The next piece; `undefined` at the end. Rejects if the connection breaks. */
  read(): Promise<Uint8Array | undefined>
  cancel(): void
}

export interface ListedFile { name: string; size: number; /** complete and verified */ here: boolean }
export interface DownloadProgress {
  doneBytes: number; totalBytes: number; receivedBytes: number
  /** The bytes that each source sent in requests that have ended. */
  sources: { name: string; bytes: number }[]
}

export interface DownloadOptions {
  parallel?: number
  bytesPerSecond?: number
  /** Which file of a repository. */
  file?: string
  seed?: number
  /** Keys that packages may be signed with; a signature by another is refused. */
  trust?: { name: string; key: string }[]
}

/** Fetches a package or a GGUF file into a `Disk`; nothing becomes a complete file before it is verified. */
export class Download {
  /**
   * Reads what there is to fetch: the manifest of a package (`…/` or `…/manifest.json`), a `.gguf` address and
   * its set, or a Hugging Face repository (`https://huggingface.co/OWNER/REPO[/resolve/REV/FILE]`).
   * `addresses` after the first are mirrors. If nobody answers and the disk has all files, that is no error.
   */
  static open(addresses: string[], disk: Disk, http: Http, options: DownloadOptions): Promise<Download>
  /** All files in the order in which they will be fetched, known after `open`. */
  files(): ListedFile[]
  /** The manifest's text, if it is a package. */
  manifest(): string | undefined
  /** The SHA-256 of the manifest, if it is a package. */
  digest(): string | undefined
  /** One more source of a package, also while `run` runs. */
  addPeer(name: string, peer: Peer): void
  /**
   * Stores the small files that came with the description, and fetches what isn't here; needed even if all is here.
   * `committed(name)` for each file of `files()`, once it may be read; `progress` about ten times a second;
   * `lied(name, why)` for a source that sent something false, which isn't asked any more. Call once.
   */
  run(committed: (name: string) => void, progress: (p: DownloadProgress) => void, lied: (name: string, why: string) => void): Promise<void>
  /** Ends `run` with code `cancelled`; what has arrived stays for the next. */
  cancel(): void
  /** Hashes every complete file again; returns names of those that are wrong, which are removed. */
  verify(): Promise<string[]>
  free(): void
}

/** The head of an answer to another tab, and the bytes behind it. */
export interface OfferAnswer { reply: string; part?: { file: string; start: number; end: number } }

/** A package that is given to other tabs: the files that its manifest names. */
export class Offer {
  /** Reads the manifest; `not_found` if a file isn't there, `unsupported` if it is no package. */
  static open(files: Files): Promise<Offer>
  /** The SHA-256 of the manifest. */
  manifest(): string
  answer(request: string): OfferAnswer
  free(): void
}

export interface ConversionOptions {
  /** What messages call the model, and the package is called after: the name of its file without the extension. */
  name: string
  /** See `ModelOptions`. */
  entry?: string
  /** Name of the package instead of one that is made of `name` and the types of its tensors. */
  id?: string
}

/** Converts a model to a package, as `sterna convert` does. */
export class Conversion {
  /** Reads what the files are. */
  static open(files: Files, options: ConversionOptions): Promise<Conversion>
  /** About how many bytes the package will have, rather too many. */
  bytes(): number
  /** Writes the files of the package, the manifest last. Call once. */
  run(disk: Disk, progress: (doneBytes: number, totalBytes: number) => void): Promise<{ id: string; files: { name: string; size: number }[]; warnings: string[] }>
  /** Ends `run` with code `cancelled`. */
  cancel(): void
  free(): void
}

export interface ModelOptions {
  /** What messages call it. */
  name: string
  /** `manifest.json`, `x.gguf`, or nothing for a checkpoint's folder. */
  entry?: string
  backend: 'auto' | 'cpu' | 'gpu'
  threads: number
  /** Which GPU, where there are two. */
  device?: 'high-performance' | 'low-power'
  /** Milliseconds after which a GPU that doesn't answer is given up; 60,000 as default. */
  gpuTimeout?: number
  /** What the first session begins with: computed while weights arrive. */
  prefill?: string | Message[]
  /** Tokens of context of that session. */
  contextLength?: number
}
export interface ModelInfo {
  architecture: string
  parameters: number
  maxContext: number
  vocabulary: number
  hasTemplate: boolean
  backend: 'cpu' | 'gpu'
  /**
   * Why not the GPU: `asked`, `too_small` (the model), `software_adapter`,
   * `no_adapter`, `wrong_results`, `device_lost`, or the code of the error
   * with which it failed.
   */
  backendReason?: { code: string; message: string }
  adapter?: string
  /** Bytes of weights in memory. */
  weightBytes: number
  /** Bytes of cache for one token of context. */
  cacheBytesPerToken: number
  warnings: string[]
}
export interface GenerateOptions {
  maxTokens?: number; temperature?: number; topK?: number; topP?: number; minP?: number
  repeatPenalty?: number; presencePenalty?: number; frequencyPenalty?: number
  seed?: number; stop?: string[]; logprobs?: number; logitBias?: Record<string, number>
}
/** `end.text` is what had been held back. After `device_lost`, call `recover` before the next step. */
export type EngineEvent =
  | { session: number; type: 'token'; id: number; text: string; logprob?: number; top?: { id: number; text: string; logprob: number }[] }
  | { session: number; type: 'end'; text: string; reason: 'stop' | 'length' | 'context'; promptTokens: number; cachedTokens: number; completionTokens: number }
  | { session: number; type: 'failed'; code: string; message: string }
  | { session: number; type: 'device_lost'; message: string }
export interface Message {
  role: 'system' | 'user' | 'assistant' | 'tool'
  content: string
  [more: string]: unknown
}

/** What one answer has to match. Exported by the module of `constraint.d.ts`. */
export interface Constraint {
  /** A bit for each token, the lowest first: whether it may come next. One more word is 1 if the answer may end. */
  allowed(): Uint32Array
  accept(id: number): void
}

/** A loaded model. */
export class Model {
  static load(files: Files, options: ModelOptions, progress: (doneBytes: number, totalBytes: number) => void): Promise<Model>
  info(): ModelInfo
  encode(text: string): Uint32Array
  decode(ids: Uint32Array): string
  /** Renders messages with the model's chat template. */
  prompt(messages: Message[], options: { tools?: unknown[]; addGenerationPrompt?: boolean }): Uint32Array
  /** A new session; its number. */
  session(contextLength?: number): number
  close(session: number): void
  /** What the tokens spell: their bytes, one after the other, and where each ends. */
  vocabulary(): [bytes: Uint8Array, ends: Uint32Array]
  /** Begins an answer, which matches `constraint`; a common prefix with what the session holds isn't computed again. */
  start(session: number, prompt: Uint32Array, options: GenerateOptions, constraint?: Constraint): void
  /** Ends the answer of a session without another event; what it holds stays. */
  cancel(session: number): void
  /** One shared step of all running answers; no events if nothing runs. Never two at a time. */
  step(): Promise<EngineEvent[]>
  isIdle(): boolean
  /** After `device_lost`: loads the model again on the CPU, from the files it was loaded from; the answers go on with the next step. */
  recover(files: Files, progress: (doneBytes: number, totalBytes: number) => void): Promise<void>
  /** Logits after each of `ids`, or the last only; rows of `vocabulary`. */
  logits(ids: Uint32Array, all: boolean): Promise<Float32Array>
  /** Computes the answer of a receipt, JSON, again; on the CPU only. `files` are those that the model was loaded from. */
  check(receipt: string, files: Files, adapters: { name: string; scale?: number }[]): Promise<{ ok: boolean; withinMargin?: number; difference?: string; index?: number }>
  addAdapter(name: string, files: Files): Promise<void>
  removeAdapter(name: string): void
  /** The adapters of a session with their strengths; drops its cache where they change. */
  useAdapters(session: number, adapters: { name: string; scale?: number }[]): void
  /** Replaces groups (those that differ if empty) by those of another package; versions and hashes before and after. */
  swap(files: Files, groups: string[]): Promise<{ group: string; from: { version?: string; hash?: string }; to: { version?: string; hash?: string } }[]>
  memory(): { wasmBytes: number; gpuBytes: number }
  free(): void
}

/** Hash of bytes, hexadecimal. */
export function sha256(bytes: Uint8Array): string
export function version(): string
/** wasm-bindgen's initialiser; as default it takes the `.wasm` file beside its script. */
export default function init(options?: { module_or_path: string | URL | WebAssembly.Module }): Promise<{ memory: WebAssembly.Memory }>
/** The same at once, sharing the memory of another Worker. */
export function initSync(options: { module: WebAssembly.Module; memory: WebAssembly.Memory }): unknown
/** Makes this Worker a thread of the engine; doesn't return. Only in the build with threads. */
export function lendThread(): never
/** How many such threads wait for something to do. Only in the build with threads. */
export function idleThreads(): number
