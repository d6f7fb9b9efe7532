/** Tells the engine in time that its GPU is lost, or hangs. */

/** A device that keeps results waiting for so long counts as lost, as in native programs. */
const HUNG_MS = 60_000
/** How long the news of a loss may take. */
const NEWS_MS = 1000

let watching = false

/**
 * From now on a device whose buffer can't be read in time is destroyed, and an engine hears of the loss of a
 * device before it hears that a buffer can't be read: browsers tell it the other way round, and the engine,
 * which waits for the buffer, would take it for something else.
 */
export function watchGpu(): void {
  if (watching || !globalThis.GPUDevice) return
  watching = true
  const devices = new WeakMap<GPUBuffer, GPUDevice>()
  const { createBuffer } = GPUDevice.prototype
  const { mapAsync } = GPUBuffer.prototype
  GPUDevice.prototype.createBuffer = function (descriptor) {
    const buffer = createBuffer.call(this, descriptor)
    devices.set(buffer, this)
    return buffer
  }
  GPUBuffer.prototype.mapAsync = async function (...args) {
    let timer: ReturnType<typeof setTimeout> | undefined
    const hung = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        devices.get(this)?.destroy()
        reject(new Error(`The GPU gave no result for ${HUNG_MS / 1000} seconds.`))
      }, HUNG_MS)
    })
    try {
      return await Promise.race([mapAsync.apply(this, args), hung])
    } catch (error) {
      await Promise.race([devices.get(this)?.lost, new Promise(resolve => setTimeout(resolve, NEWS_MS))])
      throw error
    } finally {
      clearTimeout(timer)
    }
  }
}
