/**
 * Where models are kept: a store has a folder for each model, a folder has complete and arriving files.
 *
 * OPFS is the store of choice; IndexedDB holds blocks of 1 MiB where it is missing, and memory where both are.
 * An arriving file has its own name until it is committed, so that a crash at any point leaves the old file,
 * the arriving one with its journal, or the new file.
 */
import type { Disk } from '../engine.js'
import { SternaError } from '../error.js'
import type { StoreKind } from '../types.js'

export interface Entry { name: string; size: number; complete: boolean }

/** The files of one model. Names may have slashes. */
export interface Folder extends Disk {
  readonly kind: StoreKind
  entries(): Promise<Entry[]>
  /** Length of the arriving file so far. */
  arrived(name: string): Promise<number>
  close(): void
}

export interface Store {
  readonly kind: StoreKind
  /** Opens the folder `key`, which is made if need be. */
  folder(key: string): Promise<Folder>
  keys(): Promise<string[]>
  /** Deletes a folder with its files. */
  remove(key: string): Promise<void>
}

/** Opens a store; `auto` is the best that this browser has. Throws `unsupported` if it lacks the one asked for. */
export async function openStore(kind: StoreKind | 'auto'): Promise<Store> {
  if (kind === 'opfs' || kind === 'auto') {
    const store = await openOpfs()
    if (store) return store
  }
  if (kind === 'indexeddb' || kind === 'auto') {
    const store = await openIndexedDb()
    if (store) return store
  }
  if (kind === 'memory' || kind === 'auto') return memory
  throw new SternaError('unsupported', `This browser, or this page (is it served by https?), has no ${kind === 'opfs' ? 'OPFS with synchronous access' : 'IndexedDB'}.`)
}

/** Writes a small file at once. */
export async function writeFile(folder: Folder, name: string, bytes: Uint8Array): Promise<void> {
  await folder.writeAt(name, 0, bytes)
  await folder.commit(name)
}

/** Reads a whole small file; `undefined` if there is none. */
export async function readFile(folder: Folder, name: string): Promise<Uint8Array | undefined> {
  const size = await folder.len(name)
  if (size === undefined) return undefined
  const whole = new Uint8Array(size)
  for (let at = 0; at < size;) {
    const piece = await folder.read(name, at, size)
    whole.set(piece, at)
    at += piece.length
  }
  return whole
}

// OPFS

/** `FileSystemSyncAccessHandle`, which the library of types has for Workers only. */
interface SyncHandle {
  readonly mode?: string
  read(into: Uint8Array, options: { at: number }): number
  write(from: Uint8Array, options: { at: number }): number
  truncate(size: number): void
  getSize(): number
  flush(): void
  close(): void
}
type FileHandle = FileSystemFileHandle & {
  createSyncAccessHandle?(options?: { mode: 'read-only' }): Promise<SyncHandle>
  move?(name: string): Promise<void>
}
interface Reader { size: number; read(start: number, end: number): Uint8Array | Promise<Uint8Array>; close(): void }

// encodeURIComponent leaves no `%` that isn't followed by hexadecimal digits, so these meet no file's name.
const PART = '%part'
const JOURNAL = '%journal'
const NEW_JOURNAL = '%journal-new'
/** The end of a journal that was written whole. */
const END = '\n\n'

async function openOpfs(): Promise<Store | undefined> {
  let models: FileSystemDirectoryHandle
  try {
    const root = await navigator.storage.getDirectory()
    models = await root.getDirectoryHandle('sterna', { create: true })
    if (!('createSyncAccessHandle' in FileSystemFileHandle.prototype)) return undefined
  } catch {
    return undefined // Missing, or forbidden in this window.
  }
  return {
    kind: 'opfs',
    folder: async key => new OpfsFolder(await models.getDirectoryHandle(key, { create: true })),
    async keys() {
      const keys: string[] = []
      for await (const key of models.keys()) keys.push(key)
      return keys
    },
    remove: key => models.removeEntry(key, { recursive: true }).catch(unlessMissing),
  }
}

