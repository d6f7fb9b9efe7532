// GPUs that fail: lost, hung, wrong. The Worker's script is served with one before it that makes them so.
import assert from 'node:assert/strict'
import { wideTales } from './made.mjs'
import { all, nativeIds, open, reference, serveAsPackage, site, skip } from './stage.mjs'

/** Runs `script`, with `args`, in the Worker before its own. */
function inWorker(script, ...args) {
  site.state.before = name => name === '/pkg/worker/main.js' ? `(${script})(${args.map(arg => JSON.stringify(arg)).join()});\n` : ''
}

/** Skips where there is no adapter. */
async function openWithGpu() {
  const page = await open()
  if (!await page.evaluate(async () => !!await navigator.gpu?.requestAdapter())) skip('this browser has no WebGPU adapter')
  return page
}

/** Answers on a GPU that `script` makes fail once the page says so, after a few tokens. */
async function fails(script) {
  const page = await openWithGpu()
  inWorker(script)
  const { prompt, text } = reference[0]
  const seen = await page.evaluate(async prompt => {
    const notices = []
    const model = await Sterna.load('./tiny.gguf', { backend: 'gpu', onNotice: notice => notices.push(notice) })
    const before = model.info.backend
    const generation = model.generate(prompt, { maxTokens: 160, temperature: 0 })
    let text = '', failed
    for await (const piece of generation) {
      text += piece
      if (failed === undefined && text.length > 8) {
        failed = performance.now()
        new BroadcastChannel('test').postMessage('now')
      }
    }
    const ms = performance.now() - failed
    const again = await tokensOf(model, prompt, 4)
    const { info } = model
    await model.dispose()
    return { before, text, ms, notices, info, again: again.text }
  }, prompt)
  console.log(`  ${JSON.stringify(seen.notices)}; ${JSON.stringify(seen.info.backendReason)}; all tokens ${Math.round(seen.ms)} ms later`)
  assert.equal(seen.before, 'gpu')
  assert.equal(seen.text, text)
  assert.ok(seen.again !== '' && text.startsWith(seen.again))
  assert.deepEqual(seen.notices.map(({ code }) => code), ['device_lost'])
  assert.equal(seen.info.backend, 'cpu')
  assert.equal(seen.info.backendReason.code, 'device_lost')
  return seen
}

/** Loads a model for which a GPU is taken unasked, on one that `script` spoils. */
async function distrusts(code, script, ...args) {
  serveAsPackage('wide', wideTales())
  const prompt = 'Once upon a time'
  const want = nativeIds(wideTales(), prompt, 6)
  const page = await openWithGpu()
  inWorker(`(...args) => {
    // Browsers say only by its name that an adapter is software.
    Object.defineProperty(GPUAdapter.prototype, 'info', { get: () => ({ vendor: 'some', architecture: 'hardware', device: '', description: '' }) })
    ;(${script})(...args)
  }`, ...args)
  const { info, ids, ms } = await page.evaluate(async prompt => {
    const started = performance.now()
    const model = await Sterna.load('./wide/')
    const ms = performance.now() - started
    const { ids } = await tokensOf(model, prompt, 6)
    await model.dispose()
    return { info: model.info, ids, ms }
  }, prompt)
  console.log(`  ${JSON.stringify(info.backendReason ?? info.adapter)}, loaded in ${Math.round(ms)} ms`)
  assert.equal(info.backend, 'cpu')
  assert.equal(info.backendReason.code, code)
  assert.deepEqual(ids, want)
  return info.backendReason.message
}

/** Alters what shaders say. */
const alter = (from, to) => {
  const { createShaderModule } = GPUDevice.prototype
  GPUDevice.prototype.createShaderModule = function (descriptor) {
    return createShaderModule.call(this, { ...descriptor, code: descriptor.code.replaceAll(from, to) })
  }
}
/** What is altered, into what, and what the refusal names. */
const KERNELS = {
  'a matrix product': ['(value.x, old.x + value.x', '(1.5 * value.x, old.x + value.x', 'product'],
  'quantization': ['bitcast<u32>(scale)', 'bitcast<u32>(1.5 * scale)', 'product'],
  'an embedding': ['params.factor * values', '1.5 * params.factor * values', 'embedding'],
  'a norm': ['* inverse * factor', '* inverse', 'norms'],
  'an activation': ['gated(x[i], y[other])', 'gated(x[i], 1.0)', 'activations'],
  'a norm within quantization': ['v * inverse * weight[i]', 'v * weight[i]', 'feed-forward'],
  'a residual within a product': ['select(value.x, old.x + value.x, EPILOGUE == 1u)', 'value.x', 'feed-forward'],
  'a gate within a product': ['gated(value.x, value.y)', 'gated(value.x, 1.0)', 'feed-forward'],
  'attention of a prompt': ['sums[c][r] * shrink / total', 'sums[c][r]', 'attention of a prompt'],
  'attention of a token': ['all.x / all.y', 'all.x', 'attention of a token'],
}

/** The others take longer to be found. */
const QUICK = ['a matrix product', 'quantization', 'a norm', 'an activation', 'a residual within a product']
const planted = Object.entries(KERNELS).filter(([name]) => all || QUICK.includes(name))

export const tests = {
  async 'a GPU that is lost in mid-answer leaves the rest to the CPU'() {
    await fails(() => {
      const { requestDevice } = GPUAdapter.prototype
      const devices = []
      GPUAdapter.prototype.requestDevice = async function (...args) {
        devices.push(await requestDevice.apply(this, args))
        return devices.at(-1)
      }
      new BroadcastChannel('test').onmessage = () => { for (const device of devices) device.destroy() }
    })
  },

  // The same from there on.
  ...all && {
    async 'a GPU that hangs in mid-answer leaves the rest to the CPU'() {
      const { ms } = await fails(() => {
        const { mapAsync } = GPUBuffer.prototype
        const { setTimeout } = globalThis
        let hangs = false
        GPUBuffer.prototype.mapAsync = function (...args) { return hangs ? new Promise(() => {}) : mapAsync.apply(this, args) }
        // Its minute is two seconds long.
        globalThis.setTimeout = (then, ms, ...args) => setTimeout(then, hangs && ms === 60_000 ? 2000 : ms, ...args)
        new BroadcastChannel('test').onmessage = () => { hangs = true }
      })
      assert.ok(ms < 30_000, `${ms} ms`)
    },
  },

  async 'a GPU that hangs when it is tried isn\'t taken'() {
    await distrusts('device_lost', () => {
      const { setTimeout } = globalThis
      GPUBuffer.prototype.mapAsync = () => new Promise(() => {})
      globalThis.setTimeout = (then, ms, ...args) => setTimeout(then, ms === 60_000 ? 2000 : ms, ...args)
    })
  },

  async 'a GPU that can\'t be opened isn\'t taken'() {
    await distrusts('no_adapter', () => {
      GPUAdapter.prototype.requestDevice = async () => { throw new DOMException('planted', 'OperationError') }
    })
  },

  ...Object.fromEntries(planted.map(([name, [from, to, says]]) => [`a GPU that computes ${name} wrongly isn't taken`, async () => {
    const message = await distrusts('wrong_results', alter, from, to)
    assert.ok(message.includes(says), message)
  }])),
}
