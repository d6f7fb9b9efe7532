// What `crates/constraint-web` exports through wasm-bindgen: a module apart from the engine, loaded with the first schema.
// Every method may throw an `EngineFailure`.
import type { Constraint as Allowing } from './engine.js'

/** The tokens of a model. */
export class Vocabulary {
  /** As `Model.vocabulary` gives them. */
  constructor(bytes: Uint8Array, ends: Uint32Array)
  /** Output that matches a grammar. */
  constraint(kind: 'schema' | 'regex' | 'grammar', text: string): Constraint
  free(): void
}
export class Constraint implements Allowing {
  private constructor()
  allowed(): Uint32Array
  accept(id: number): void
  free(): void
}
/** wasm-bindgen's initialiser. */
export default function init(options?: { module_or_path: string | URL | WebAssembly.Module }): Promise<unknown>
