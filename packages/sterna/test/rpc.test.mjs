import assert from 'node:assert/strict'
import { test } from 'node:test'
import { SternaError } from '../dist/error.js'
import { Remote, serve } from '../dist/rpc.js'

function pair(handlers) {
  const { port1, port2 } = new MessageChannel()
  serve(port2, handlers)
  return { remote: new Remote(port1), close: () => port1.close() }
}

test('values, items and errors arrive', async () => {
  const { remote, close } = pair({
    add: ([a, b]) => a + b,
    count: (n, { emit }) => { for (let i = 0; i < n; i++) emit(i); return 'done' },
    fail: () => { throw Object.assign(new Error('too long'), { code: 'context_full' }) },
    odd: () => { throw 'text' },
  })
  assert.equal(await remote.call('add', [1, 2]), 3)
  const items = []
  assert.equal(await remote.call('count', 3, { onItem: item => items.push(item) }), 'done')
  assert.deepEqual(items, [0, 1, 2])
  await assert.rejects(remote.call('fail'), error => error instanceof SternaError && error.code === 'context_full' && error.message === 'too long')
  await assert.rejects(remote.call('odd'), { code: 'io', message: 'text' })
  await assert.rejects(remote.call('nothing'), { code: 'invalid_request' })
  await assert.rejects(remote.call('add', () => {}), { code: 'invalid_request' })
  close()
})

test('arrays are transferred', async () => {
  let kept
  const { remote, close } = pair({ make: () => kept = new Float32Array([1, 2]) })
  assert.deepEqual([...await remote.call('make')], [1, 2])
  assert.equal(kept.length, 0)
  close()
})

test('an aborted signal ends the call and the handler', async () => {
  let stopped
  const { remote, close } = pair({
    wait: (_, { signal }) => new Promise(resolve => signal.addEventListener('abort', () => { stopped = true; resolve() })),
    ping: () => 'pong',
  })
  const controller = new AbortController()
  const call = remote.call('wait', null, { signal: controller.signal })
  controller.abort('enough')
  await assert.rejects(call, error => error.code === 'cancelled' && error.name === 'AbortError' && error.cause === 'enough')
  assert.equal(await remote.call('ping'), 'pong')
  assert.ok(stopped)
  await assert.rejects(remote.call('ping', null, { signal: controller.signal }), { code: 'cancelled' })
  close()
})

test('a Worker that ends fails all calls', async () => {
  const { remote, close } = pair({ wait: () => new Promise(() => {}) })
  const call = remote.call('wait')
  remote.fail(new SternaError('worker_failed', 'gone'))
  await assert.rejects(call, { code: 'worker_failed' })
  await assert.rejects(remote.call('wait'), { code: 'worker_failed' })
  close()
})

test('thrown values become SternaErrors', () => {
  assert.equal(SternaError.from(new DOMException('full', 'QuotaExceededError')).code, 'quota')
  assert.equal(SternaError.from(new DOMException('stop', 'AbortError')).code, 'cancelled')
  assert.equal(SternaError.from(new RangeError('Array buffer allocation failed')).code, 'out_of_memory')
  assert.equal(SternaError.from(Object.assign(new Error('x'), { code: 'hash_mismatch' })).code, 'hash_mismatch')
  assert.equal(SternaError.from(undefined).message, 'undefined')
})
