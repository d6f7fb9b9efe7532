// What files may weigh in brotli. The engine is measured as it is published, unless QUICK_ENGINE says that it was built
// for tests (build-web.sh --dev), which optimises nothing across crates.
const quick = process.env.QUICK_ENGINE !== undefined

export default [
  { name: 'page: the main entry', path: 'dist/!(ai-sdk|bitnet|doppler|rtc|share|take).js', limit: '13.5 KB' },
  { name: 'tabs that share, once they are asked for', path: 'dist/{rtc,share,take}.js', limit: '7 KB' },
  { name: 'Worker', path: ['dist/worker/*.js', 'dist/wasm/*.js', 'dist/{error,rpc}.js'], limit: '33 KB' },
  { name: 'engine', path: 'dist/wasm/sterna_web_bg.wasm', limit: quick ? '1.6 MB' : '1.2 MB' },
  { name: 'schemas', path: 'dist/wasm-constraint/*.{js,wasm}', limit: '400 KB' },
]
