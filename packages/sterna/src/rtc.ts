/** Connections between tabs, as both sides make them. */
import { SternaError } from './error.js'

/** The protocol of a channel, which carries one request: its JSON, the answer's JSON, and then the bytes in pieces. */
export const PROTOCOL = 'sterna/package/1'
/** Bytes of a piece: what every browser takes. */
export const PIECE = 64 << 10
/** How long a connection may take to be made. */
export const CONNECT_MS = 30_000
/** How long one may be interrupted before the other side counts as gone. */
const GONE_MS = 10_000
/** How long addresses are gathered before those that are known are said. */
const GATHER_MS = 2000
const MAX_SDP = 15 << 10

/** What tabs say to each other in a room. */
export type Said = { ask: true } | { have: true } | { offer: string } | { answer: string }

/** What another tab said, if it is any of that. */
export function understood(message: unknown): Said | undefined {
  if (typeof message !== 'object' || message === null) return undefined
  const said = message as Record<string, unknown>
  if (said['ask'] === true) return { ask: true }
  if (said['have'] === true) return { have: true }
  for (const kind of ['offer', 'answer'] as const) {
    const sdp = said[kind]
    if (typeof sdp === 'string' && sdp.length <= MAX_SDP) return { [kind]: sdp } as Said
  }
  return undefined
}

/** Throws `unsupported` where tabs can't be connected. */
export function expectRtc(): void {
  if (typeof RTCPeerConnection === 'undefined') throw new SternaError('unsupported', 'This browser has no WebRTC, by which tabs share with tabs.')
}

/**
 * The key of a tab: the SHA-256 of the certificate that its side of a connection proves to have. `undefined` if a description
 * names none, or several.
 */
export function keyOf(sdp: string): string | undefined {
  const found = new Set([...sdp.matchAll(/^a=fingerprint:(\S+) ([\dA-Fa-f:]+)\s*$/gm)].map(([, algorithm, digits]) => `${algorithm!.toLowerCase()} ${digits!.replaceAll(':', '').toLowerCase()}`))
  const [only] = found
  return found.size === 1 && /^sha-256 [\da-f]{64}$/.test(only!) ? only!.slice(8) : undefined
}

/** A connection, and the channel that is open as long as it is. */
export interface Link { connection: RTCPeerConnection; lasting: RTCDataChannel }

export function link(configuration: RTCConfiguration): Link {
  const connection = new RTCPeerConnection(configuration)
  return { connection, lasting: connection.createDataChannel('', { protocol: PROTOCOL, negotiated: true, id: 0 }) }
}

/**
 * Resolves when the other side is there; rejects if it doesn't come. To be called before the other side's description is
 * set: the channel may open before that has resolved.
 */
export function opened({ connection, lasting }: Link): Promise<void> {
  const open = new Promise<void>((resolve, reject) => {
    const fail = () => (clearTimeout(timer), reject(new SternaError('io', 'no connection')))
    const timer = setTimeout(fail, CONNECT_MS)
    lasting.addEventListener('open', () => (clearTimeout(timer), resolve()), { once: true })
    lasting.addEventListener('close', fail, { once: true })
    connection.addEventListener('connectionstatechange', () => {
      if (connection.connectionState === 'failed' || connection.connectionState === 'closed') fail()
    })
  })
  open.catch(() => {}) // Where setting the description fails, nobody waits for it.
  return open
}

/** Calls `gone` once, when the other side has closed the connection, or was not heard for long. */
export function watch({ connection, lasting }: Link, gone: () => void): void {
  let timer: ReturnType<typeof setTimeout> | undefined
  let told = false
  const tell = () => {
    clearTimeout(timer)
    if (told) return
    told = true
    gone()
  }
  lasting.addEventListener('close', tell, { once: true })
  connection.addEventListener('connectionstatechange', () => {
    const state = connection.connectionState
    clearTimeout(timer)
    if (state === 'failed' || state === 'closed') tell()
    else if (state === 'disconnected') timer = setTimeout(tell, GONE_MS)
  })
}

/** The description of this side, with the addresses that are known soon. */
export async function described(connection: RTCPeerConnection): Promise<string> {
  if (connection.iceGatheringState !== 'complete') {
    await new Promise<void>(resolve => {
      const timer = setTimeout(resolve, GATHER_MS)
      connection.addEventListener('icegatheringstatechange', () => {
        if (connection.iceGatheringState === 'complete') clearTimeout(timer), resolve()
      })
    })
  }
  return connection.localDescription!.sdp
}
