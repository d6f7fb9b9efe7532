// The one place that says where the package is. Where it is hosted, the package is in a folder of this one,
// `export { Sterna } from './sterna/index.js'`, so that this page's service worker brings its Workers, too.
export { Sterna } from '../../packages/sterna/dist/index.js'
