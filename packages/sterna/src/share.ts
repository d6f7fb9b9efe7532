/** Giving a package to other tabs. */
import { connect } from './connect.js'
import { SternaError, cancelled } from './error.js'
import { PIECE, PROTOCOL, described, expectRtc, keyOf, link, opened, understood, watch, type Link } from './rtc.js'
import type { Remote } from './rpc.js'
import type { SignallingRoom } from './signalling.js'
import type { Calls, ShareOptions } from './types.js'

/** Requests of one connection at a time, and channels with those that are refused or not made yet. */
const MAX_REQUESTS_OF_ONE = 16, MAX_CHANNELS_OF_ONE = 32
/** Bytes of a request, at most. */
const MAX_REQUEST = 8 << 10
/** Bytes that are read from the store at once, and that wait in a channel before more are. */
const READ = 256 << 10, MAX_WAITING = 1 << 20
/** How long a tab may take to ask when it has opened a channel, and how long it may take nothing. */
const REQUEST_MS = 10_000, TAKE_MS = 30_000
/** How long it may have no channel. */
const IDLE_MS = 60_000
/** Tabs whose bytes are counted; then those that are away are forgotten. */
const MAX_COUNTED = 4096

interface Visitor extends Link {
  key: string
  nRequests: number
  /** Until they are closed on both sides. */
  channels: Set<RTCDataChannel>
  idle: ReturnType<typeof setTimeout> | undefined
  drop(): void
}

/** A package that other tabs get from this one, until it is stopped. */
export class Sharing {
  #room: SignallingRoom | undefined
  #visitors = new Set<Visitor>()
  /** What each tab has had, by its key. */
  #had = new Map<string, number>()
  #asked = 0
  #sent = 0
  #nRequests = 0
  /** When the next byte may be sent, where there is a rate. */
  #free = 0
  #stopped = false
  #ended: Promise<void> | undefined

  private constructor(
    private readonly remote: Remote<Calls>, private readonly end: () => Promise<void>, private readonly options: ShareOptions,
    private readonly certificate: RTCCertificate,
    /** What others know this tab by: the SHA-256 of a certificate that it makes for this. */
    readonly key: string,
    /** The SHA-256 of the package's manifest. */
    readonly manifest: string,
  ) {}

