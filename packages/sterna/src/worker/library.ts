/**
 * From a source to files that the engine can read: found, downloaded, kept, checked, listed and removed.
 *
 * Between tabs two locks guard a model's folder: `sterna:get:KEY`, exclusive, is held by the one that fetches,
 * checks or removes; `sterna:use:KEY`, shared, by those that have the files open.
 */
import type { Download, DownloadProgress, Files, ListedFile, Offer } from '../engine.js'
import { SternaError, cancelled } from '../error.js'
import type { Notice, Plan, Progress, StorageUsage, StoredModel, StoreKind, TrustedKey, WireConvert, WireSource, WireSourceOptions } from '../types.js'
import type { Engine } from './engine.js'
import { http } from './http.js'
import { channel, lock, tryLock, type Release } from './locks.js'
import { joinPeers } from './peers.js'
import { SealedFolder } from './sealed.js'
import { fileReader, openStore, readFile, writeFile, type Folder, type Store } from './store.js'

/** A tab's WebAssembly has 4 GiB; some of it is for the cache and the program. */
const MAX_WASM_WEIGHTS = 3.5 * 2 ** 30
const RECORD = '.record'

/** What is known of a stored model besides its files. */
interface Record {
  /** The first address, or the model's id. */
  source: string
  /** None of a model that was converted here. */
  addresses: string[]
  file?: string
  trust?: TrustedKey[]
  name: string
  usedAt: number
  files?: { name: string; size: number }[]
}

/** A source whose files can be read, perhaps while they arrive. */
export interface Opened {
  files: Files
  /** See `ModelOptions.entry`. */
  entry: string | undefined
  totalBytes: number
  /** Resolves when everything is in the store; rejects with what stopped the download. */
  arrived: Promise<void>
  /** Lets go of the files. */
  close(): void
}

export interface OpenContext {
  signal: AbortSignal
  emit(item: Progress | { notice: Notice }): void
  /** Throws if a model of so many bytes isn't wanted; called before one of them is fetched. */
  accept?(totalBytes: number): void
  /** Where the page finds other tabs. */
  peers?: MessagePort
}

/** The name of a model's folder: readable, and different for each address. */
export function keyOf(address: string, file = ''): string {
  return keyFor(nameOf(address), `${address} ${file}`)
}

/** The name of a folder: readable by `name`, and different for each `text`. */
function keyFor(name: string, text: string): string {
  let [a, b] = [0xdeadbeef, 0x41c6ce57]
  for (const char of text) {
    const code = char.codePointAt(0)!
    a = Math.imul(a ^ code, 2654435761)
    b = Math.imul(b ^ code, 1597334677)
    ;[a, b] = [(a << 13) | (a >>> 19), (b << 17) | (b >>> 15)]
  }
  const hex = (n: number) => (n >>> 0).toString(16).padStart(8, '0')
  return `${name.replace(/[^\w.-]+/g, '-').slice(0, 60)}-${hex(a)}${hex(b)}`
}

/** What to call the model of an address. */
export function nameOf(address: string): string {
  const parts = new URL(address).pathname.replace(/\/(manifest\.json)?$/, '').split('/').filter(Boolean)
  return decodeURIComponent(parts.at(-1) ?? new URL(address).host)
}

/** Opens a source for reading; a download begins and goes on after the return. */
export async function openSource(engine: Engine, asked: WireSourceOptions, context: OpenContext): Promise<Opened> {
  const from = await resolve(asked)
  const { source } = from
  if (source.kind === 'stored') return openStored(engine, source.id, from, context)
  if (source.kind !== 'address') {
    const opened = await openLocal(source)
    context.accept?.(opened.totalBytes)
    return opened
  }
  const store = await openStore(from.store)
  const key = keyOf(source.addresses[0]!, from.file)
  const leave = await lock(`sterna:use:${key}`, { mode: 'shared' })
  let folder: SealedFolder | undefined
  try {
    folder = new SealedFolder(await store.folder(key), engine.sha256)
    const done = await takeTurn(key, context)
    return await fetchInto(engine, folder, from, key, context, { done, leave })
  } catch (error) {
    folder?.inner.close()
    leave()
    throw SternaError.from(error)
  }
}

