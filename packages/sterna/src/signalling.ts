/** How tabs that share a package find each other: rooms, in which they say a few short things before they are connected. */
import { fullAddress } from './connect.js'
import { SternaError } from './error.js'

/** A place where tabs find each other. A page may bring its own. */
export interface Signalling {
  /**
   * Joins the room called `room`, the SHA-256 of a package's manifest. `heard` is called with each message for this member,
   * and with who says it; `rejoined` when the room was lost and is joined again: others may know this member by
   * another name then, and have missed what was said. Rejects where the room can't be joined.
   */
  join(room: string, heard: (message: unknown, from: string) => void, rejoined?: () => void): Promise<SignallingRoom>
}

/** What a member does in a room. */
export interface SignallingRoom {
  /** Says something to the member `to`, or to all others: JSON of at most 16 KiB, to all of at most 1 KiB. Who isn't there doesn't hear it. */
  say(message: unknown, to?: string): void
  leave(): void
}

/** Between tabs of one origin in one browser. */
export function broadcastSignalling(): Signalling {
  return {
    async join(room, heard) {
      if (typeof BroadcastChannel === 'undefined') throw new SternaError('unsupported', 'This browser has no BroadcastChannel.')
      const id = Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, '0')).join('')
      const channel = new BroadcastChannel(`sterna:room:${room}`)
      channel.onmessage = ({ data }) => {
        const { from, to, message } = data as { from: string; to?: string; message: unknown }
        if (to === undefined || to === id) heard(message, from)
      }
      return {
        say: (message, to) => channel.postMessage({ from: id, message, ...(to === undefined ? {} : { to }) }),
        leave: () => channel.close(),
      }
    },
  }
}

/** How long a server may take to let in, and the longest wait before a lost connection is made again. */
const LET_IN_MS = 20_000
const LONGEST_WAIT_MS = 60_000

/** By a server, `sterna serve --signal`, whose address is `server`. `key` is for one that asks for keys. */
export function webSocketSignalling(server: string | URL, options: { key?: string } = {}): Signalling {
  const base = fullAddress(String(server).replace(/\/?$/, '/'))
  base.protocol = base.protocol.replace(/^http/, 'ws')
  const protocols = ['sterna-signal-1', ...(options.key === undefined ? [] : [`sterna-key.${base64Url(options.key)}`])]
  return {
    async join(room, heard, rejoined) {
      const url = new URL(`signal/${room}`, base).href
      let socket: WebSocket | undefined, left = false, waitMs = 1000
      /** Once it is let in. What is lost later is made again. */
      const open = () => new Promise<void>((resolve, reject) => {
        const opening = socket = new WebSocket(url, protocols)
        let isIn = false
        const timer = setTimeout(() => opening.close(), LET_IN_MS)
        opening.onmessage = ({ data }) => {
          let said: { id?: string; from?: string; message?: unknown }
          try {
            said = JSON.parse(String(data)) as typeof said
          } catch {
            return opening.close()
          }
          if (said.id !== undefined) {
            clearTimeout(timer)
            isIn = true
            waitMs = 1000
            resolve()
          } else if (said.from !== undefined) heard(said.message, said.from)
        }
        opening.onerror = () => {} // Its end comes after it.
        opening.onclose = ({ code, reason }) => {
          clearTimeout(timer)
          if (isIn && !left) again()
          reject(new SternaError('io', `Signalling at ${url}: not let in (code ${code}${reason && `, ${reason}`}).`))
        }
      })
      const again = () => setTimeout(() => {
        if (!left) open().then(rejoined, again)
      }, waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS))
      await open()
      return {
        say: (message, to) => {
          if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ message, ...(to === undefined ? {} : { to }) }))
        },
        leave: () => {
          left = true
          socket?.close()
        },
      }
    },
  }
}

function base64Url(text: string): string {
  return btoa(String.fromCharCode(...new TextEncoder().encode(text))).replace(/\+/g, '-').replace(/\//g, '_').replace(/=+$/, '')
}
