// navigator.locks for Node.js, as far as the package uses it.
const queues = new Map()
export const locks = {
  request(name, options, callback) {
    const queue = queues.get(name) ?? { held: [], waiting: [] }
    queues.set(name, queue)
    const { mode = 'exclusive', ifAvailable = false, signal } = options
    return new Promise((resolve, reject) => {
      const wish = { mode, grant() {
        const holder = { mode }
        queue.held.push(holder)
        Promise.resolve(callback({ name, mode })).then(resolve, reject).finally(() => {
          queue.held.splice(queue.held.indexOf(holder), 1)
          pump(queue)
        })
      } }
      if (signal?.aborted) return reject(signal.reason)
      if (ifAvailable && (queue.waiting.length || !free(queue, mode))) return resolve(callback(null))
      queue.waiting.push(wish)
      signal?.addEventListener('abort', () => {
        const at = queue.waiting.indexOf(wish)
        if (at >= 0) queue.waiting.splice(at, 1), reject(signal.reason)
      })
      pump(queue)
    })
  },
}
const free = (queue, mode) => mode === 'shared' ? queue.held.every(holder => holder.mode === 'shared') : queue.held.length === 0
function pump(queue) {
  while (queue.waiting.length && free(queue, queue.waiting[0].mode)) queue.waiting.shift().grant()
}
