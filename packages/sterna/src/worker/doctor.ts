/** What this browser offers. */
import { SternaError } from '../error.js'
import type { Doctor, Notice } from '../types.js'
import { haveRelaxedSimd, haveSimd, haveThreads, type Engine } from './engine.js'
import { usage } from './library.js'
import { haveLocks } from './locks.js'
import { openStore } from './store.js'

export async function doctor(engine: () => Promise<Engine>): Promise<Doctor> {
  const [webgpu, storage, loaded] = await Promise.all([
    inspectGpu(), inspectStorage(),
    engine().catch((error: unknown): Notice => {
      const { code, message } = SternaError.from(error)
      return { code, message }
    }),
  ])
  const { hardwareConcurrency = 1, deviceMemory } = navigator as { hardwareConcurrency?: number; deviceMemory?: number }
  return {
    ...('version' in loaded ? { version: loaded.version() } : {}),
    engine: 'code' in loaded
      ? { ok: false, error: loaded, build: buildOf(haveThreads(), haveRelaxedSimd()) }
      : { ok: true, build: buildOf(loaded.threads > 1, loaded.relaxedSimd) },
    simd: haveSimd(),
    relaxedSimd: haveRelaxedSimd(),
    crossOriginIsolated: globalThis.crossOriginIsolated === true,
    cores: hardwareConcurrency,
    ...(deviceMemory === undefined ? {} : { deviceMemory }),
    webgpu,
    storage,
  }
}

const buildOf = (threads: boolean, relaxed: boolean) =>
  threads ? relaxed ? 'threadsRelaxed' : 'threads' : relaxed ? 'relaxed' : 'plain'

async function inspectGpu(): Promise<Doctor['webgpu']> {
  const none = (code: string, message: string) => ({ ok: false, reason: { code, message }, features: [], limits: {} })
  if (!navigator.gpu) return none('no_webgpu', 'This browser has no WebGPU, or not on pages without https.')
  const adapter = await navigator.gpu.requestAdapter().catch(() => null)
  if (!adapter) return none('no_adapter', 'WebGPU found no GPU that it may use.')
  const limits: Record<string, number> = {}
  for (const name of ['maxBufferSize', 'maxStorageBufferBindingSize', 'maxComputeWorkgroupStorageSize', 'maxComputeInvocationsPerWorkgroup'] as const) {
    limits[name] = adapter.limits[name]
  }
  return {
    ok: true, adapter: nameOf(adapter),
    features: [...adapter.features].sort(), limits,
  }
}

function nameOf({ info: { vendor, architecture, device, description } }: GPUAdapter): string {
  return [vendor, architecture, device, description].filter(Boolean).join(' ')
}

async function inspectStorage(): Promise<Doctor['storage']> {
  const has = async (kind: 'opfs' | 'indexeddb') => (await openStore(kind).catch(() => undefined)) !== undefined
  const [opfs, indexeddb] = [await has('opfs'), await has('indexeddb')]
  return {
    ...await usage(), opfs: typeof navigator.storage?.getDirectory === 'function', syncAccess: opfs,
    sharedReads: opfs && await hasSharedReads(), indexeddb, locks: haveLocks(),
  }
}

/** Whether several tabs can have a synchronous handle of one file. */
async function hasSharedReads(): Promise<boolean> {
  const root = await navigator.storage.getDirectory()
  const name = `.sterna-doctor-${Math.random().toString(36).slice(2)}`
  const file = await root.getFileHandle(name, { create: true })
  try {
    const { createSyncAccessHandle } = file as unknown as { createSyncAccessHandle(options: { mode: string }): Promise<{ mode?: string; close(): void }> }
    const handle = await createSyncAccessHandle.call(file, { mode: 'read-only' })
    handle.close()
    return handle.mode === 'read-only'
  } catch {
    return false
  } finally {
    await root.removeEntry(name)
  }
}
