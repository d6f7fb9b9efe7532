/** Sources as the page names them, to sources that can be posted to the Worker. */
import { SternaError } from './error.js'
import type { Source, SourceOptions, WireSourceOptions } from './types.js'

/** What the ids of stored models look like. */
const ID = /^[\w.-]+-[0-9a-f]{16}$/

export function wireSource(source: Source, options: SourceOptions = {}): WireSourceOptions {
  const { store = 'auto', verify = 'sample', mirrors = [], file, bytesPerSecond, trust } = options
  return {
    source: postable(source, mirrors), store, verify,
    ...(file === undefined ? {} : { file }), ...(bytesPerSecond === undefined ? {} : { bytesPerSecond }),
    ...(trust === undefined ? {} : { trust }),
  }
}

function postable(source: Source, mirrors: (string | URL)[]): WireSourceOptions['source'] {
  if (typeof source === 'string' && ID.test(source)) return { kind: 'stored', id: source }
  if (typeof source === 'string' || source instanceof URL) return { kind: 'address', addresses: [source, ...mirrors].map(addressOf) }
  if (source instanceof Blob) return { kind: 'files', files: [source as File] }
  if (Array.isArray(source)) return { kind: 'files', files: [...source as File[]] }
  if ((source as FileSystemDirectoryHandle).kind === 'directory') return { kind: 'folder', handle: source as FileSystemDirectoryHandle }
  throw new SternaError('invalid_request', 'A source is an address, the id of a stored model, a File, an array of Files, or a directory handle.')
}

/** The full address of a model, as `Source` describes; folders end in a slash. Throws `invalid_request`. */
export function addressOf(source: string | URL): string {
  const text = String(source)
  if (/^[\w-][\w.-]*\/[\w.-]+$/.test(text) && !/(\.gguf|\/manifest\.json)$/i.test(text)) return `https://huggingface.co/${text}`
  let url: URL
  try {
    url = new URL(text, globalThis.document?.baseURI ?? globalThis.location?.href)
  } catch {
    throw new SternaError('invalid_request', `${text} is no address.`)
  }
  url.hash = ''
  if (/^(www\.)?(huggingface\.co|hf\.co)$/.test(url.hostname)) url.pathname = url.pathname.replace(/\/$/, '')
  else if (!/\.(gguf|json|safetensors)$/i.test(url.pathname)) url.pathname = url.pathname.replace(/\/?$/, '/')
  else url.pathname = url.pathname.replace(/\/manifest\.json$/, '/')
  return url.href
}
