// The one place that says where the package is. `sterna serve` answers this file with its own address;
// with a bundler it would be `export { Sterna } from 'sterna'`.
export { Sterna } from '../../packages/sterna/dist/index.js'
