/** Taking a package from other tabs: the page's side, which has the connections that a Worker can't have. */
import { SternaError } from './error.js'
import { CONNECT_MS, PROTOCOL, described, expectRtc, keyOf, link, opened, understood, watch, type Link } from './rtc.js'
import { serve, type Context } from './rpc.js'
import type { SignallingRoom } from './signalling.js'
import type { PeerCalls, PeerOptions } from './types.js'

/** How long a tab that was asked may say nothing. */
const PATIENCE_MS = 30_000
const MAX_REPLY = 1 << 10
/** Where liars are remembered, and how many; then the oldest is forgotten. */
const LIARS = 'sterna:liars', MAX_LIARS = 1000, MAX_WHY = 300

interface Liar { peer: string; why: string; at: number }

/** The tabs that sent something false, by their keys. */
const liars = {
  /** Those that couldn't be stored: they are remembered as long as the page lives. */
  unstored: [] as Liar[],
  all(): Liar[] {
    try {
      const stored = JSON.parse(globalThis.localStorage?.getItem(LIARS) ?? '[]') as Liar[]
      if (Array.isArray(stored)) return [...stored, ...this.unstored]
    } catch {
      // Forbidden in this window, or damaged.
    }
    return this.unstored
  },
  has(peer: string): boolean { return this.all().some(liar => liar?.peer === peer) },
  add(peer: string, why: string): void {
    if (this.has(peer)) return
    const liar = { peer, why: why.slice(0, MAX_WHY), at: Math.floor(Date.now() / 1000) }
    try {
      globalThis.localStorage.setItem(LIARS, JSON.stringify([...this.all(), liar].slice(-MAX_LIARS)))
      this.unstored = []
    } catch {
      // Forbidden, full, or not there.
      this.unstored = [...this.unstored, liar].slice(-MAX_LIARS)
    }
  },
}

/** A tab that is connected. */
interface Peer extends Link { gone: boolean }

/** A port at which a Worker finds other tabs and asks them. What it holds ends with the Worker's call of `find`. */
export function takeFrom(options: PeerOptions): MessagePort {
  const { port1, port2 } = new MessageChannel()
  const taking = new Taking(options)
  serve<PeerCalls>(port1, {
    find: ({ manifest }, context) => taking.find(manifest, context),
    ask: (args, context) => taking.ask(args, context),
    lied: ({ peer, why }) => (taking.lied(peer, why), null),
  })
  return port2
}

class Taking {
  /** By their keys. */
  #peers = new Map<string, Peer>()
  /** What is being connected, by who it is in the room. */
  #pending = new Map<string, { answered(sdp: string): void; rejoined(): void; end(): void }>()
  /** The keys of those who answered, by who they are in the room. */
  #met = new Map<string, string>()

  constructor(private readonly options: PeerOptions) {}

