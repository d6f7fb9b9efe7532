import { connect, fullAddress } from './connect.js'
import { SternaError } from './error.js'
import { Model } from './model.js'
import { openai, type OpenAi, type OpenAiOptions } from './openai.js'
import type { Sharing } from './share.js'
import { addressOf, wireSource } from './source.js'
import type { ConvertOptions, ConvertSource, Doctor, EngineOptions, LoadOptions, Notice, Plan, Progress, ShareOptions, Source, SourceOptions, StorageUsage, StoredModel, WireEngine, WorkerOptions } from './types.js'

/** What the Worker is told of the engine. */
export function wireEngine({ wasmUrl, threads, relaxedSimd }: EngineOptions): WireEngine {
  const urls = typeof wasmUrl === 'string' || wasmUrl instanceof URL ? { plain: wasmUrl } : wasmUrl ?? {}
  const given = Object.entries<string | URL | undefined>(urls)
  return {
    wasmUrl: Object.fromEntries(given.flatMap(([name, url]) => url ? [[name, fullAddress(url).href]] : [])),
    ...(threads === undefined ? {} : { threads }),
    ...(relaxedSimd === undefined ? {} : { relaxedSimd }),
  }
}

function onItem({ onProgress, onNotice }: { onProgress?: ((progress: Progress) => void) | undefined; onNotice?: ((notice: Notice) => void) | undefined }) {
  return (item: Progress | { notice: Notice }) => 'notice' in item ? onNotice?.(item.notice) : onProgress?.(item)
}

/** Asks the browser not to evict what is stored. Not waited for: a browser may ask the user. */
function persist(): void {
  void globalThis.navigator?.storage?.persist?.().catch(() => {})
}

/** Uses a Worker of its own for a call that needs no model. */
async function briefly<T>(options: WorkerOptions, use: (remote: ReturnType<typeof connect>['remote']) => Promise<T>): Promise<T> {
  const { remote, end } = connect(options)
  try {
    return await use(remote)
  } finally {
    end()
  }
}

/** Gives the Worker a moment to note how far a download came, or to delete what it began to write. */
async function settle(remote: ReturnType<typeof connect>['remote']): Promise<void> {
  await Promise.race([remote.call('dispose', null).catch(() => {}), new Promise(resolve => setTimeout(resolve, 500))])
}

/** An id of `models.list`, or the full address of a source. */
const idOf = (idOrSource: string | URL) => typeof idOrSource === 'string' && !idOrSource.includes('/') ? idOrSource : addressOf(idOrSource)

