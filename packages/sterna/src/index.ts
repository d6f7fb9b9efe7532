/**
 * Sterna runs low-bit language models in a browser tab.
 *
 * ```js
 * import { Sterna } from 'sterna'
 *
 * const model = await Sterna.load('https://example.com/model/')
 * for await (const piece of model.generate('Once upon a time')) document.body.append(piece)
 * ```
 */
export { Sterna } from './sterna.js'
export { Model, type ChatFactory } from './model.js'
export { Chat, type ChatOptions } from './chat.js'
export { Generation } from './generation.js'
export { broadcastSignalling, webSocketSignalling, type Signalling, type SignallingRoom } from './signalling.js'
export type { Sharing } from './share.js'
export { SternaError, type ErrorCode } from './error.js'
export { openai, type OpenAi, type OpenAiOptions, type ChatCompletion, type ChatCompletionChunk, type ChatCompletionRequest } from './openai.js'
export type {
  AdapterUse, ConvertOptions, ConvertSource, Doctor, EngineOptions, FinishReason, GenerateOptions, JsonSchema, LoadOptions, Message, ModelInfo, Notice, PeerOptions, Plan, Progress,
  Schema, ShareOptions, Source, SourceOptions, StorageUsage, StoredModel, StoreKind, SwapResult, ReceiptCheck, TokenLogprob, TrustedKey, Usage, WasmUrls, WorkerOptions,
} from './types.js'
