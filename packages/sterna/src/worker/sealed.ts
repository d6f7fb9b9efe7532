/**
 * A folder whose files are checked when they are read again.
 *
 * The engine hashes a file before it is committed. At that moment this keeps a digest of each MiB of it, in a
 * file of its own, so that a later start can check some of them in milliseconds, whatever the model's format.
 */
import type { Disk } from '../engine.js'
import { SternaError } from '../error.js'
import type { Entry, Folder } from './store.js'
import { readFile, writeFile } from './store.js'

const BLOCK = 1 << 20
/** Bytes kept of a block's SHA-256. */
const DIGEST = 8
const SEALS = '.seal/'

/** The files of this package's own in a model's folder. */
export const isOwn = (name: string) => name.startsWith('.')

export class SealedFolder implements Disk {
  /** Why the browser refused to write or delete. The engine's error doesn't say that. */
  failure: SternaError | undefined
  /** The last thing that is being done to each file. */
  #turns = new Map<string, Promise<void>>()

  constructor(readonly inner: Folder, private readonly sha256: (bytes: Uint8Array) => string) {}

  len(name: string) { return this.inner.len(name) }
  read(name: string, start: number, end: number) { return this.inner.read(name, start, end) }
  journal(name: string) { return this.inner.journal(name) }
  readBack(name: string, start: number, end: number) { return this.#inTurn(name, () => this.inner.readBack(name, start, end)) }
  writeAt(name: string, offset: number, bytes: Uint8Array) { return this.#change(name, () => this.inner.writeAt(name, offset, bytes)) }
  note(name: string, journal: string) { return this.#change(name, () => this.inner.note(name, journal)) }

  /** Several parts of a file arrive at once; a folder does one thing to a file at a time. */
  #inTurn<T>(name: string, act: () => T | Promise<T>): Promise<T> {
    const result = (this.#turns.get(name) ?? Promise.resolve()).then(act)
    const settled = result.then(() => {}, () => {}).then(() => { if (this.#turns.get(name) === settled) this.#turns.delete(name) })
    this.#turns.set(name, settled)
    return result
  }

  async #change(name: string, change: () => void | Promise<void>): Promise<void> {
    try {
      await this.#inTurn(name, change)
    } catch (error) {
      throw this.failure = SternaError.from(error)
    }
  }

  async commit(name: string): Promise<void> {
    await this.#change(name, async () => {
      const size = await this.inner.arrived(name)
      const seal = new Uint8Array(Math.ceil(size / BLOCK) * DIGEST)
      for (let index = 0; index * BLOCK < size; index++) {
        seal.set(await this.#digest((start, end) => this.inner.readBack(name, start, end), index, size), index * DIGEST)
      }
      await this.inner.remove(SEALS + name)
      await writeFile(this.inner, SEALS + name, seal)
      await this.inner.commit(name)
    })
  }

  remove(name: string): Promise<void> {
    return this.#change(name, async () => {
      await this.inner.remove(name)
      await this.inner.remove(SEALS + name)
    })
  }

  /** Files of the model, complete or not. */
  async entries(): Promise<Entry[]> {
    return (await this.inner.entries()).filter(({ name }) => !isOwn(name))
  }

  /**
   * Compares some blocks of each complete file with their digests: all of a small one, else the first, and one
   * of sixteen by chance. Removes and names files that differ.
   */
  async sample(blocks: 'some' | 'all' = 'some'): Promise<string[]> {
    const damaged: string[] = []
    for (const { name, size, complete } of await this.entries()) {
      if (complete && !await this.#isWhole(name, size, blocks)) {
        await this.remove(name)
        damaged.push(name)
      }
    }
    return damaged
  }

  async #isWhole(name: string, size: number, blocks: 'some' | 'all'): Promise<boolean> {
    const seal = await readFile(this.inner, SEALS + name)
    const n = Math.ceil(size / BLOCK)
    if (seal?.length !== n * DIGEST) return false // Also if the file was cut.
    const step = n <= 4 || blocks === 'all' ? 1 : 16
    for (let group = 0; group < n; group += step) {
      const index = group === 0 ? 0 : Math.min(n - 1, group + Math.floor(Math.random() * step))
      const digest = await this.#digest((start, end) => this.inner.read(name, start, end), index, size)
      if (digest.some((byte, i) => byte !== seal[index * DIGEST + i])) return false
    }
    return true
  }

  async #digest(read: (start: number, end: number) => Uint8Array | Promise<Uint8Array>, index: number, size: number): Promise<Uint8Array> {
    const start = index * BLOCK, end = Math.min(size, start + BLOCK)
    let block = await read(start, end)
    for (let whole: Uint8Array | undefined, at = block.length; at < end - start;) {
      if (!whole) (whole = new Uint8Array(end - start)).set(block), block = whole
      const piece = await read(start + at, end)
      if (piece.length === 0) return new Uint8Array(DIGEST)
      whole.set(piece, at)
      at += piece.length
    }
    // Only secure contexts have the browser's own, which is faster.
    if (globalThis.crypto?.subtle) {
      return new Uint8Array(await crypto.subtle.digest('SHA-256', block as Uint8Array<ArrayBuffer>)).subarray(0, DIGEST)
    }
    return Uint8Array.from(this.sha256(block).slice(0, 2 * DIGEST).match(/../g)!, byte => parseInt(byte, 16))
  }
}
