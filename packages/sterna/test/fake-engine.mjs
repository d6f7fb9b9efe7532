// Stands in for the engine in tests: it implements src/engine.d.ts with real downloads (ranges, journals,
// SHA-256) and a model that answers with the words of its prompt, in reverse, each followed by a number.
// Also runs in a browser, where it takes the place of dist/wasm/sterna_web.js.

const BLOCK = 64 * 1024
const fail = (code, message) => { throw Object.assign(new Error(message), { code }) }
const hex = bytes => Array.from(new Uint8Array(bytes), byte => byte.toString(16).padStart(2, '0')).join('')
const digest = async bytes => hex(await crypto.subtle.digest('SHA-256', bytes))

/** What tests look at and change. */
export const seen = { sessions: new Set(), starts: [], prompts: [], cancels: 0, adapters: [], freed: 0, fetched: [], stepMs: 0, lost: undefined, initialised: [], downloads: [], vocabularies: [], replies: [], awaitPeers: 0 }

export default async function init(options) { seen.initialised.push(options) }
export function sha256() { return '00'.repeat(32) }
export function version() { return 'fake' }

async function body(answer) {
  const pieces = []
  for (let piece; (piece = await answer.read());) pieces.push(piece)
  return new Uint8Array(await new Blob(pieces).arrayBuffer())
}

