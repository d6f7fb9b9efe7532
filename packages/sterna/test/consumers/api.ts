// Compiled, not run: every export and every member of the API, as a strict consumer sees them.
import {
  Chat, Generation, Model, Sterna, SternaError, broadcastSignalling, openai, webSocketSignalling,
  type AdapterUse, type ChatCompletion, type ChatCompletionChunk, type ChatCompletionRequest, type ChatFactory, type ChatOptions,
  type Doctor, type EngineOptions, type ErrorCode, type FinishReason, type GenerateOptions, type LoadOptions, type Message,
  type ModelInfo, type Notice, type OpenAi, type OpenAiOptions, type PeerOptions, type Plan, type Progress,
  type ShareOptions, type Sharing, type Signalling, type SignallingRoom, type Source, type SourceOptions,
  type StorageUsage, type StoredModel, type StoreKind, type SwapResult, type TokenLogprob, type TrustedKey, type Usage, type WorkerOptions,
} from 'sterna'
import { sterna, type CallOptions, type SternaLanguageModel } from 'sterna/ai-sdk'
import {
  BitNet, GPUDeviceError, SternaError as SameError, deleteCachedModel, initGPU, listCachedModels,
  type BitNetGenerateOptions, type ChatMessage, type LoadOptions as BitNetLoadOptions, type LoadProgress,
} from 'sterna/bitnet'
import {
  createPipeline, downloadModel, loadManifestFromOPFS, parseManifest, purgeOPFS, type Manifest, type Pipeline, type Shard,
} from 'sterna/doppler'

const { signal } = new AbortController()
const signalling: Signalling = { join: async (room, heard) => (heard({ room }, 'm'), { say() {}, leave() {} } satisfies SignallingRoom) }
const peers: PeerOptions = { signalling: webSocketSignalling('https://host/', { key: 'k' }), iceServers: [{ urls: 'stun:host' }], maxPeers: 4 }
const giving: ShareOptions = {
  signalling: broadcastSignalling(), iceServers: [], bytesPerSecond: 1e6, bytesPerPeer: 1e9, totalBytes: 1e10, maxRequests: 8, maxConnections: 4, signal,
}
const worker: WorkerOptions = { workerUrl: '/sterna/worker/main.js' }
const engine: EngineOptions = { ...worker, threads: 2, wasmUrl: { plain: new URL('https://host/x.wasm'), threads: '/y.wasm' } }
const trust: TrustedKey[] = [{ name: 'someone', key: 'RWQ' }]
const onProgress = ({ phase, doneBytes, totalBytes, bytesPerSecond = 0 }: Progress): [Progress['phase'], number] => [phase, doneBytes / totalBytes + bytesPerSecond]
const reading: SourceOptions = { signal, store: 'auto', mirrors: ['https://other/'], file: 'x.gguf', verify: 'full', bytesPerSecond: 1e6, trust, onProgress }
const loading: LoadOptions = {
  ...reading, ...engine, backend: 'auto', device: 'low-power', contextLength: 4096, name: 'm', peers, onNotice: ({ code, message }: Notice) => void [code, message],
}
const sources: Source[] = ['owner/repo', new URL('https://host/m.gguf'), new File([], 'x.gguf'), [new File([], 'x.gguf')], null! as FileSystemDirectoryHandle]
const messages: Message[] = [{ role: 'system', content: 's' }, { role: 'user', content: 'u', name: 'n' }]
const adapters: AdapterUse[] = [{ name: 'a' }, { name: 'b', scale: 0.5 }]
const generating: GenerateOptions = {
  maxTokens: 1, temperature: 0, topK: 1, topP: 1, minP: 0, repeatPenalty: 1, presencePenalty: 0, frequencyPenalty: 0, seed: 1,
  stop: ['x'], logprobs: 1, logitBias: { 1: 2 }, tools: [{}], adapters, signal,
}

