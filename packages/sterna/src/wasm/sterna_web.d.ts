// The module that wasm-bindgen writes; the build copies it to `dist/wasm`.
export * from '../engine.js'
export { default } from '../engine.js'