export const Sterna = {
  /**
   * Loads a model into a Worker of its own, downloading what isn't stored yet.
   *
   * Rejects with a `SternaError`: `quota` and `too_large` before anything is fetched, `cancelled` by the signal
   * (call it again to continue), `not_found`, `io`, `hash_mismatch`, `invalid_file`, `unsupported` as they say.
   */
  async load(source: Source, options: LoadOptions = {}): Promise<Model> {
    const { backend = 'auto', device, gpuTimeout, contextLength, prefill, signal, peers, onNotice = () => {} } = options
    const from = wireSource(source, options)
    const name = options.name ?? defaultName(from.source)
    if (from.source.kind === 'address') persist()
    const { remote, end } = connect(options)
    try {
      await remote.call('engine', wireEngine(options), { signal })
      const port = peers && (await import('./take.js')).takeFrom(peers)
      const info = await remote.call('load', {
        ...from, backend, name, ...(device ? { device } : {}),
        ...(gpuTimeout === undefined ? {} : { gpuTimeout }), ...(contextLength === undefined ? {} : { contextLength }),
        ...(prefill === undefined ? {} : { prefill }), ...(port ? { peers: port } : {}),
      }, { signal, onItem: onItem(options), transfer: port ? [port] : [] })
      return new Model(remote, info, onNotice, end)
    } catch (error) {
      await settle(remote)
      end()
      throw SternaError.from(error)
    }
  },

  /**
   * Converts a GGUF file or a checkpoint of the user's to a package in the store, as `sterna convert` does: the same
   * bytes. It is then a stored model like one that was downloaded, and loaded by its `id`.
   *
   * Rejects with a `SternaError`: `quota` before anything is written, `cancelled` by the signal, `invalid_file` and
   * `unsupported` as they say. Nothing is kept of a conversion that doesn't end.
   */
  async convert(source: ConvertSource, options: ConvertOptions = {}): Promise<StoredModel> {
    const { store = 'auto', name, signal } = options
    const from = wireSource(source).source
    persist()
    const { remote, end } = connect(options)
    try {
      await remote.call('engine', wireEngine(options), { signal })
      return await remote.call('convert', { source: from, store, ...(name === undefined ? {} : { name }) }, { signal, onItem: onItem(options) })
    } catch (error) {
      await settle(remote)
      throw SternaError.from(error)
    } finally {
      end()
    }
  },

  /**
   * Gives a stored package to other tabs, until it is stopped: the files that its manifest names, and nothing else. All of
   * it is checked first. A model is named by its `id` or by the source it came from.
   *
   * Rejects with a `SternaError`: `not_found` if it isn't stored or not whole, `unsupported` if it is no package or the
   * browser has no WebRTC, `hash_mismatch` if it was damaged, `io` where the others can't be met.
   */
  async share(model: string | URL, options: ShareOptions): Promise<Sharing> {
    return (await import('./share.js')).share(idOf(model), wireEngine(options), options)
  },

  /** What loading would take, without doing it. */
  plan(source: Source, options: SourceOptions & EngineOptions = {}): Promise<Plan> {
    return briefly(options, async remote => {
      await remote.call('engine', wireEngine(options))
      return remote.call('plan', wireSource(source, options), { signal: options.signal })
    })
  },

  /** The models that this origin stores. A model is named by its `id` or by the source it came from. */
  models: {
    list: (options: WorkerOptions = {}): Promise<StoredModel[]> => briefly(options, remote => remote.call('list', null)),
    /** Deletes a model; `false` if there is none, `busy` while a tab uses it. */
    remove: (model: string | URL, options: WorkerOptions = {}): Promise<boolean> => briefly(options, remote => remote.call('remove', idOf(model))),
    /**
     * Hashes every file of a stored model. Gives the names of those that were damaged; they are removed, and
     * fetched again with `mend`.
     */
    verify: (model: string | URL, options: { mend?: boolean; signal?: AbortSignal; onProgress?: (progress: Progress) => void } & EngineOptions = {}): Promise<string[]> => briefly(options, async remote => {
      await remote.call('engine', wireEngine(options))
      return remote.call('verify', { id: idOf(model), mend: options.mend ?? false }, { signal: options.signal, onItem: onItem({ onProgress: options.onProgress }) })
    }),
    usage: (options: WorkerOptions = {}): Promise<StorageUsage> => briefly(options, remote => remote.call('usage', null)),
    /** Deletes all models but those in use; how many. */
    purge: (options: WorkerOptions = {}): Promise<number> => briefly(options, remote => remote.call('purge', null)),
  },

  /** What this browser offers, and what would be used. Never rejects for what is missing. */
  doctor(options: EngineOptions = {}): Promise<Doctor> {
    return briefly(options, async remote => {
      await remote.call('engine', wireEngine(options))
      return remote.call('doctor', null)
    })
  },

  /** `chat.completions.create` as OpenAI shapes it: in this tab by a loaded model, or by a server's address. */
  openai(target: Model | string | URL, options: OpenAiOptions = {}): OpenAi {
    return openai(target, options)
  },
}

function defaultName(source: ReturnType<typeof wireSource>['source']): string {
  const name = source.kind === 'address' ? new URL(source.addresses[0]!).pathname.split('/').filter(Boolean).at(-1) : source.kind === 'files' ? source.files[0]?.name
    : source.kind === 'folder' ? source.handle.name : source.id.replace(/-[0-9a-f]{16}$/, '')
  return name?.replace(/\.gguf$/i, '') || 'model'
}