/** The addresses that a stored model came from, instead of its id; one that was converted here has none. */
async function resolve(from: WireSourceOptions): Promise<WireSourceOptions> {
  if (from.source.kind !== 'stored') return from
  const { id } = from.source
  const found = await find(id)
  const folder = await found?.store.folder(found.key)
  const record = folder && await readRecord(folder)
  folder?.close()
  if (!found || !record) throw new SternaError('not_found', `${id} isn't in the store.`)
  if (record.addresses.length === 0) return { ...from, store: found.store.kind }
  const { addresses, file, trust } = record
  return {
    ...from, source: { kind: 'address', addresses }, store: found.store.kind,
    ...(file === undefined ? {} : { file }), ...(trust === undefined ? {} : { trust }),
  }
}

/** Opens a model that was converted here. */
async function openStored(engine: Engine, id: string, { store, verify }: WireSourceOptions, context: OpenContext): Promise<Opened> {
  const leave = await lock(`sterna:use:${id}`, { mode: 'shared' })
  let folder: SealedFolder | undefined
  try {
    const done = await takeTurn(id, context)
    try {
      folder = new SealedFolder(await (await openStore(store)).folder(id), engine.sha256)
      const damaged = verify === 'none' ? [] : await folder.sample(verify === 'full' ? 'all' : 'some')
      if (damaged.length) throw new SternaError('hash_mismatch', `${damaged.join(', ')} of ${id} was damaged in the store. Convert the model again.`)
      const listed = await stored(folder)
      if (!listed) throw new SternaError('not_found', `${id} isn't complete. Convert the model again.`)
      const totalBytes = sum(listed)
      context.accept?.(totalBytes)
      await writeRecord(folder.inner, { ...(await readRecord(folder.inner))!, usedAt: Date.now() })
      const { inner } = folder
      return { files: folder, entry: 'manifest.json', totalBytes, arrived: Promise.resolve(), close: () => (inner.close(), leave()) }
    } finally {
      done()
    }
  } catch (error) {
    folder?.inner.close()
    leave()
    throw SternaError.from(error)
  }
}

/** Converts the user's files to a package in the store. What stops it leaves nothing of it there. */
export async function convert(engine: Engine, { source, store: kind, name }: WireConvert, context: OpenContext): Promise<StoredModel> {
  if (source.kind !== 'files' && source.kind !== 'folder') throw new SternaError('invalid_request', 'Only files of the user\'s are converted: a File, an array of Files, or a directory handle.')
  if (name === '') throw new SternaError('invalid_request', 'A package needs a name; leave `name` out for the usual one.')
  const local = await openLocal(source)
  const store = await openStore(kind)
  if (store.kind === 'memory') throw new SternaError('unsupported', 'This browser, or this page (is it served by https?), has no storage that would keep a converted model.')
  const key = keyFor(local.stem, ['convert', name ?? '', ...local.stamps].join('\n'))
  const leave = await lock(`sterna:use:${key}`, { mode: 'shared' })
  const done = await takeTurn(key, context).catch(error => { throw leave(), error })
  try {
    await convertInto(engine, store, key, local, name, context)
    return await describe(store, key)
  } finally {
    leave()
    done()
  }
}

async function convertInto(engine: Engine, store: Store, key: string, local: Local, name: string | undefined, { signal, emit }: OpenContext): Promise<void> {
  const folder = new SealedFolder(await store.folder(key), engine.sha256)
  const others = channel<Progress>(`sterna:get:${key}`)
  try {
    // The same files were converted before.
    await folder.sample()
    if (await stored(folder)) return folder.inner.close()
    await empty(folder.inner)
    const options = { name: local.stem, ...(local.entry === undefined ? {} : { entry: local.entry }), ...(name === undefined ? {} : { id: name }) }
    const conversion = await engine.Conversion.open(local.files, options)
    const stop = () => conversion.cancel()
    try {
      await refuseIfTooLarge(folder, [{ name: local.stem, size: conversion.bytes(), here: false }])
      // Without a list of files, it isn't complete.
      const record = { source: key, addresses: [], name: name ?? local.stem, usedAt: Date.now() }
      await writeRecord(folder.inner, record)
      if (signal.aborted) throw cancelled(signal)
      signal.addEventListener('abort', stop)
      const made = await conversion.run(folder, (doneBytes, totalBytes) => {
        const progress: Progress = { phase: 'convert', doneBytes, totalBytes }
        emit(progress)
        others.say(progress)
      })
      if (signal.aborted) throw cancelled(signal)
      for (const message of made.warnings) emit({ notice: { code: 'conversion', message } })
      await writeRecord(folder.inner, { ...record, name: made.id, files: made.files })
    } finally {
      signal.removeEventListener('abort', stop)
      conversion.free()
    }
    folder.inner.close()
  } catch (error) {
    const failure = signal.aborted ? cancelled(signal) : folder.failure ?? SternaError.from(error)
    await empty(folder.inner).then(() => (folder.inner.close(), store.remove(key))).catch(() => {})
    throw failure
  } finally {
    others.close()
  }
}

