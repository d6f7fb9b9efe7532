/**
 * The names of the RDRR format's document, so that its example runs as written:
 *
 * ```js
 * await downloadModel('http://localhost:8765')
 * const manifest = await loadManifestFromOPFS()
 * const pipeline = await createPipeline(parseManifest(manifest))
 * for await (const token of pipeline.generate('Hello')) console.log(token)
 * ```
 *
 * That example imports all but `loadManifestFromOPFS`, so this module also makes it a global.
 */
import { connect } from './connect.js'
import { SternaError } from './error.js'
import type { Generation } from './generation.js'
import type { Model } from './model.js'
import { addressOf, wireSource } from './source.js'
import { Sterna, wireEngine } from './sterna.js'
import type { EngineOptions, GenerateOptions, LoadOptions, Message, SourceOptions, WorkerOptions } from './types.js'

export interface Shard { index: number; filename: string; size: number; offset: number; hash: string; blake3?: string; hashAlgorithm: string; [more: string]: unknown }
/** A manifest with its variants of spelling made one. */
export interface Manifest { modelId?: string; hashAlgorithm: string; totalSize: number; shards: Shard[]; [more: string]: unknown }

/** The address whose manifest has this text, or was parsed to this object. */
const addressByText = new Map<string, string>()
const addressOfManifest = new WeakMap<Manifest, string>()
let latest: string | undefined

/** Downloads a package into the browser's storage, continuing where an earlier call stopped. */
export async function downloadModel(url: string | URL, options: SourceOptions & EngineOptions = {}): Promise<void> {
  const address = addressOf(url)
  const { remote, end } = connect(options)
  try {
    await remote.call('engine', wireEngine(options))
    await remote.call('fetch', wireSource(address, options), {
      signal: options.signal, onItem: item => { if (!('notice' in item)) options.onProgress?.(item) },
    })
    latest = address
  } finally {
    end()
  }
}

/** The text of a stored manifest: of the model that was downloaded or used last, or of the one named. */
export async function loadManifestFromOPFS(model?: string | URL, options: WorkerOptions = {}): Promise<string> {
  const address = model === undefined ? latest ?? (await Sterna.models.list(options))[0]?.source : addressOf(model)
  if (!address) throw new SternaError('not_found', 'No model is stored; downloadModel first.')
  const { remote, end } = connect(options)
  const text = await remote.call('readText', { id: address, name: 'manifest.json' }).finally(end)
  if (text === null) throw new SternaError('not_found', `${address} isn't in the store; downloadModel first.`)
  addressByText.set(text, address)
  return text
}

/** Parses a manifest. Throws `invalid_file` if it has no shards or they aren't described. */
export function parseManifest(manifest: string | object): Manifest {
  let raw: Record<string, unknown>
  try {
    raw = typeof manifest === 'string' ? JSON.parse(manifest) as Record<string, unknown> : { ...manifest }
  } catch (error) {
    throw new SternaError('invalid_file', `The manifest is no JSON: ${(error as Error).message}`, { cause: error })
  }
  if (!Array.isArray(raw['shards'])) throw new SternaError('invalid_file', 'The manifest has no list of shards.')
  let offset = 0
  const shards = raw['shards'].map((entry: Record<string, unknown>, i): Shard => {
    const filename = entry['filename'] ?? entry['fileName']
    const hash = entry['hash'] ?? entry['blake3']
    const size = entry['size']
    if (typeof filename !== 'string' || typeof hash !== 'string' || typeof size !== 'number') {
      throw new SternaError('invalid_file', `Shard ${i} of the manifest lacks its filename, hash or size.`)
    }
    const algorithm = entry['hashAlgorithm'] ?? raw['hashAlgorithm'] ?? (entry['blake3'] ? 'blake3' : 'sha256')
    const shard = { ...entry, index: i, filename, size, hash, hashAlgorithm: String(algorithm), offset: typeof entry['offset'] === 'number' ? entry['offset'] : offset }
    offset = shard.offset + size
    return algorithm === 'blake3' ? { ...shard, blake3: hash } : shard
  })
  const parsed: Manifest = {
    ...raw, shards, hashAlgorithm: String(raw['hashAlgorithm'] ?? shards[0]?.hashAlgorithm ?? 'sha256'),
    totalSize: typeof raw['totalSize'] === 'number' ? raw['totalSize'] : shards.reduce((sum, { size }) => sum + size, 0),
  }
  const address = typeof manifest === 'string' ? addressByText.get(manifest) : undefined
  if (address) addressOfManifest.set(parsed, address)
  return parsed
}

/** A model that is ready. */
export interface Pipeline {
  generate(prompt: string | Message[], options?: GenerateOptions): Generation
  readonly manifest: Manifest
  readonly model: Model
  dispose(): Promise<void>
}

/** Loads the stored model of a manifest: of its own, else the one downloaded last. */
export async function createPipeline(manifest: Manifest, options: LoadOptions = {}): Promise<Pipeline> {
  const address = addressOfManifest.get(manifest) ?? latest
  if (!address) throw new SternaError('not_found', 'This manifest is of no stored model; downloadModel first.')
  const model = await Sterna.load(address, options)
  return { manifest, model, generate: (prompt, options) => model.generate(prompt, options), dispose: () => model.dispose() }
}

/** Deletes all stored models but those in use; how many. */
export const purgeOPFS = Sterna.models.purge

Object.assign(globalThis, { loadManifestFromOPFS })