function unlessMissing(error: unknown): undefined {
  if ((error as Error).name !== 'NotFoundError') throw error
}

/** Opens a handle for writing. One that a closed tab had is released a moment later, so this is tried again. */
async function openSync(handle: FileHandle): Promise<SyncHandle> {
  for (let attempt = 0; ; attempt++) {
    try {
      return await handle.createSyncAccessHandle!()
    } catch (error) {
      if ((error as Error).name !== 'NoModificationAllowedError') throw error
      if (attempt === 20) throw new SternaError('busy', 'Another tab has a file of this model open.', { cause: error })
      await new Promise(done => setTimeout(done, 100))
    }
  }
}

class OpfsFolder implements Folder {
  readonly kind = 'opfs'
  #readers = new Map<string, Promise<Reader | undefined>>()
  #writers = new Map<string, Promise<SyncHandle>>()

  constructor(private readonly folder: FileSystemDirectoryHandle) {}

  async #handle(name: string, suffix = '', create = false): Promise<FileHandle | undefined> {
    return this.folder.getFileHandle(encodeURIComponent(name) + suffix, { create }).catch(unlessMissing)
  }

  async #delete(name: string, suffix = ''): Promise<void> {
    await this.folder.removeEntry(encodeURIComponent(name) + suffix).catch(unlessMissing)
  }

  #reader(name: string): Promise<Reader | undefined> {
    let reader = this.#readers.get(name)
    if (!reader) {
      reader = this.#handle(name).then(handle => handle && openReader(handle))
      this.#readers.set(name, reader)
      // What isn't there may come.
      void reader.then(found => { if (!found) this.#readers.delete(name) }, () => this.#readers.delete(name))
    }
    return reader
  }

  #writer(name: string): Promise<SyncHandle> {
    let writer = this.#writers.get(name)
    if (!writer) {
      writer = this.#handle(name, PART, true).then(handle => openSync(handle!))
      this.#writers.set(name, writer)
      writer.catch(() => this.#writers.delete(name))
    }
    return writer
  }

  async #release(name: string): Promise<void> {
    const [reader, writer] = [this.#readers.get(name), this.#writers.get(name)]
    this.#readers.delete(name)
    this.#writers.delete(name)
    ;(await reader)?.close()
    ;(await writer)?.close()
  }

  async len(name: string): Promise<number | undefined> {
    return (await this.#reader(name))?.size
  }

  async read(name: string, start: number, end: number): Promise<Uint8Array> {
    const reader = await this.#reader(name)
    if (!reader) throw new SternaError('not_found', `${name} isn't in the store.`)
    return reader.read(start, end)
  }

  async journal(name: string): Promise<string | undefined> {
    if (!await this.#handle(name, PART)) return undefined
    // A tab that ended between the two steps of a replacement left the new one, whole: it ends in END.
    for (const suffix of [JOURNAL, NEW_JOURNAL]) {
      const file = await (await this.#handle(name, suffix))?.getFile()
      const text = await file?.text()
      if (text?.endsWith(END)) return text.slice(0, -END.length)
    }
    return undefined
  }

  async writeAt(name: string, offset: number, bytes: Uint8Array): Promise<void> {
    const writer = await this.#writer(name)
    if (writer.write(bytes, { at: offset }) !== bytes.length) {
      throw new SternaError('quota', `The browser's storage is full: ${name} could not be written.`)
    }
  }

  async readBack(name: string, start: number, end: number): Promise<Uint8Array> {
    return readSync(await this.#writer(name), start, end)
  }

  async arrived(name: string): Promise<number> {
    return await this.#handle(name, PART) ? (await this.#writer(name)).getSize() : 0
  }

  async note(name: string, journal: string): Promise<void> {
    (await this.#writer(name)).flush()
    const handle = (await this.#handle(name, NEW_JOURNAL, true))!
    const file = await openSync(handle)
    try {
      file.truncate(0)
      file.write(new TextEncoder().encode(journal + END), { at: 0 })
      file.flush()
    } finally {
      file.close()
    }
    await this.#rename(handle, name, JOURNAL)
  }

  async commit(name: string): Promise<void> {
    (await this.#writer(name)).flush()
    await this.#release(name)
    await this.#rename((await this.#handle(name, PART))!, name, '')
    await this.#delete(name, JOURNAL)
    await this.#delete(name, NEW_JOURNAL)
  }

  /** Replaces `name` with the file of `handle`. */
  async #rename(handle: FileHandle, name: string, suffix: string): Promise<void> {
    const target = encodeURIComponent(name) + suffix
    if (handle.move) {
      await this.#delete(name, suffix)
      return handle.move(target)
    }
    const [from, to] = [await openSync(handle), await openSync((await this.#handle(name, suffix, true))!)]
    try {
      const size = from.getSize()
      to.truncate(size)
      for (let at = 0; at < size; at += 1 << 22) to.write(readSync(from, at, Math.min(size, at + (1 << 22))), { at })
      to.flush()
    } finally {
      from.close()
      to.close()
    }
    await this.folder.removeEntry(handle.name)
  }

  async remove(name: string): Promise<void> {
    await this.#release(name)
    for (const suffix of [JOURNAL, NEW_JOURNAL, PART, '']) await this.#delete(name, suffix)
  }

  async entries(): Promise<Entry[]> {
    const entries: Entry[] = []
    for await (const [encoded, handle] of this.folder.entries()) {
      const name = decodeURIComponent(encoded.replace(/%(part|journal|journal-new)$/, ''))
      const suffix = encoded.slice(encodeURIComponent(name).length)
      if (handle.kind === 'file' && (suffix === '' || suffix === PART)) {
        entries.push({ name, size: (await (handle as FileSystemFileHandle).getFile()).size, complete: suffix === '' })
      }
    }
    return entries
  }

  close(): void {
    for (const name of new Set([...this.#readers.keys(), ...this.#writers.keys()])) void this.#release(name)
  }
}

function readSync(handle: SyncHandle, start: number, end: number): Uint8Array {
  const bytes = new Uint8Array(end - start)
  return bytes.subarray(0, handle.read(bytes, { at: start }))
}

/** Opens a complete file so that other tabs can open it, too: browsers without shared handles read it as a `File`. */
async function openReader(handle: FileHandle): Promise<Reader> {
  try {
    const shared = await handle.createSyncAccessHandle!({ mode: 'read-only' })
    if (shared.mode === 'read-only') {
      return { size: shared.getSize(), read: (start, end) => readSync(shared, start, end), close: () => shared.close() }
    }
    shared.close() // The mode was ignored, so this one is exclusive.
  } catch (error) {
    if ((error as Error).name !== 'NoModificationAllowedError') throw error
  }
  return fileReader(await handle.getFile())
}

/** Reads a `File` or `Blob` where it is. */
export function fileReader(file: Blob): Reader {
  return {
    size: file.size,
    read: async (start, end) => new Uint8Array(await file.slice(start, end).arrayBuffer()),
    close: () => {},
  }
}

// Blocks: IndexedDB and memory

const BLOCK = 1 << 20

/** A map from text to values that can be cloned. */
interface Table {
  get(key: string): unknown | Promise<unknown>
  /** All of it or nothing; durable when it returns. `undefined` deletes. */
  put(entries: [string, unknown][]): void | Promise<void>
  keys(prefix: string): string[] | Promise<string[]>
}
/** A file: its blocks are `block/ID/INDEX`. */
interface Extent { id: string; size: number }

class BlockStore implements Store {
  constructor(readonly kind: StoreKind, private readonly table: Table) {}

  async folder(key: string): Promise<Folder> {
    return new BlockFolder(this.kind, this.table, key)
  }

  async keys(): Promise<string[]> {
    const keys = await this.table.keys('file/')
    return [...new Set(keys.map(key => key.split('/')[1]!))]
  }

  async remove(key: string): Promise<void> {
    const folder = new BlockFolder(this.kind, this.table, key)
    for (const { name } of await folder.entries()) await folder.remove(name)
  }
}

/** Keys: `file/FOLDER/NAME` and `part/FOLDER/NAME` hold an `Extent`, `journal/FOLDER/NAME` a text. */
class BlockFolder implements Folder {
  #parts = new Map<string, { extent: Extent; dirty: Map<number, Uint8Array> }>()
  /** The block that was read last. */
  #last: { key: string; block: Uint8Array } | undefined

  constructor(readonly kind: StoreKind, private readonly table: Table, private readonly key: string) {}

  #name(kind: 'file' | 'part' | 'journal', name: string): string {
    return `${kind}/${this.key}/${encodeURIComponent(name)}`
  }

  async #part(name: string) {
    let part = this.#parts.get(name)
    if (!part) {
      const extent = await this.table.get(this.#name('part', name)) as Extent | undefined
      part = { extent: extent ?? { id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`, size: 0 }, dirty: new Map() }
      this.#parts.set(name, part)
    }
    return part
  }

  async #block(id: string, index: number): Promise<Uint8Array | undefined> {
    const key = `block/${id}/${index}`
    if (this.#last?.key === key) return this.#last.block
    const block = await this.table.get(key) as Uint8Array | undefined
    if (block) this.#last = { key, block }
    return block
  }

  /** What a flush of `part` writes: its changed blocks and its length. */
  #changes(name: string, { extent, dirty }: { extent: Extent; dirty: Map<number, Uint8Array> }): [string, unknown][] {
    this.#last = undefined
    return [
      ...[...dirty].map(([index, block]): [string, unknown] => {
        const used = Math.min(BLOCK, extent.size - index * BLOCK)
        return [`block/${extent.id}/${index}`, used === block.length ? block : block.slice(0, used)]
      }),
      [this.#name('part', name), { ...extent }],
    ]
  }

  async len(name: string): Promise<number | undefined> {
    return (await this.table.get(this.#name('file', name)) as Extent | undefined)?.size
  }

  async read(name: string, start: number, end: number): Promise<Uint8Array> {
    const extent = await this.table.get(this.#name('file', name)) as Extent | undefined
    if (!extent) throw new SternaError('not_found', `${name} isn't in the store.`)
    return this.#read(name, extent, new Map(), start, end)
  }

  /** Up to the end of the block. */
  async #read(name: string, extent: Extent, dirty: Map<number, Uint8Array>, start: number, end: number): Promise<Uint8Array> {
    const index = Math.floor(start / BLOCK), base = index * BLOCK
    const block = dirty.get(index) ?? await this.#block(extent.id, index)
    const bytes = block?.subarray(start - base, Math.min(end, extent.size) - base)
    if (!bytes?.length) throw new SternaError('io', `${name}: bytes ${start}..${end} aren't in the store, which has ${extent.size}.`)
    return bytes
  }

  async journal(name: string): Promise<string | undefined> {
    return await this.table.get(this.#name('journal', name)) as string | undefined
  }

  async writeAt(name: string, offset: number, bytes: Uint8Array): Promise<void> {
    const part = await this.#part(name)
    const { extent, dirty } = part
    for (let from = 0; from < bytes.length;) {
      const index = Math.floor((offset + from) / BLOCK), at = offset + from - index * BLOCK
      let block = dirty.get(index)
      if (!block || block.length < BLOCK) {
        const stored = block ?? await this.#block(extent.id, index)
        block = new Uint8Array(BLOCK)
        if (stored) block.set(stored)
        dirty.set(index, block)
      }
      const n = Math.min(bytes.length - from, BLOCK - at)
      block.set(bytes.subarray(from, from + n), at)
      from += n
    }
    extent.size = Math.max(extent.size, offset + bytes.length)
    if (dirty.size > 16) {
      await this.table.put(this.#changes(name, part))
      dirty.clear()
    }
  }

  async readBack(name: string, start: number, end: number): Promise<Uint8Array> {
    const { extent, dirty } = await this.#part(name)
    return this.#read(name, extent, dirty, start, end)
  }

  async arrived(name: string): Promise<number> {
    return (await this.#part(name)).extent.size
  }

  async note(name: string, journal: string): Promise<void> {
    const part = await this.#part(name)
    await this.table.put([...this.#changes(name, part), [this.#name('journal', name), journal]])
    part.dirty.clear()
  }

  async commit(name: string): Promise<void> {
    const part = await this.#part(name)
    const old = await this.table.get(this.#name('file', name)) as Extent | undefined
    await this.table.put([
      ...this.#changes(name, part),
      [this.#name('file', name), { ...part.extent }],
      [this.#name('part', name), undefined],
      [this.#name('journal', name), undefined],
    ])
    this.#parts.delete(name)
    if (old) await this.#drop(old)
  }

  async #drop({ id }: Extent): Promise<void> {
    await this.table.put((await this.table.keys(`block/${id}/`)).map(key => [key, undefined]))
  }

  async remove(name: string): Promise<void> {
    this.#parts.delete(name)
    this.#last = undefined
    for (const kind of ['journal', 'part', 'file'] as const) {
      const value = await this.table.get(this.#name(kind, name)) as Extent | undefined
      await this.table.put([[this.#name(kind, name), undefined]])
      if (kind !== 'journal' && value) await this.#drop(value)
    }
  }

  async entries(): Promise<Entry[]> {
    const entries: Entry[] = []
    for (const kind of ['file', 'part'] as const) {
      for (const key of await this.table.keys(`${kind}/${this.key}/`)) {
        const { size } = await this.table.get(key) as Extent
        entries.push({ name: decodeURIComponent(key.split('/')[2]!), size, complete: kind === 'file' })
      }
    }
    return entries
  }

  close(): void {}
}

class MemoryTable implements Table {
  #map = new Map<string, unknown>()
  get(key: string): unknown { return this.#map.get(key) }
  put(entries: [string, unknown][]): void {
    for (const [key, value] of entries) {
      if (value === undefined) this.#map.delete(key)
      else this.#map.set(key, value)
    }
  }
  keys(prefix: string): string[] { return [...this.#map.keys()].filter(key => key.startsWith(prefix)) }
}

/** Lives as long as this Worker. */
const memory: Store = new BlockStore('memory', new MemoryTable())

async function openIndexedDb(): Promise<Store | undefined> {
  if (typeof indexedDB === 'undefined') return undefined
  const open = indexedDB.open('sterna', 1)
  open.onupgradeneeded = () => open.result.createObjectStore('table')
  let db: IDBDatabase
  try {
    db = await result(open)
  } catch {
    return undefined // Forbidden in this window.
  }
  const table: Table = {
    get: key => result(db.transaction('table').objectStore('table').get(key)),
    keys: async prefix => await result(db.transaction('table').objectStore('table').getAllKeys(IDBKeyRange.bound(prefix, `${prefix}\uffff`))) as string[],
    put: entries => new Promise((resolve, reject) => {
      const transaction = db.transaction('table', 'readwrite', { durability: 'strict' })
      const store = transaction.objectStore('table')
      for (const [key, value] of entries) value === undefined ? store.delete(key) : store.put(value, key)
      transaction.oncomplete = () => resolve()
      transaction.onabort = transaction.onerror = () => reject(transaction.error)
    }),
  }
  return new BlockStore('indexeddb', table)
}

function result<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result)
    request.onerror = () => reject(request.error)
  })
}