/** Deletes all files of a folder, those of this package's own too. */
async function empty(folder: Folder): Promise<void> {
  for (const { name } of await folder.entries()) await folder.remove(name)
}

/** Waits until no other tab fetches this model, telling of its progress. */
async function takeTurn(key: string, { signal, emit }: OpenContext): Promise<Release> {
  const name = `sterna:get:${key}`
  const free = await tryLock(name)
  if (free) return free
  const others = channel<Progress>(name, progress => emit({ ...progress, phase: 'waiting' }))
  try {
    return await lock(name, { signal })
  } finally {
    others.close()
  }
}

/** Checks what the folder has and fetches the rest. `done` is called when the folder is whole, or on failure. */
async function fetchInto(
  engine: Engine, folder: SealedFolder, from: WireSourceOptions, key: string, context: OpenContext,
  locks: { done: Release; leave: Release },
): Promise<Opened> {
  const { signal, emit } = context
  const { addresses } = from.source as { addresses: string[] }
  const others = channel<Progress>(`sterna:get:${key}`)
  const done = () => (others.close(), locks.done())
  try {
    const damaged = from.verify === 'none' ? [] : await folder.sample()
    let download = await openDownload(engine, folder, addresses, from, emit)
    if (from.verify === 'full') {
      const wrong = await download.verify()
      if (wrong.length) {
        damaged.push(...wrong)
        download.free()
        download = await openDownload(engine, folder, addresses, from, emit)
      }
    }
    for (const name of damaged) emit({ notice: { code: 'damaged_file', message: `${name} was damaged in the store and is fetched again.` } })
    const listed = download.files()
    const entry = entryOf(listed.map(({ name }) => name), download.manifest() !== undefined)
    const totalBytes = sum(listed)
    const missing = listed.filter(file => !file.here)
    context.accept?.(totalBytes)
    await refuseIfTooLarge(folder, missing)
    await writeRecord(folder.inner, {
      source: addresses[0]!, addresses, name: nameOf(addresses[0]!), usedAt: Date.now(),
      files: listed.map(({ name, size }) => ({ name, size })), ...(from.file === undefined ? {} : { file: from.file }),
      ...(from.trust === undefined ? {} : { trust: from.trust }),
    })
    if (signal.aborted) throw cancelled(signal)
    const files = new ArrivingFiles(folder, listed)
    const stop = () => download.cancel()
    signal.addEventListener('abort', stop)
    const rate = new Rate()
    const tell = ({ doneBytes, totalBytes, receivedBytes, sources }: DownloadProgress) => {
      const progress: Progress = { phase: 'download', doneBytes, totalBytes, bytesPerSecond: rate.of(receivedBytes), sources }
      emit(progress)
      others.say(progress)
    }
    const peers = joinPeers(missing.length ? context.peers : undefined, download, download.digest(), notice => emit({ notice }))
    const arrived = download.run(name => files.commit(name), missing.length ? tell : () => {}, peers.lied)
      .then(() => files.commitAll(), error => {
        const failure = signal.aborted ? cancelled(signal) : folder.failure ?? SternaError.from(error)
        files.fail(failure)
        throw failure
      })
      .finally(() => {
        signal.removeEventListener('abort', stop)
        peers.leave()
        download.free()
        done()
      })
    arrived.catch(() => {})
    const close = () => (folder.inner.close(), locks.leave())
    return { files, entry, totalBytes, arrived, close }
  } catch (error) {
    done()
    throw folder.failure ?? error
  }
}

type Opening = Pick<WireSourceOptions, 'file' | 'bytesPerSecond' | 'trust'>