export class Download {
  static async open(addresses, disk, http, options) {
    const download = new Download()
    Object.assign(download, { addresses, disk, http, options, cancelled: false, peers: [], sources: new Map() })
    seen.downloads.push(options)
    const [address] = addresses
    if (address.startsWith('https://huggingface.co/')) {
      await download.readListing(address)
    } else if (address.endsWith('.gguf')) {
      const name = new URL(address).pathname.split('/').pop()
      const size = await disk.len(name) ?? await sizeOf(http, address)
      download.listed = [{ name, size, address }]
    } else {
      await download.readManifest(address)
    }
    for (const file of download.listed) file.here = file.name === 'manifest.json' || await disk.len(file.name) === file.size
    return download
  }
  async readListing(address) {
    const listing = `${address.replace('huggingface.co/', 'huggingface.co/api/models/')}/revision/main?blobs=true`
    const answer = await this.http.open(listing).catch(error => fail('io', `${listing}: ${error.message}`))
    if (answer.status !== 200) fail('not_found', `${listing}: no such repository`)
    const { siblings } = JSON.parse(new TextDecoder().decode(await body(answer)))
    this.listed = siblings.map(({ rfilename, size }) => ({ name: rfilename, size, address: `${address}/resolve/main/${rfilename}` }))
  }
  async readManifest(address) {
    const { disk, http } = this
    let text
    try {
      const answer = await http.open(new URL('manifest.json', address).href)
      if (answer.status !== 200) fail('not_found', `${address}manifest.json: status ${answer.status}`)
      const bytes = await body(answer)
      text = new TextDecoder().decode(bytes)
      this.small = bytes
    } catch (error) {
      const size = await disk.len('manifest.json')
      if (error.code || size === undefined) throw error.code ? error : Object.assign(new Error(`${address}: ${error.message}`), { code: 'io' })
      text = new TextDecoder().decode(await disk.read('manifest.json', 0, size))
    }
    this.text = text
    this.hash = await digest(new TextEncoder().encode(text))
    const size = new TextEncoder().encode(text).length
    this.listed = [{ name: 'manifest.json', size }, ...JSON.parse(text).shards.map(({ filename, size, hash }) => ({ name: filename, size, hash, address: new URL(filename, address).href }))]
  }
  files() { return this.listed.map(({ name, size, here }) => ({ name, size, here })) }
  manifest() { return this.text }
  digest() { return this.hash }
  addPeer(name, peer) { this.peers.push({ name, peer }) }
  /** A file from a peer, if one gives it; who sends something false is told of. */
  async fromPeer({ name, size, hash }, lied) {
    for (const source of [...this.peers]) {
      try {
        const answer = await source.peer.ask(JSON.stringify({ manifest: this.hash, file: name, start: 0, end: size }))
        seen.replies.push(answer.reply)
        if (!answer.reply.includes('bytes')) continue
        const data = await body(answer)
        this.sources.set(source.name, (this.sources.get(source.name) ?? 0) + data.length)
        const found = await digest(data)
        if (found === hash) return data
        this.peers.splice(this.peers.indexOf(source), 1)
        lied(source.name, `\`${name}\`: expected ${hash}, found ${found}`)
      } catch (error) {
        seen.replies.push(error.name)
      }
    }
    return undefined
  }
  async run(committed, progress, lied) {
    if (this.small) {
      await this.disk.remove('manifest.json')
      await this.disk.writeAt('manifest.json', 0, this.small)
      await this.disk.commit('manifest.json')
    }
    let receivedBytes = 0
    const totalBytes = this.listed.reduce((sum, { size }) => sum + size, 0)
    let doneBytes = this.listed.reduce((sum, { size, here }) => sum + (here ? size : 0), 0)
    for (const { name, size, hash, address, here } of this.listed) {
      if (here) { committed(name); continue }
      while (this.peers.length < seen.awaitPeers && !this.cancelled) await new Promise(done => setTimeout(done, 5))
      const given = hash && await this.fromPeer({ name, size, hash }, lied)
      if (given) {
        await this.disk.writeAt(name, 0, given)
        await this.disk.commit(name)
        committed(name)
        doneBytes += size
        progress({ doneBytes, totalBytes, receivedBytes, sources: [...this.sources].map(([name, bytes]) => ({ name, bytes })) })
        continue
      }
      let at = Number(await this.disk.journal(name) ?? 0)
      doneBytes += at
      seen.fetched.push({ name, from: at })
      const answer = at < size ? await this.http.open(address, at, size) : undefined
      if (answer && answer.status !== 206) fail('io', `${address}: status ${answer.status}`)
      for (let piece, noted = at; answer && (piece = await answer.read());) {
        if (this.cancelled) { answer.cancel(); fail('cancelled', 'cancelled') }
        await this.disk.writeAt(name, at, piece)
        at += piece.length
        receivedBytes += piece.length
        doneBytes += piece.length
        if (at - noted >= BLOCK) await this.disk.note(name, String(noted = at))
        this.sources.set(address, (this.sources.get(address) ?? 0) + piece.length)
        progress({ doneBytes, totalBytes, receivedBytes, sources: [...this.sources].map(([name, bytes]) => ({ name, bytes })) })
      }
      if (at !== size) fail('io', `${address}: ended after ${at} bytes of ${size}`)
      if (hash && await digest(await readAll((start, end) => this.disk.readBack(name, start, end), size)) !== hash) {
        await this.disk.remove(name)
        fail('hash_mismatch', `${name}: wrong hash`)
      }
      await this.disk.commit(name)
      committed(name)
    }
  }
  cancel() { this.cancelled = true }
  async verify() {
    const wrong = []
    for (const { name, size, hash } of this.listed) {
      if (!hash || await this.disk.len(name) === undefined) continue
      if (await digest(await readAll((start, end) => this.disk.read(name, start, end), size)) === hash) continue
      await this.disk.remove(name)
      wrong.push(name)
    }
    return wrong
  }
  free() {}
}

async function sizeOf(http, address) {
  const answer = await http.open(address, 0, 1)
  if (answer.status !== 206) fail('not_found', `${address}: status ${answer.status}`)
  answer.cancel()
  return Number(answer.header('content-range').split('/')[1])
}

async function readAll(read, size) {
  const whole = new Uint8Array(size)
  for (let at = 0; at < size;) {
    const piece = await read(at, size)
    whole.set(piece, at)
    at += piece.length
  }
  return whole
}

/** The other module: its constraints remember what they were made from. */
export async function constraints() {
  class Vocabulary {
    constructor(bytes, ends) { seen.vocabularies.push([bytes.length, ends.length]) }
    constraint(kind, text) {
      if (text === '{"type":"trap"}') throw new RangeError('Maximum call stack size exceeded')
      if (kind === 'regex' && text === '(') fail('invalid_request', 'regular expression: unclosed group')
      return { kind, text, free() { this.freed = true } }
    }
  }
  return { Vocabulary }
}