  /** Connects to tabs that have the package, and names each by its key, until the signal ends it. */
  async find(manifest: string, { signal, emit }: Context<{ peer: string }>): Promise<null> {
    expectRtc()
    let room: SignallingRoom | undefined
    const heard = (message: unknown, from: string) => {
      const said = understood(message)
      if (!said || signal.aborted) return
      if ('answer' in said) this.#pending.get(from)?.answered(said.answer)
      else if ('have' in said && room && this.#wants(from)) {
        this.#connect(room, from).then(key => { if (key && !signal.aborted) emit({ peer: key }) }, () => {})
      }
    }
    room = await this.options.signalling.join(manifest, heard, () => {
      if (signal.aborted) return
      for (const { rejoined } of this.#pending.values()) rejoined()
      room?.say({ ask: true })
    })
    room.say({ ask: true })
    await new Promise<void>(resolve => {
      if (signal.aborted) resolve()
      signal.addEventListener('abort', () => resolve(), { once: true })
    })
    room.leave()
    for (const { end } of this.#pending.values()) end()
    for (const { connection } of this.#peers.values()) connection.close()
    return null
  }

  #connected(): number { return [...this.#peers.values()].filter(({ gone }) => !gone).length }

  /** Whether to connect to who is `from` in the room. */
  #wants(from: string): boolean {
    const key = this.#met.get(from)
    return !this.#pending.has(from) && !(key && this.#refuses(key)) && this.#connected() + this.#pending.size < (this.options.maxPeers ?? 8)
  }

  /** Who lied, and who is connected. */
  #refuses(key: string): boolean { return liars.has(key) || this.#peers.get(key)?.gone === false }

  /** Connects to the tab that is `to` in the room: its key, if it is one that may be asked. */
  async #connect(room: SignallingRoom, to: string): Promise<string | undefined> {
    const made = link({ iceServers: this.options.iceServers ?? [] })
    const { connection } = made
    let timer: ReturnType<typeof setTimeout> | undefined
    let offered = false
    try {
      const answer = new Promise<string>((resolve, reject) => {
        const unanswered = () => reject(new SternaError('io', 'no answer'))
        const end = () => (connection.close(), unanswered())
        // An answer to who this tab was doesn't come.
        const rejoined = () => { if (offered) unanswered() }
        this.#pending.set(to, { answered: resolve, rejoined, end })
        timer = setTimeout(end, CONNECT_MS)
      })
      answer.catch(() => {})
      await connection.setLocalDescription(await connection.createOffer())
      const offer = await described(connection)
      offered = true
      room.say({ offer }, to)
      const sdp = await answer
      const key = keyOf(sdp)
      if (key) this.#met.set(to, key)
      if (!key || this.#refuses(key)) throw new SternaError('untrusted', 'not asked')
      const open = opened(made)
      await connection.setRemoteDescription({ type: 'answer', sdp })
      await open
      if (this.#refuses(key)) throw new SternaError('untrusted', 'known by now')
      const peer: Peer = { ...made, gone: false }
      watch(made, () => {
        peer.gone = true
        connection.close()
      })
      this.#peers.set(key, peer)
      return key
    } catch (error) {
      connection.close()
      throw error
    } finally {
      clearTimeout(timer)
      this.#pending.delete(to)
    }
  }

  /** Asks a tab for bytes: items are the head of its answer, and then the bytes. */
  ask({ peer: key, request }: { peer: string; request: string }, { signal, emit }: Context<string | Uint8Array>): Promise<null> {
    const peer = this.#peers.get(key)
    if (!peer || peer.gone) throw new SternaError('not_found', 'the peer is gone')
    return new Promise((resolve, reject) => {
      const channel = peer.connection.createDataChannel('', { protocol: PROTOCOL })
      channel.binaryType = 'arraybuffer'
      let left: number | undefined
      let timer: ReturnType<typeof setTimeout> | undefined
      const end = (error?: SternaError) => {
        clearTimeout(timer)
        signal.removeEventListener('abort', stop)
        channel.onmessage = channel.onclose = null
        channel.close()
        error ? reject(error) : resolve(null)
      }
      const stop = () => end(new SternaError('cancelled', 'Cancelled.'))
      const patience = () => {
        clearTimeout(timer)
        timer = setTimeout(() => end(new SternaError('io', `the peer said nothing for ${PATIENCE_MS / 1000} seconds`)), PATIENCE_MS)
      }
      signal.addEventListener('abort', stop, { once: true })
      patience()
      channel.onopen = () => channel.send(request)
      channel.onclose = () => end(new SternaError('io', 'the peer ended its answer'))
      channel.onmessage = ({ data }: MessageEvent<string | ArrayBuffer>) => {
        patience()
        if (left === undefined) {
          const reply = typeof data === 'string' ? data.slice(0, MAX_REPLY + 1) : ''
          left = promised(request, reply)
          emit(reply)
        } else if (typeof data !== 'string') {
          left -= data.byteLength
          emit(new Uint8Array(data))
        }
        if (left <= 0) end()
      }
    })
  }

  /** Forgets a tab that sent something false, and remembers that it did. */
  lied(key: string, why: string): void {
    liars.add(key, why)
    const peer = this.#peers.get(key)
    if (!peer) return
    peer.gone = true
    peer.connection.close()
  }
}

/** How many bytes come behind a reply. */
function promised(request: string, reply: string): number {
  try {
    const { bytes } = JSON.parse(reply) as { bytes?: { size: number } }
    const { start, end } = JSON.parse(request) as { start: number; end?: number }
    return bytes ? (end ?? bytes.size) - start : 0
  } catch {
    return 0
  }
}