/** Asks what is at an address. Where nobody answers and the folder has a whole model, that is used, and told. */
async function openDownload(
  engine: Engine, folder: SealedFolder, addresses: string[], { file, bytesPerSecond, trust }: Opening, emit?: OpenContext['emit'],
): Promise<Pick<Download, 'files' | 'manifest' | 'digest' | 'addPeer' | 'run' | 'cancel' | 'verify' | 'free'>> {
  try {
    return await engine.Download.open(addresses, folder, http, {
      ...(file === undefined ? {} : { file }), ...(bytesPerSecond === undefined ? {} : { bytesPerSecond }),
      ...(trust === undefined ? {} : { trust }), seed: Math.floor(Math.random() * 2 ** 32),
    })
  } catch (error) {
    const { code, message } = SternaError.from(error)
    const listed = code === 'io' ? await stored(folder) : undefined
    if (!listed) throw error
    emit?.({ notice: { code: 'offline', message: `What is stored is used as it is, since nothing newer can be asked for: ${message}` } })
    return {
      files: () => listed, manifest: () => undefined, digest: () => undefined, addPeer() {}, run: async () => {}, cancel() {}, free() {},
      verify: () => folder.sample('all'),
    }
  }
}

/** The files of the folder's model; `undefined` if one is missing. */
async function stored(folder: SealedFolder): Promise<ListedFile[] | undefined> {
  const { files = [] } = await readRecord(folder.inner) ?? {}
  const sizes = new Map((await folder.entries()).filter(({ complete }) => complete).map(({ name, size }) => [name, size]))
  return files.length && files.every(({ name, size }) => sizes.get(name) === size) ? files.map(file => ({ ...file, here: true })) : undefined
}

const sum = (files: readonly { size: number }[]) => files.reduce((total, { size }) => total + size, 0)

/** Throws `quota` if the browser has no room for what is missing. */
async function refuseIfTooLarge(folder: SealedFolder, missing: ListedFile[]): Promise<void> {
  if (missing.length === 0 || folder.inner.kind === 'memory') return
  const { free, needed } = await room(folder, missing)
  if (free === undefined || needed <= free) return
  throw new SternaError('quota', `The model needs ${megabytes(needed)} more, and the browser stores at most ${megabytes(free)} more for this site. `
    + 'Delete models (models.remove), free space on the disk, or choose a smaller one. A private window stores less than a normal one.')
}

/** Bytes that the browser would still store, and those that `missing` needs, less what has arrived of them. */
async function room(folder: SealedFolder, missing: ListedFile[]): Promise<{ free?: number; needed: number }> {
  const names = new Set(missing.map(({ name }) => name))
  const parts = (await folder.entries()).filter(({ name, complete }) => !complete && names.has(name))
  const needed = Math.max(0, sum(missing) - sum(parts))
  const { usage, quota } = await estimate()
  return usage === undefined || quota === undefined ? { needed } : { needed, free: Math.max(0, quota - usage) }
}

async function estimate(): Promise<StorageEstimate> {
  return await globalThis.navigator?.storage?.estimate?.().catch(() => ({})) ?? {}
}

const megabytes = (bytes: number) => `${(bytes / 1e6).toLocaleString('en', { maximumFractionDigits: bytes < 1e7 ? 1 : 0 })} MB`

/** Which file the engine opens first. */
function entryOf(names: string[], isPackage: boolean): string | undefined {
  if (isPackage || names.includes('manifest.json')) return 'manifest.json'
  return names.filter(name => name.toLowerCase().endsWith('.gguf')).sort()[0]
}

/** The files of a download: a read waits until its file is committed. */
class ArrivingFiles implements Files {
  #sizes: Map<string, number>
  #waiting = new Map<string, { promise: Promise<void>; resolve: () => void; reject: (error: SternaError) => void }>()

  constructor(private readonly folder: SealedFolder, listed: ListedFile[]) {
    this.#sizes = new Map(listed.map(({ name, size }) => [name, size]))
    for (const { name } of listed) {
      let [resolve, reject]: [() => void, (error: SternaError) => void] = [() => {}, () => {}]
      const promise = new Promise<void>((...both) => { [resolve, reject] = both })
      promise.catch(() => {})
      this.#waiting.set(name, { promise, resolve, reject })
    }
  }