  /** @internal */
  static async start(remote: Remote<Calls>, end: () => Promise<void>, manifest: string, options: ShareOptions): Promise<Sharing> {
    // One for all connections: who lies is known by it.
    const certificate = await RTCPeerConnection.generateCertificate({ name: 'ECDSA', namedCurve: 'P-256' } as EcKeyGenParams)
    const probe = new RTCPeerConnection({ certificates: [certificate] })
    probe.createDataChannel('')
    const key = keyOf((await probe.createOffer()).sdp ?? '')
    probe.close()
    if (!key) throw new SternaError('unsupported', 'This browser\'s certificates have no SHA-256.')
    const sharing = new Sharing(remote, end, options, certificate, key, manifest)
    const room = sharing.#room = await options.signalling.join(manifest, (message, from) => sharing.#heard(message, from), () => {
      if (!sharing.#stopped) sharing.#room?.say({ have: true })
    })
    room.say({ have: true })
    return sharing
  }

  /** Bytes of files that were sent so far. */
  get sentBytes(): number { return this.#sent }
  /** Tabs that are connected. */
  get connections(): number { return this.#visitors.size }

  /** Gives nothing any more. Resolves when the files are let go of. */
  async stop(): Promise<void> {
    if (!this.#stopped) {
      this.#stopped = true
      this.#room?.leave()
      for (const visitor of this.#visitors) visitor.drop()
      this.#ended = this.end()
    }
    await this.#ended
  }

  #heard(message: unknown, from: string): void {
    const said = understood(message)
    if (!said || this.#stopped) return
    if ('ask' in said) this.#room?.say({ have: true }, from)
    else if ('offer' in said) this.#accept(said.offer, from).catch(() => {}) // Only the other tab is concerned.
  }

  /** Connects to a tab that offers to, if there is room for it. */
  async #accept(sdp: string, from: string): Promise<void> {
    const key = keyOf(sdp)
    if (!key || this.#visitors.size >= (this.options.maxConnections ?? 16)) return
    const made = link({ iceServers: this.options.iceServers ?? [], certificates: [this.certificate] })
    const { connection } = made
    const drop = () => {
      clearTimeout(visitor.idle)
      this.#visitors.delete(visitor)
      connection.close()
    }
    const visitor: Visitor = { ...made, key, nRequests: 0, channels: new Set(), idle: undefined, drop }
    this.#visitors.add(visitor)
    connection.ondatachannel = ({ channel }) => {
      if (channel.protocol === PROTOCOL) this.#take(visitor, channel)
      else channel.close()
    }
    try {
      const open = opened(made)
      await connection.setRemoteDescription({ type: 'offer', sdp })
      await connection.setLocalDescription(await connection.createAnswer())
      this.#room?.say({ answer: await described(connection) }, from)
      await open
      watch(made, drop)
      this.#rest(visitor)
    } catch (error) {
      drop()
      throw error
    }
  }

  /** Waits for the one request of a channel. */
  #take(visitor: Visitor, channel: RTCDataChannel): void {
    if (visitor.channels.size >= MAX_CHANNELS_OF_ONE) return channel.close()
    visitor.channels.add(channel)
    const close = () => {
      channel.close()
      this.#rest(visitor)
    }
    let timer = setTimeout(close, REQUEST_MS)
    channel.addEventListener('close', () => {
      clearTimeout(timer)
      visitor.channels.delete(channel)
      this.#rest(visitor)
    }, { once: true })
    channel.addEventListener('message', ({ data }) => {
      clearTimeout(timer)
      // Who has the answer closes the channel, if it is a refusal, too.
      this.#answer(visitor, channel, data).then(() => { if (visitor.channels.has(channel)) timer = setTimeout(close, TAKE_MS) }, close)
    }, { once: true })
  }

  /** Drops a tab that has no channel from now on. */
  #rest(visitor: Visitor): void {
    clearTimeout(visitor.idle)
    if (!this.#visitors.has(visitor)) return
    visitor.idle = setTimeout(() => {
      if ([...visitor.channels].every(({ readyState }) => readyState === 'closing' || readyState === 'closed')) visitor.drop()
    }, IDLE_MS)
  }

  async #answer(visitor: Visitor, channel: RTCDataChannel, request: unknown): Promise<void> {
    if (this.#nRequests >= (this.options.maxRequests ?? 32) || visitor.nRequests >= MAX_REQUESTS_OF_ONE) return channel.send('"busy"')
    this.#nRequests++
    visitor.nRequests++
    try {
      if (typeof request !== 'string' || request.length > MAX_REQUEST) return channel.send('"invalid"')
      const { reply, part } = await this.remote.call('offered', request)
      if (part && !this.#pay(visitor.key, part.end - part.start)) return channel.send('"quota"')
      channel.send(reply)
      if (part) await this.#send(channel, part)
    } finally {
      this.#nRequests--
      visitor.nRequests--
    }
  }

  /** Takes `n` bytes from what a tab may have, and from what there is for all. `false` if it isn't that much. */
  #pay(key: string, n: number): boolean {
    const { bytesPerPeer = Infinity, totalBytes = Infinity } = this.options
    const had = (this.#had.get(key) ?? 0) + n
    if (had > bytesPerPeer || this.#asked + n > totalBytes) return false
    if (this.#had.size >= MAX_COUNTED && !this.#had.has(key)) {
      const here = new Set([...this.#visitors].map(({ key }) => key))
      for (const known of this.#had.keys()) if (!here.has(known)) this.#had.delete(known)
    }
    this.#had.set(key, had)
    this.#asked += n
    return true
  }

  async #send(channel: RTCDataChannel, { file, start, end }: { file: string; start: number; end: number }): Promise<void> {
    for (let at = start; at < end;) {
      const bytes = await this.remote.call('read', { file, start: at, end: Math.min(end, at + READ) })
      for (let from = 0; from < bytes.length;) {
        const piece = bytes.subarray(from, from + this.#piece())
        from += piece.length
        await this.#wait(piece.length)
        await drained(channel)
        channel.send(piece as Uint8Array<ArrayBuffer>)
        this.#sent += piece.length
      }
      at += bytes.length
    }
    // Who has it all closes the channel.
    await new Promise<void>(resolve => {
      if (channel.readyState !== 'open') return resolve()
      const timer = setTimeout(() => (channel.close(), resolve()), TAKE_MS) // Not every end is told of.
      channel.addEventListener('close', () => (clearTimeout(timer), resolve()), { once: true })
    })
  }

  /** Bytes that are sent at once: so few where the rate is low that all who wait for some hear soon. */
  #piece(): number {
    const { bytesPerSecond = Infinity } = this.options
    return Math.max(1024, Math.min(PIECE, Math.floor(bytesPerSecond / 8)))
  }

  /** Waits until `n` bytes may be sent: all tabs have one rate. */
  async #wait(n: number): Promise<void> {
    const { bytesPerSecond } = this.options
    if (bytesPerSecond === undefined) return
    const now = performance.now()
    const begin = Math.max(now, this.#free)
    this.#free = begin + n / bytesPerSecond * 1000
    if (begin > now) await new Promise(resolve => setTimeout(resolve, begin - now))
  }
}

/** Resolves when little waits in the channel; rejects if it is closed, or nothing is taken for long. */
function drained(channel: RTCDataChannel): Promise<void> {
  return new Promise((resolve, reject) => {
    const closed = () => reject(new SternaError('io', 'the channel was closed'))
    if (channel.readyState !== 'open') return closed()
    if (channel.bufferedAmount <= MAX_WAITING) return resolve()
    channel.bufferedAmountLowThreshold = MAX_WAITING / 2
    const timer = setTimeout(() => settle(closed), TAKE_MS)
    const low = () => settle(resolve), gone = () => settle(closed)
    const settle = (then: () => void) => {
      clearTimeout(timer)
      channel.removeEventListener('bufferedamountlow', low)
      channel.removeEventListener('close', gone)
      then()
    }
    channel.addEventListener('bufferedamountlow', low)
    channel.addEventListener('close', gone)
  })
}

/** Begins to share a model that this origin stores. */
export async function share(id: string, wireEngine: Calls['engine']['args'], options: ShareOptions): Promise<Sharing> {
  expectRtc()
  for (const name of ['bytesPerSecond', 'bytesPerPeer', 'totalBytes', 'maxRequests', 'maxConnections'] as const) {
    const limit = options[name]
    if (limit !== undefined && !(limit > 0)) throw new SternaError('invalid_request', `${name}: expected a number above 0, found ${limit}.`)
  }
  const { remote, end } = connect(options)
  const leave = () => remote.call('dispose', null).then(end, end)
  let sharing: Sharing
  try {
    await remote.call('engine', wireEngine, { signal: options.signal })
    const manifest = await remote.call('offer', id, { signal: options.signal })
    sharing = await Sharing.start(remote, leave, manifest, options)
  } catch (error) {
    await leave()
    throw SternaError.from(error)
  }
  const { signal } = options
  if (signal?.aborted) {
    await sharing.stop()
    throw cancelled(signal)
  }
  signal?.addEventListener('abort', () => void sharing.stop(), { once: true })
  return sharing
}
