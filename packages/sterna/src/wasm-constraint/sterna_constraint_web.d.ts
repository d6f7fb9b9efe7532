// The module that wasm-bindgen writes; the build copies it to `dist/wasm-constraint`.
export * from '../constraint.js'
export { default } from '../constraint.js'