  len(name: string): number | undefined { return this.#sizes.get(name) }

  async read(name: string, start: number, end: number): Promise<Uint8Array> {
    await this.#waiting.get(name)?.promise
    return this.folder.read(name, start, end)
  }

  commit(name: string): void { this.#waiting.get(name)?.resolve() }
  commitAll(): void { for (const { resolve } of this.#waiting.values()) resolve() }
  fail(error: SternaError): void { for (const { reject } of this.#waiting.values()) reject(error) }
}

/** Bytes per second over the last five seconds. */
class Rate {
  #seen: { at: number; bytes: number }[] = []
  of(bytes: number): number {
    const at = performance.now()
    this.#seen.push({ at, bytes })
    while (this.#seen.length > 2 && at - this.#seen[0]!.at > 5000) this.#seen.shift()
    const first = this.#seen[0]!
    return at > first.at ? Math.round((bytes - first.bytes) / (at - first.at) * 1000) : 0
  }
}

// Files of the user's

/** Files where they are. */
interface Local extends Opened {
  /** What the model is called, as native programs call it. */
  stem: string
  /** What tells these files from others. */
  stamps: string[]
}

function openLocal(source: Exclude<WireSource, { kind: 'address' | 'stored' }>): Local | Promise<Local> {
  return source.kind === 'files' ? openFiles(source.files) : openHandle(source.handle)
}

const stemOf = (entry: string | undefined, folder: string) => entry?.toLowerCase().endsWith('.gguf') ? entry.split('/').at(-1)!.replace(/\.gguf$/i, '') : folder
const stampOf = (path: string, { size, lastModified }: File) => `${path} ${size} ${lastModified}`

function openFiles(files: File[]): Local {
  // A dropped folder's paths begin with its name.
  const paths = files.map(file => file.webkitRelativePath?.split('/').slice(1).join('/') || file.name)
  const entry = entryOf(paths, false)
  const readers = new Map(files.map((file, i) => [paths[i]!, fileReader(file)]))
  return {
    files: {
      len: name => readers.get(name)?.size,
      read: (name, start, end) => present(readers.get(name), name).read(start, end),
    },
    entry, totalBytes: sum(files), arrived: Promise.resolve(), close: () => {},
    stem: stemOf(entry, files[0]?.webkitRelativePath?.split('/')[0] || 'model'), stamps: files.map((file, i) => stampOf(paths[i]!, file)),
  }
}

async function openHandle(folder: FileSystemDirectoryHandle): Promise<Local> {
  const readers = new Map<string, Promise<ReturnType<typeof fileReader> | undefined>>()
  async function open(name: string) {
    const path = name.split('/')
    try {
      let at = folder
      for (const part of path.slice(0, -1)) at = await at.getDirectoryHandle(part)
      return fileReader(await (await at.getFileHandle(path.at(-1)!)).getFile())
    } catch (error) {
      if (['NotFoundError', 'TypeMismatchError', 'TypeError'].includes((error as Error).name)) return undefined
      throw error
    }
  }
  const reader = (name: string) => {
    if (!readers.has(name)) readers.set(name, open(name))
    return readers.get(name)!
  }
  const names: string[] = [], stamps: string[] = []
  let totalBytes = 0
  for await (const [name, handle] of folder.entries()) {
    if (handle.kind !== 'file') continue
    const file = await (handle as FileSystemFileHandle).getFile()
    names.push(name)
    stamps.push(stampOf(name, file))
    totalBytes += file.size
  }
  const entry = entryOf(names, false)
  return {
    files: {
      len: async name => (await reader(name))?.size,
      read: async (name, start, end) => present(await reader(name), name).read(start, end),
    },
    entry, totalBytes, arrived: Promise.resolve(), close: () => {}, stem: stemOf(entry, folder.name), stamps: stamps.sort(),
  }
}

function present<T>(value: T | undefined, name: string): T {
  if (value === undefined) throw new SternaError('not_found', `There is no file ${name}.`)
  return value
}

// The stored models

/** What loading would take. Fetches the description only, and keeps nothing of a model that isn't here. */
export async function plan(engine: Engine, asked: WireSourceOptions): Promise<Plan> {
  const from = await resolve(asked)
  if (from.source.kind === 'stored') {
    const { id } = from.source
    const folder = new SealedFolder(await (await openStore(from.store)).folder(id), engine.sha256)
    const files = await stored(folder)
    folder.inner.close()
    if (!files) throw new SternaError('not_found', `${id} isn't complete. Convert the model again.`)
    const totalBytes = sum(files)
    return { files, totalBytes, missingBytes: 0, memoryBytes: totalBytes, fits: fitsMemory(totalBytes) }
  }
  if (from.source.kind !== 'address') {
    const { totalBytes } = await openLocal(from.source)
    return { files: [], totalBytes, missingBytes: 0, memoryBytes: totalBytes, fits: fitsMemory(totalBytes) }
  }
  const { addresses } = from.source
  const store = await openStore(from.store)
  const key = keyOf(addresses[0]!, from.file)
  const known = (await store.keys()).includes(key)
  const folder = new SealedFolder(await (known ? store : await openStore('memory')).folder(known ? key : `plan-${key}`), engine.sha256)
  try {
    const download = await openDownload(engine, folder, addresses, from)
    const files = download.files()
    download.free()
    const missing = files.filter(file => !file.here)
    const { free, needed } = await room(folder, missing)
    const totalBytes = sum(files)
    return {
      files, totalBytes, missingBytes: sum(missing), memoryBytes: totalBytes,
      ...(free === undefined ? {} : { freeBytes: free }),
      fits: fitsMemory(totalBytes) && (free === undefined || store.kind === 'memory' || needed <= free),
    }
  } finally {
    folder.inner.close()
    if (!known) await (await openStore('memory')).remove(`plan-${key}`)
  }
}

/** Weights beyond a tab's memory need a GPU. */
function fitsMemory(bytes: number): boolean {
  return bytes <= MAX_WASM_WEIGHTS || globalThis.navigator?.gpu !== undefined
}

/** Throws `too_large` where the weights can't fit into the memory of WebAssembly. */
export function refuseMemory(bytes: number, backend: 'auto' | 'cpu' | 'gpu'): void {
  if (backend === 'cpu' ? bytes <= MAX_WASM_WEIGHTS : fitsMemory(bytes)) return
  throw new SternaError('too_large', `The model has ${megabytes(bytes)}, and without a GPU a tab holds at most ${megabytes(MAX_WASM_WEIGHTS)}.`)
}

async function writeRecord(folder: Folder, record: Record): Promise<void> {
  await writeFile(folder, RECORD, new TextEncoder().encode(JSON.stringify(record)))
}

async function readRecord(folder: Folder): Promise<Record | undefined> {
  const bytes = await readFile(folder, RECORD)
  try {
    return bytes && JSON.parse(new TextDecoder().decode(bytes)) as Record
  } catch {
    return undefined
  }
}

/** Every store that this browser has. Memory is this Worker's own, so nothing of it is listed. */
async function stores(): Promise<Store[]> {
  const opened = await Promise.all((['opfs', 'indexeddb'] as const).map(kind => openStore(kind).catch(() => undefined)))
  return opened.filter(store => store !== undefined)
}

export async function list(): Promise<StoredModel[]> {
  const models: StoredModel[] = []
  for (const store of await stores()) {
    for (const id of await store.keys()) models.push(await describe(store, id))
  }
  return models.sort((a, b) => b.usedAt - a.usedAt)
}

async function describe(store: Store, id: string): Promise<StoredModel> {
  const folder = await store.folder(id)
  const entries = await folder.entries()
  const record = await readRecord(folder)
  folder.close()
  const complete = new Set(entries.filter(entry => entry.complete).map(entry => entry.name))
  return {
    id, source: record?.source ?? '', name: record?.name ?? id, bytes: sum(entries), usedAt: record?.usedAt ?? 0, store: store.kind,
    ...(record?.file === undefined ? {} : { file: record.file }), ...(record?.files ? { totalBytes: sum(record.files) } : {}),
    complete: record?.files?.every(({ name }) => complete.has(name)) ?? false,
  }
}

/** The store and folder of an id or an address. */
async function find(idOrAddress: string): Promise<{ store: Store; key: string } | undefined> {
  for (const store of await stores()) {
    for (const key of await store.keys()) {
      if (key === idOrAddress) return { store, key }
      if (!idOrAddress.includes('/')) continue
      const folder = await store.folder(key)
      const source = (await readRecord(folder))?.source
      folder.close()
      if (source === idOrAddress) return { store, key }
    }
  }
  return undefined
}

/** Deletes a model; `false` if there is none. Throws `busy` while a tab uses it. */
export async function remove(idOrAddress: string): Promise<boolean> {
  const found = await find(idOrAddress)
  if (!found) return false
  await removeFolder(found.store, found.key)
  return true
}

async function removeFolder(store: Store, key: string): Promise<void> {
  const release = await tryLock(`sterna:use:${key}`)
  if (!release) throw new SternaError('busy', `${key} is in use. Dispose of it first, also in other tabs.`)
  try {
    await store.remove(key)
  } finally {
    release()
  }
}

/** Deletes all models that no tab uses; how many. */
export async function purge(): Promise<number> {
  let n = 0
  for (const store of await stores()) {
    for (const key of await store.keys()) {
      await removeFolder(store, key).then(() => n++, error => { if (SternaError.from(error).code !== 'busy') throw error })
    }
  }
  return n
}

/** Hashes all files of a stored model; the names of those that were wrong, which are removed, or fetched again. */
export async function verify(engine: Engine, idOrAddress: string, mend: boolean, context: OpenContext): Promise<string[]> {
  const found = await find(idOrAddress)
  if (!found) throw new SternaError('not_found', `${idOrAddress} isn't in the store.`)
  const { store, key } = found
  const leave = await lock(`sterna:use:${key}`, { mode: 'shared' })
  const done = await takeTurn(key, context).catch(error => { throw leave(), error })
  const folder = new SealedFolder(await store.folder(key), engine.sha256)
  const record = await readRecord(folder.inner)
  let damaged: string[]
  try {
    if (!record) throw new SternaError('invalid_file', `${key} has no record; remove it.`)
    // What was converted here has no source to compare with but what was noted when it was written.
    const isConverted = record.addresses.length === 0
    if (isConverted) return await folder.sample('all')
    damaged = await folder.sample()
    const download = await openDownload(engine, folder, record.addresses, record, context.emit)
    damaged.push(...await download.verify())
    download.free()
  } catch (error) {
    throw SternaError.from(error)
  } finally {
    folder.inner.close()
    leave()
    done()
  }
  if (mend && damaged.length) {
    const opened = await openSource(engine, {
      source: { kind: 'address', addresses: record.addresses }, store: store.kind, verify: 'none',
      ...(record.file === undefined ? {} : { file: record.file }), ...(record.trust === undefined ? {} : { trust: record.trust }),
    }, context)
    await opened.arrived.finally(() => opened.close())
  }
  return damaged
}

/** A stored package that other tabs are given. */
export interface Offering {
  offer: Offer
  /** Bytes of one of its files, at least one. */
  read(file: string, start: number, end: number): Promise<Uint8Array>
  close(): void
}

/** Opens a stored package for other tabs. All of it is compared with what was noted when it was verified: what is damaged would be called a lie. */
export async function offer(engine: Engine, idOrAddress: string, context: OpenContext): Promise<Offering> {
  const found = await find(idOrAddress)
  if (!found) throw new SternaError('not_found', `${idOrAddress} isn't in the store. Load it first.`)
  const { store, key } = found
  const leave = await lock(`sterna:use:${key}`, { mode: 'shared' })
  let folder: SealedFolder | undefined
  try {
    const done = await takeTurn(key, context)
    try {
      folder = new SealedFolder(await store.folder(key), engine.sha256)
      const damaged = await folder.sample('all')
      if (damaged.length) throw new SternaError('hash_mismatch', `${damaged.join(', ')} of ${key} was damaged in the store. Load it again.`)
      const offer = await engine.Offer.open(folder)
      const { inner } = folder
      return {
        offer,
        // A copy: it is transferred, and the store may keep its own.
        read: async (file, start, end) => (await inner.read(file, start, end)).slice(),
        close: () => (offer.free(), inner.close(), leave()),
      }
    } finally {
      done()
    }
  } catch (error) {
    folder?.inner.close()
    leave()
    throw SternaError.from(error)
  }
}

/** The text of a complete file of a stored model. */
export async function readText(idOrAddress: string, name: string): Promise<string | null> {
  const found = await find(idOrAddress)
  if (!found) return null
  const folder = await found.store.folder(found.key)
  const bytes = await readFile(folder, name).finally(() => folder.close())
  return bytes ? new TextDecoder().decode(bytes) : null
}

export async function usage(): Promise<StorageUsage> {
  const best = await openStore('auto')
  const { usage, quota } = await estimate()
  const persisted = await globalThis.navigator?.storage?.persisted?.().catch(() => undefined)
  return {
    store: best.kind as StoreKind, modelBytes: sum((await list()).map(({ bytes }) => ({ size: bytes }))),
    ...(usage === undefined ? {} : { originBytes: usage }), ...(quota === undefined ? {} : { quotaBytes: quota }),
    ...(persisted === undefined ? {} : { persisted }),
  }
}
