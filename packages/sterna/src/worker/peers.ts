/** Other tabs as sources of a download: the Worker's side, which asks the page. */
import type { Download, Peer, PeerAnswer } from '../engine.js'
import { SternaError } from '../error.js'
import { Remote } from '../rpc.js'
import type { Notice, PeerCalls } from '../types.js'

/** Tabs that take part in a download. */
export interface Peers {
  /** A source that sent something false is told of, and if it is a tab, never asked again. */
  lied(name: string, why: string): void
  /** Lets go of all tabs. */
  leave(): void
}

const PREFIX = 'peer '

/** Adds to `download` each tab that the page finds for the package with this digest. */
export function joinPeers(port: MessagePort | undefined, download: Pick<Download, 'addPeer'>, manifest: string | undefined, tell: (notice: Notice) => void): Peers {
  const lied = (name: string, why: string) => tell({ code: 'false_bytes', message: `${name} is not asked any more: ${why}` })
  if (!port) return { lied, leave() {} }
  if (manifest === undefined) {
    tell({ code: 'no_peers', message: 'Tabs share packages with each other, and this is a single file: it comes from its address alone.' })
    port.close()
    return { lied, leave() {} }
  }
  const remote = new Remote<PeerCalls>(port)
  const leaving = new AbortController()
  const onItem = ({ peer }: { peer: string }) => download.addPeer(PREFIX + peer, new TabPeer(remote, peer))
  remote.call('find', { manifest }, { signal: leaving.signal, onItem }).catch(error => {
    const { code, message } = SternaError.from(error)
    if (code !== 'cancelled') tell({ code: 'no_peers', message: `No other tab is asked: ${message}` })
  })
  return {
    lied(name, why) {
      lied(name, why)
      if (name.startsWith(PREFIX)) void remote.call('lied', { peer: name.slice(PREFIX.length), why }).catch(() => {})
    },
    leave: () => leaving.abort(),
  }
}

class TabPeer implements Peer {
  constructor(private readonly remote: Remote<PeerCalls>, private readonly peer: string) {}

  ask(request: string): Promise<PeerAnswer> {
    const stopping = new AbortController()
    const pieces: Uint8Array[] = []
    let ended: { error?: unknown } | undefined
    let wake = () => {}
    const end = (how: { error?: unknown }) => { ended = how; wake() }
    return new Promise((resolve, reject) => {
      const answer = (reply: string): PeerAnswer => ({
        reply,
        async read() {
          while (pieces.length === 0 && !ended) await new Promise<void>(resolve => { wake = resolve })
          if (pieces.length === 0 && ended && 'error' in ended) throw ended.error
          return pieces.shift()
        },
        cancel: () => stopping.abort(),
      })
      const onItem = (item: string | Uint8Array) => {
        if (typeof item === 'string') return resolve(answer(item))
        pieces.push(item)
        wake()
      }
      this.remote.call('ask', { peer: this.peer, request }, { signal: stopping.signal, onItem }).then(() => end({}), error => {
        const { code, message } = SternaError.from(error)
        // The engine knows what is gone for good by this name.
        const failure = Object.assign(new Error(message), code === 'not_found' ? { name: 'NotFoundError' } : {})
        end({ error: failure })
        reject(failure)
      })
    })
  }
}