/** The files that a manifest names. */
export class Offer {
  static async open(files) {
    const size = await files.len('manifest.json') ?? fail('unsupported', 'no package')
    const text = await readAll((start, end) => files.read('manifest.json', start, end), size)
    const { shards } = JSON.parse(new TextDecoder().decode(text))
    const sizes = new Map([['manifest.json', size], ...shards.map(({ filename, size }) => [filename, size])])
    return Object.assign(new Offer(), { hash: await digest(text), sizes })
  }
  manifest() { return this.hash }
  answer(text) {
    const { manifest, file, start, end } = JSON.parse(text)
    const size = manifest === this.hash ? this.sizes.get(file) : undefined
    if (size === undefined) return { reply: '"unknown"' }
    if (start > (end ?? size) || end > size) return { reply: '"invalid"' }
    return { reply: JSON.stringify({ bytes: { size } }), part: { file, start, end: end ?? size } }
  }
  free() { seen.freed++ }
}

/** Puts the bytes of the entry into shards of 256 KiB. */
export class Conversion {
  static async open(files, options) {
    if (!options.entry?.endsWith('.gguf')) fail('invalid_file', `${options.name}: not a model`)
    const size = await files.len(options.entry)
    if (!size) fail('invalid_file', `${options.name}: empty`)
    return Object.assign(new Conversion(), { files, options, size })
  }
  bytes() { return this.size + 1000 }
  async run(disk, progress) {
    const shards = [], listed = []
    const put = async (name, data) => {
      if (this.cancelled) fail('cancelled', 'cancelled')
      await disk.writeAt(name, 0, data)
      await disk.commit(name)
      listed.push({ name, size: data.length })
    }
    for (let at = 0; at < this.size; at += 4 * BLOCK) {
      const data = await readAll((start, end) => this.files.read(this.options.entry, at + start, at + end), Math.min(4 * BLOCK, this.size - at))
      const filename = `shard_${String(shards.length).padStart(5, '0')}.bin`
      await put(filename, data)
      shards.push({ index: shards.length, filename, size: data.length, hash: await digest(data) })
      progress(at + data.length, this.size)
      await new Promise(done => setTimeout(done, seen.stepMs))
    }
    const id = this.options.id ?? `${this.options.name}-wfake`
    await put('manifest.json', new TextEncoder().encode(JSON.stringify({ version: 1, modelId: id, hashAlgorithm: 'sha256', shards })))
    return { id, files: listed, warnings: ['it is a fake'] }
  }
  cancel() { this.cancelled = true }
  free() { seen.freed++ }
}

