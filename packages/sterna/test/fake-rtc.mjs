// Connections between tabs, in this process: what src/rtc.ts uses of WebRTC. Descriptions carry the number of a connection
// and the fingerprint of its certificate.
export const connections = []

const digits = () => Array.from({ length: 32 }, () => Math.floor(Math.random() * 256).toString(16).padStart(2, '0').toUpperCase()).join(':')

class Target extends EventTarget {
  tell(type, members = {}) {
    const event = Object.assign(new Event(type), members)
    this[`on${type}`]?.(event)
    this.dispatchEvent(event)
  }
}

export class Channel extends Target {
  readyState = 'connecting'
  bufferedAmount = 0
  constructor(protocol) {
    super()
    this.protocol = protocol
  }
  join(other) {
    this.other = other
    other.other = this
    for (const side of [this, other]) {
      side.readyState = 'open'
      setImmediate(() => side.tell('open'))
    }
  }
  send(data) {
    if (this.readyState !== 'open') throw new DOMException('not open', 'InvalidStateError')
    const copy = typeof data === 'string' ? data : data.slice().buffer
    setImmediate(() => { if (this.other.readyState === 'open') this.other.tell('message', { data: copy }) })
  }
  close() {
    for (const side of [this, this.other]) {
      if (!side || side.readyState === 'closed') continue
      // What was sent before arrives before.
      setImmediate(() => {
        side.readyState = 'closed'
        side.tell('close')
      })
    }
  }
}

export class FakeConnection extends Target {
  static async generateCertificate() { return { fingerprint: digits() } }
  connectionState = 'new'
  iceGatheringState = 'complete'
  channels = []
  constructor({ certificates, iceServers }) {
    super()
    this.iceServers = iceServers
    this.fingerprint = certificates?.[0].fingerprint ?? digits()
    this.number = connections.push(this) - 1
  }
  createDataChannel(label, { protocol, negotiated } = {}) {
    const channel = new Channel(protocol)
    this.channels.push(channel)
    if (negotiated) this.lasting = channel
    else if (this.other) {
      const there = new Channel(protocol)
      this.other.channels.push(there)
      channel.join(there)
      setImmediate(() => this.other.tell('datachannel', { channel: there }))
    }
    return channel
  }
  async createOffer() { return { type: 'offer', sdp: this.sdp() } }
  async createAnswer() { return { type: 'answer', sdp: this.sdp() } }
  sdp() { return `v=0\r\na=fingerprint:sha-256 ${this.fingerprint}\r\na=number:${this.number}\r\n` }
  async setLocalDescription(description) { this.localDescription = description }
  async setRemoteDescription({ type, sdp }) {
    this.other = connections[Number(/^a=number:(\d+)/m.exec(sdp)[1])]
    if (type !== 'answer') return
    for (const side of [this, this.other]) {
      side.connectionState = 'connected'
      side.tell('connectionstatechange')
    }
    this.lasting.join(this.other.lasting)
  }
  close() {
    if (this.connectionState === 'closed') return
    this.connectionState = 'closed'
    for (const channel of this.channels) channel.close()
  }
}
