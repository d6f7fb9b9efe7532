/** The names of 0xBitNet, whose architecture is one of the source documents: `BitNet.load` and what goes with it. */
import { SternaError } from './error.js'
import type { Model } from './model.js'
import { Sterna } from './sterna.js'
import type { GenerateOptions, LoadOptions as SternaLoadOptions, Message as ChatMessage, ModelInfo, Source } from './types.js'

export type { ChatMessage }

export interface LoadProgress {
  phase: 'download' | 'parse' | 'upload'
  loaded: number
  total: number
  /** 0 to 1. */
  fraction: number
}
export interface LoadOptions extends Omit<SternaLoadOptions, 'onProgress' | 'device'> {
  onProgress?: (progress: LoadProgress) => void
}
export interface BitNetGenerateOptions extends GenerateOptions {
  onToken?: (token: string) => void
}

/** A model on the GPU, or on the CPU where no GPU computes it correctly. */
export class BitNet {
  /** @internal */
  private constructor(readonly model: Model) {}

  static async load(source: Source, { onProgress, ...options }: LoadOptions = {}): Promise<BitNet> {
    return new BitNet(await Sterna.load(source, {
      ...options,
      ...(onProgress ? {
        onProgress: ({ phase, doneBytes, totalBytes }) => onProgress({
          phase: phase === 'load' ? 'upload' : 'download', loaded: doneBytes, total: totalBytes, fraction: totalBytes ? doneBytes / totalBytes : 1,
        }),
      } : {}),
    }))
  }

  get info(): ModelInfo { return this.model.info }

  /** The answer's text in pieces. As default 256 tokens, temperature 1, the 50 most probable. */
  async *generate(prompt: string | ChatMessage[], { onToken, ...options }: BitNetGenerateOptions = {}): AsyncGenerator<string, void, undefined> {
    for await (const token of this.model.generate(prompt, { maxTokens: 256, temperature: 1, topK: 50, ...options })) {
      onToken?.(token)
      yield token
    }
  }

  dispose(): void { void this.model.dispose() }
}

/** Addresses of the stored models. */
export async function listCachedModels(): Promise<string[]> {
  return (await Sterna.models.list()).map(({ source }) => source)
}

export async function deleteCachedModel(url: string | URL): Promise<void> {
  await Sterna.models.remove(url)
}

/** Why there is no GPU. */
export class GPUDeviceError extends Error {
  override name = 'GPUDeviceError'
}

/** Opens a device of the page's own; models have theirs in their Workers. Throws `GPUDeviceError`. */
export async function initGPU(existingDevice?: GPUDevice): Promise<{ device: GPUDevice; adapter: GPUAdapter | null; limits: GPUSupportedLimits }> {
  if (existingDevice) return { device: existingDevice, adapter: null, limits: existingDevice.limits }
  const adapter = await globalThis.navigator?.gpu?.requestAdapter({ powerPreference: 'high-performance' })
  if (!adapter) throw new GPUDeviceError(globalThis.navigator?.gpu ? 'No GPU adapter.' : 'This browser has no WebGPU.')
  const { maxBufferSize, maxStorageBufferBindingSize } = adapter.limits
  try {
    const device = await adapter.requestDevice({ requiredLimits: { maxBufferSize, maxStorageBufferBindingSize } })
    return { device, adapter, limits: device.limits }
  } catch (error) {
    throw new GPUDeviceError((error as Error).message)
  }
}

export { SternaError }
