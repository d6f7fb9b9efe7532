// Stands in for the package in tests of the examples: the same names, words instead of a model.
const wait = ms => new Promise(resolve => setTimeout(resolve, ms))
const sizes = { tales: 1_123_904, big: 612_000_000, huge: 9_400_000_000 }
const kind = source => typeof source !== 'string' ? 'tales' : /huge/.test(source) ? 'huge' : /tale|tiny/.test(source) ? 'tales' : 'big'
const stored = new Map(JSON.parse(localStorage.getItem('fake') ?? '[]'))
const keep = () => localStorage.setItem('fake', JSON.stringify([...stored]))
const nameOf = source => source.replace(/\/(manifest\.json)?$/, '').split('/').at(-1)
class FakeError extends Error {
  constructor(code, message) { super(message), this.code = code, this.name = code === 'cancelled' ? 'AbortError' : 'SternaError' }
}

const ANSWER = `Sunlight holds every colour. On its way through the air, it meets molecules that are **much smaller** than a wave of light, and these scatter the short waves far more than the long ones.

1. Blue light has short waves, so it goes everywhere.
2. Red light goes nearly straight on:
   - it reaches you at noon with the rest,
   - and nearly alone at sunset.

The strength goes with the *fourth power* of the frequency, as \`scatter\` says:

\`\`\`js
/** How much more of one wave length is scattered than of another, both in nanometres. */
const scatter = (a, b) => (b / a) ** 4
scatter(450, 700) // 5.9
\`\`\`

<img src=x onerror="window.hacked = 1"> is text, too.`
const TALE = ', there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big bird.\n\n"Hello, bird," said Lily. The bird was very happy and flew to the sea.'

function generation(text, { signal, maxTokens = 1e9 } = {}) {
  const words = text.match(/\s*\S+/g).slice(0, maxTokens)
  let stopped = false
  const it = {
    reason: undefined, usage: undefined, forgotten: 0, partial: '',
    stop() { if (!it.reason) it.reason = 'stopped', stopped = true, it.onEnd?.() },
    async text() { for await (const _ of it); return it.partial },
    async *[Symbol.asyncIterator]() {
      await wait(globalThis.fakePause ?? 60)
      for (const word of words) {
        if (signal?.aborted) throw new FakeError('cancelled', 'Cancelled.')
        if (stopped) return
        it.partial += word
        yield word
        await wait(globalThis.fakePace ?? 12)
      }
      it.usage = { promptTokens: 20, cachedTokens: 0, completionTokens: words.length }
      it.reason = 'stop'
      it.onEnd?.()
    },
  }
  return it
}

function makeModel(source, name) {
  const small = kind(source) === 'tales'
  const info = {
    architecture: small ? 'llama' : 'bitnet', parameters: small ? 3_300_000 : 2_400_000_000, maxContext: small ? 512 : 4096, vocabulary: 512, hasTemplate: !small,
    backend: small ? 'cpu' : 'gpu', weightBytes: sizes[kind(source)], cacheBytesPerToken: 2048, warnings: [], name, threads: 2, contextLength: small ? 512 : 4096,
    ...(small ? { backendReason: { code: 'no_adapter', message: 'WebGPU found no GPU that it may use.' } } : { adapter: 'google swiftshader' }),
  }
  const say = (messages, options) => {
    const asked = typeof messages === 'string' ? messages : messages.filter(({ role }) => role === 'user').at(-1).content
    globalThis.fakeAsked = asked
    if (/fail/.test(asked)) return { stop() {}, partial: '', async *[Symbol.asyncIterator]() { throw new FakeError('device_lost', 'The GPU was lost.') } }
    return generation(small ? TALE : globalThis.fakeAnswer ?? ANSWER, options)
  }
  return {
    info,
    generate: say,
    chat({ messages = [] } = {}) {
      messages = [...messages]
      const answer = () => {
        const made = say(messages, {})
        made.onEnd = () => made.partial && messages.push({ role: 'assistant', content: made.partial })
        return made
      }
      return {
        get messages() { return messages },
        send(content) { messages.push({ role: 'user', content }); return answer() },
        regenerate() { messages.length = messages.findLastIndex(({ role }) => role === 'user') + 1; return answer() },
        edit(i, content) { if (messages[i]?.role !== 'user') throw new FakeError('invalid_request', `Message ${i} is no question.`); messages.length = i; messages.push({ role: 'user', content }); return answer() },
        async close() {},
      }
    },
    tokenize: async text => text.match(/\s*\S+/g)?.map((_, i) => i) ?? [],
    async dispose() {},
  }
}

/** The chunks that a server streams. */
async function* chunksOf(response) {
  let text = ''
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (text + piece).split('\n')
    text = lines.pop()
    for (const line of lines) if (line.startsWith('data: {')) yield JSON.parse(line.slice(6))
  }
}

export const Sterna = {
  openai: address => ({ chat: { completions: {
    async create(request, { signal }) {
      const response = await fetch(`${address}/v1/chat/completions`, { method: 'POST', body: JSON.stringify(request), signal })
      if (!response.ok) throw new FakeError('server', `HTTP ${response.status}`)
      return chunksOf(response)
    },
  } } }),
  async plan(source) {
    await wait(80)
    if (/missing/.test(String(source))) throw new FakeError('not_found', `${source}: HTTP 404`)
    const totalBytes = sizes[kind(source)]
    const here = typeof source === 'string' ? stored.get(source)?.bytes ?? 0 : totalBytes
    return { files: [], totalBytes, missingBytes: totalBytes - here, freeBytes: 12_400_000_000, memoryBytes: totalBytes, fits: totalBytes < 4e9 }
  },
  async load(source, { onProgress, signal, name } = {}) {
    const totalBytes = sizes[kind(source)]
    if (typeof source === 'string') {
      const record = stored.get(source) ?? { bytes: 0, totalBytes, name: name ?? nameOf(source) }
      stored.set(source, record)
      while (record.bytes < totalBytes) {
        if (signal?.aborted) throw new FakeError('cancelled', 'Cancelled.')
        record.bytes = Math.min(totalBytes, record.bytes + (globalThis.fakeRate ?? 6e6))
        onProgress?.({ phase: 'download', doneBytes: record.bytes, totalBytes, bytesPerSecond: 21e6 })
        keep()
        await wait(30)
      }
    }
    onProgress?.({ phase: 'load', doneBytes: totalBytes, totalBytes })
    await wait(50)
    return makeModel(source, name ?? nameOf(source))
  },
  models: {
    list: async () => [...stored].map(([source, { bytes, totalBytes, name }], i) => ({ id: `m${i}`, source, name, bytes, totalBytes, complete: bytes === totalBytes, usedAt: i, store: 'opfs' })),
    async remove(id) { stored.delete([...stored.keys()][Number(id.slice(1))]); keep(); return true },
    usage: async () => ({ store: 'opfs', modelBytes: [...stored.values()].reduce((sum, { bytes }) => sum + bytes, 0), quotaBytes: 13_000_000_000, persisted: false }),
  },
}
