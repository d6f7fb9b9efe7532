// The module that wasm-bindgen writes; the build copies it to `dist/wasm-relaxed`.
export * from '../engine.js'
export { default } from '../engine.js'