export class Model {
  static async load(files, options, progress) {
    if (!options.entry) fail('invalid_file', 'a fake model needs an entry')
    const size = await files.len(options.entry) ?? fail('not_found', `${options.entry} is missing`)
    await readAll((start, end) => files.read(options.entry, start, end), size)
    if (options.entry === 'manifest.json') {
      const manifest = JSON.parse(new TextDecoder().decode(await files.read('manifest.json', 0, size)))
      for (const { filename, size } of manifest.shards) await readAll((start, end) => files.read(filename, start, end), size)
    }
    progress(size, size)
    return Object.assign(new Model(), { options, words: ['<s>'], sessions: new Map(), next: 1, template: !options.name.includes('base') })
  }
  info() {
    return {
      architecture: 'fake', parameters: 1, maxContext: 512, vocabulary: 8, hasTemplate: this.template, backend: 'cpu',
      backendReason: { code: 'asked', message: 'fake' }, weightBytes: 1, cacheBytesPerToken: 1, warnings: [],
    }
  }
  id(word) { return this.words.includes(word) ? this.words.indexOf(word) : this.words.push(word) - 1 }
  encode(text) { return Uint32Array.from(text.split(/\s+/).filter(Boolean), word => this.id(word)) }
  decode(ids) { return [...ids].map(id => this.words[id] ?? fail('invalid_request', `no token ${id}`)).join(' ') }
  prompt(messages, { addGenerationPrompt }) {
    return this.encode(messages.map(({ role, content }) => `<${role}> ${content}`).join(' ') + (addGenerationPrompt ? ' <assistant>' : ''))
  }
  session(context) {
    const id = this.next++
    this.sessions.set(id, { context, held: [] })
    seen.sessions.add(id)
    return id
  }
  close(id) {
    if (!this.sessions.delete(id)) fail('invalid_request', `no session ${id}`)
    seen.sessions.delete(id)
  }
  vocabulary() { return [new TextEncoder().encode(this.words.join('')), Uint32Array.from(this.words, (_, i) => this.words.slice(0, i + 1).join('').length)] }
  start(id, prompt, options, constraint) {
    const session = this.sessions.get(id)
    if (session.answer) fail('invalid_request', 'already answering')
    if (prompt.length === 0) fail('invalid_request', 'a prompt without tokens')
    if (prompt.length > session.context) fail('context_full', 'the prompt is too long')
    const same = session.held.findIndex((id, i) => prompt[i] !== id)
    const cached = Math.min(same < 0 ? session.held.length : same, prompt.length - 1)
    seen.starts.push({ id, options, ...(constraint ? { constraint } : {}) })
    seen.prompts.push(this.decode(prompt))
    session.held = [...prompt]
    const words = [...prompt].map(id => this.words[id]).filter(word => !word.startsWith('<')).reverse()
    session.answer = { words, options, n: 0, promptTokens: prompt.length, cached }
  }
  cancel(id) {
    seen.cancels++
    delete this.sessions.get(id).answer
  }
  isIdle() { return ![...this.sessions.values()].some(({ answer }) => answer) }
  async step() {
    if (this.stepping) fail('compute', 'two steps at a time')
    this.stepping = true
    await new Promise(done => setTimeout(done, seen.stepMs))
    this.stepping = false
    const events = []
    if (seen.lost) events.push({ session: [...this.sessions].find(([, { answer }]) => answer)[0], type: 'device_lost', message: seen.lost }), seen.lost = undefined
    for (const [session, state] of this.sessions) {
      const { answer } = state
      if (!answer) continue
      const word = answer.words[answer.n % answer.words.length]
      if (word === 'broken') {
        delete state.answer
        events.push({ session, type: 'failed', code: 'compute', message: 'not finite' })
        continue
      }
      const most = answer.options.maxTokens ?? answer.words.length
      if (answer.n < most && !answer.options.stop?.includes(word)) {
        const id = this.id(`${word}${answer.n++}`)
        state.held.push(id)
        const text = `${this.words[id]} `
        const top = Array.from({ length: answer.options.logprobs ?? 0 }, (_, i) => ({ id: i, text: this.words[i], logprob: -1 - i }))
        events.push({ session, type: 'token', id, text, ...(answer.options.logprobs === undefined ? {} : { logprob: -0.5, top }) })
      } else {
        const { promptTokens, cached: cachedTokens, n: completionTokens } = answer
        delete state.answer
        events.push({ session, type: 'end', text: '.', reason: completionTokens === answer.options.maxTokens ? 'length' : 'stop', promptTokens, cachedTokens, completionTokens })
      }
    }
    return events
  }
  async recover(files) { seen.recovered = await files.len(this.options.entry) }
  async logits(ids, all) { return Float32Array.from({ length: 8 * (all ? ids.length : 1) }, (_, i) => i) }
  async check(receipt, files, adapters) { return { ok: false, difference: `${receipt} ${await files.len(this.options.entry) > 0} ${JSON.stringify(adapters)}`, index: 3 } }
  async addAdapter(name, files) { seen.adapters.push(['add', name, await files.len('adapter.gguf') ?? await files.len('manifest.json')]) }
  removeAdapter(name) { seen.adapters.push(['remove', name]) }
  useAdapters(session, adapters) { seen.adapters.push(['use', session, JSON.stringify(adapters)]) }
  async swap(files, groups) { return groups.map(group => ({ group, from: { version: '1' }, to: { version: '2' } })) }
  memory() { return { wasmBytes: 1000 + this.sessions.size, gpuBytes: this.sessions.size * 100 } }
  free() { seen.freed++ }
}