export async function all(): Promise<unknown[]> {
  const model: Model = await Sterna.load(sources[0]!, loading)
  const info: ModelInfo = model.info
  const { architecture, parameters, maxContext, vocabulary, hasTemplate, backend, weightBytes, cacheBytesPerToken, warnings, name, threads, contextLength }: Required<Omit<ModelInfo, 'backendReason' | 'adapter'>> = info
  const why: string | undefined = info.backendReason?.code ?? info.adapter

  const generation: Generation = model.generate(messages, generating)
  for await (const piece of generation) piece.toUpperCase()
  const usage: Usage | undefined = generation.usage
  const reason: FinishReason | undefined = generation.reason
  const logprobs: TokenLogprob[] = generation.logprobs
  const answer: string = await model.generate('text', { stop: 'x' }).text()
  generation.stop()
  const ids: number[] = await model.tokenize(messages)
  const row: Float32Array = await model.logits(ids, { all: true, signal })

  const options: ChatOptions = { system: 's', messages, contextLength: 512, adapters, forget: false, options: { temperature: 0 } }
  const chats: ChatFactory = model.chat
  const chat: Chat = chats(options)
  await chat.send('x', generating).text()
  await chat.regenerate().text()
  await chat.edit(1, 'y').text()
  const said: Message[] = chat.messages
  chat.reset()
  await chat.close()

  await model.adapters.add('a', 'owner/adapter', reading)
  await model.adapters.use('a', ...adapters)
  await model.adapters.remove('a')
  const swapped: SwapResult[] = await model.swap(sources[1]!, { ...reading, groups: ['layer.0'] })
  const { wasmBytes, gpuBytes } = await model.memory()

  const sharing: Sharing = await Sterna.share('id', { ...giving, signalling })
  const { manifest: room, key, sentBytes, connections } = sharing
  await sharing.stop()

  const plan: Plan = await Sterna.plan(sources[2]!, { ...reading, ...engine })
  const stored: StoredModel[] = await Sterna.models.list(worker)
  const { id, source, file, bytes, totalBytes, complete, usedAt, store } = stored[0]!
  const kind: StoreKind = store
  const damaged: string[] = await Sterna.models.verify(id, { mend: true, signal, onProgress, ...engine })
  const storage: StorageUsage = await Sterna.models.usage(worker)
  const removed: [boolean, number] = [await Sterna.models.remove(id, worker), await Sterna.models.purge(worker)]
  void [room, key, sentBytes, connections]
  const doctor: Doctor = await Sterna.doctor(engine)

  const request: ChatCompletionRequest = { messages, max_tokens: 1, temperature: null }
  const whole: ChatCompletion = await model.chat.completions.create(request as ChatCompletionRequest & { stream: false })
  const keyed: OpenAiOptions = { apiKey: 'k', headers: { a: 'b' } }
  const clients: OpenAi[] = [Sterna.openai(model), openai('http://localhost:8765', keyed)]
  const chunks: AsyncIterable<ChatCompletionChunk> = await clients[1]!.chat.completions.create({ ...request, stream: true }, { signal })
  for await (const { choices } of chunks) choices[0]?.delta.content?.length

  const v3: SternaLanguageModel<'v3'> = sterna(model)
  const v2: SternaLanguageModel<'v2'> = sterna(model, { version: 'v2' })
  const call: CallOptions = { prompt: [{ role: 'user', content: [{ type: 'text', text: 'x' }] }] }
  const unified: 'stop' | 'length' | 'other' = (await v3.doGenerate(call)).finishReason.unified

  await downloadModel('https://host/', { ...reading, ...engine })
  const manifest: Manifest = parseManifest(await loadManifestFromOPFS(undefined, worker))
  const shard: Shard | undefined = manifest.shards[0]
  const pipeline: Pipeline = await createPipeline(manifest, loading)
  await pipeline.generate('x').text()
  await pipeline.dispose()

  const onLoad: BitNetLoadOptions = { onProgress: ({ phase, fraction }: LoadProgress) => void [phase, fraction], backend: 'cpu' }
  const bitnet = await BitNet.load('./x.gguf', onLoad)
  const asked: BitNetGenerateOptions = { onToken: token => void token, maxTokens: 5 }
  const history: ChatMessage[] = messages
  for await (const token of bitnet.generate(history, asked)) token.length
  bitnet.dispose()
  await deleteCachedModel((await listCachedModels())[0]!)
  const { device, adapter, limits } = await initGPU()

  await model.dispose()
  return [
    architecture, parameters, maxContext, vocabulary, hasTemplate, backend, weightBytes, cacheBytesPerToken, warnings, name, threads, contextLength, why,
    usage, reason, logprobs, answer, generation.partial, generation.forgotten, await model.detokenize(Uint32Array.from(ids)), row, said, swapped,
    wasmBytes, gpuBytes, plan, source, file, bytes, totalBytes, complete, usedAt, kind, damaged, storage, removed, doctor, whole, v2, unified,
    shard, await purgeOPFS(), device, adapter, limits,
  ]
}

export function handle(error: unknown): ErrorCode | undefined {
  if (error instanceof GPUDeviceError) return undefined
  return error instanceof SternaError || error instanceof SameError ? error.status === 404 ? 'not_found' : error.code : undefined
}

// @ts-expect-error: no such backend
void Sterna.load('x', { backend: 'tpu' })
// @ts-expect-error: no such key
void ({ trust: [{ name: 'x' }] } satisfies SourceOptions)
