/**
 * `<sterna-tldr>` sums up the page that it is on, or what is selected there, by a model in the browser.
 *
 *     <script type="module" src="https://host/tldr/sterna-tldr.js"></script>
 *     <sterna-tldr model="https://host/model/"></sterna-tldr>
 *
 * Attributes: `model` (as default the first of the script's host, from its /models.json), `lang` (of the summary;
 * as default the page's), `max-tokens` (160), `from` (a selector of the text). Until it is pressed it loads nothing.
 */
/** @typedef {import('../../packages/sterna/dist/index.js').Model} Model */

const ASK_FROM = 5e6 // Bytes of a download that is not begun without asking.
const IDLE_MS = 5 * 60_000 // After which an unused model gives its memory back.
const TEXT = 'h1, h2, h3, p, li, blockquote, dd, figcaption, pre'
const NOT_TEXT = 'nav, aside, footer, form, [hidden], [aria-hidden=true], sterna-tldr'

const STYLE = `
:host { display: block; font: 1rem/1.55 var(--sterna-font, inherit); text-align: start;
  --a: var(--sterna-accent, light-dark(#0a6075, #74cbe0)); --ai: var(--sterna-accent-text, light-dark(#fff, #06222b));
  --b: var(--sterna-background, light-dark(#f3f6f7, #151e24)); --f: var(--sterna-text, light-dark(#14212a, #e7eef2));
  --s: var(--sterna-soft, light-dark(#4b5b67, #a2b3bf)); --l: var(--sterna-line, light-dark(#cfd8dd, #2e3b45)); --r: var(--sterna-radius, .875rem) }
:host([hidden]), [hidden] { display: none !important }
:host([theme=light]) { color-scheme: light } :host([theme=dark]) { color-scheme: dark }
section { padding: .875rem 1rem; border: 1px solid var(--l); border-radius: var(--r); background: var(--b); color: var(--f) }
.bar { display: flex; flex-wrap: wrap; align-items: center; gap: .5rem .75rem }
button { font: inherit; font-weight: 600; min-height: 2.5rem; padding: .25rem 1rem; border: 1px solid var(--l); border-radius: calc(var(--r) * .75); background: none; color: var(--f); cursor: pointer }
button.main { border-color: transparent; background: var(--a); color: var(--ai) }
.status:empty { flex: none }
button:hover { filter: brightness(1.08) } :focus-visible { outline: 2px solid var(--a); outline-offset: 2px }
.status, .note { color: var(--s); font-size: .875rem } .status { flex: 1 1 8rem; font-variant-numeric: tabular-nums }
p { margin: 0 } .summary { white-space: pre-line; overflow-wrap: anywhere } .error { color: light-dark(#b02a1d, #ff9886) }
.summary, .note, progress, ul { margin: .75rem 0 0 } ul { padding-left: 1.25rem }
progress { display: block; width: 100%; height: .375rem; appearance: none; border: 0; border-radius: 1rem; overflow: hidden; background: var(--l) }
progress::-webkit-progress-bar { background: var(--l) } progress::-webkit-progress-value { background: var(--a) } progress::-moz-progress-bar { background: var(--a) }`

/** One model for all elements of a page. @type {Map<string, Promise<Model>>} */
const models = new Map()
/** @type {Map<string, ReturnType<typeof setTimeout>>} */
const idle = new Map()

/** @param {number} n */
const bytes = n => n < 1e6 ? `${Math.ceil(n / 1e3)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} MB` : `${(n / 1e9).toFixed(1)} GB`
/** @param {string} tag @param {Record<string, string>} attributes @param {...(Node | string)} children */
function make(tag, attributes, ...children) {
  const node = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value)
  node.append(...children)
  return node
}

/** The default model's address, for use without a network. @param {string} [address] */
function remembered(address) {
  try { if (address) localStorage.setItem('sterna-tldr.model', address); else address = localStorage.getItem('sterna-tldr.model') ?? undefined } catch { /* Blocked. */ }
  return address
}
/** What English calls a language. @param {string} lang */
function languageName(lang) {
  try { return new Intl.DisplayNames(['en'], { type: 'language' }).of(lang) } catch { return 'the language of the text' }
}

/** The text of a page without what surrounds it. @param {string | null} from @param {Element} widget */
export function mainText(from, widget) {
  const root = (from && document.querySelector(from)) || widget.closest('article, main') || document.querySelector('article, main, [role=main]') || document.body
  const texts = [...root.querySelectorAll(TEXT)]
    .filter(node => !node.closest(NOT_TEXT) && !node.parentElement?.closest(TEXT) && node.checkVisibility?.() !== false)
    .map(node => (node.textContent ?? '').replace(/\s+/g, ' ').trim()).filter(Boolean)
  const found = texts.join('\n\n')
  return found.length > 200 || !(root instanceof HTMLElement) ? found : root.innerText.trim()
}

/** The sentences whose words are the most frequent, in their order: for models that can't sum up. @param {string} text @param {number} most */
export function keySentences(text, most = 3) {
  const words = (/** @type {string} */ of) => of.toLowerCase().match(/\p{L}{4,}/gu) ?? []
  /** @type {Map<string, number>} */
  const counts = new Map()
  for (const word of words(text)) counts.set(word, (counts.get(word) ?? 0) + 1)
  const sentences = text.split(/(?<=[.!?])\s+|\n+/).map(sentence => sentence.trim()).filter(sentence => /[.!?]$/.test(sentence) && words(sentence).length > 3)
  const score = (/** @type {string} */ sentence) => words(sentence).reduce((sum, word) => sum + (counts.get(word) ?? 0) - 1, 0) / (words(sentence).length + 3)
  const best = new Set([...sentences].sort((a, b) => score(b) - score(a)).slice(0, most))
  return sentences.filter(sentence => best.delete(sentence))
}

export class SternaTldr extends HTMLElement {
  static observedAttributes = ['model']
  #main = make('button', { type: 'button', class: 'main', part: 'button' })
  #second = make('button', { type: 'button', part: 'button', hidden: '' }, 'Not now')
  #status = make('span', { class: 'status', part: 'status', role: 'status' })
  #bar = /** @type {HTMLProgressElement} */ (make('progress', { part: 'progress', max: '1', value: '0', 'aria-label': 'Loading the model', hidden: '' }))
  #summary = make('p', { class: 'summary', part: 'summary', 'aria-live': 'polite', hidden: '' })
  #note = make('p', { class: 'note', part: 'note', hidden: '' })
  #keys = make('ul', { part: 'sentences', hidden: '' })
  /** @type {'idle' | 'ask' | 'busy'} */
  #state = 'idle'
  #abort = new AbortController()
  #watch = () => { if (this.#state === 'idle') this.#label() }

  constructor() {
    super()
    const root = this.attachShadow({ mode: 'open' })
    const sheet = new CSSStyleSheet()
    sheet.replaceSync(STYLE)
    root.adoptedStyleSheets = [sheet]
    root.append(make('section', { 'aria-label': 'Summary', part: 'panel', lang: 'en' }, make('div', { class: 'bar' }, this.#main, this.#second, this.#status), this.#bar, this.#summary, this.#note, this.#keys))
    // A press must not lose the selection; the focus comes with the click.
    this.#main.onpointerdown = event => event.preventDefault()
    this.#main.onclick = () => { this.#main.focus(); return this.#state === 'busy' ? this.#abort.abort() : void this.sumUp(this.#state === 'ask') }
    this.#second.onclick = () => { this.#set('idle'); this.#say(''); this.#main.focus() }
    root.addEventListener('keydown', event => { if (/** @type {KeyboardEvent} */ (event).key === 'Escape') this.#abort.abort() })
  }

  connectedCallback() { document.addEventListener('selectionchange', this.#watch); this.#label() }
  disconnectedCallback() { document.removeEventListener('selectionchange', this.#watch); this.#abort.abort() }
  attributeChangedCallback() { this.#abort.abort() }

  /** What is selected, if it is worth summing up. */
  get #selected() { return document.getSelection()?.toString().trim().match(/^[^]{40,}/)?.[0] ?? '' }
  #label() { this.#main.textContent = { idle: this.#selected ? 'Sum up the selection' : 'Sum up this page', ask: 'Download', busy: 'Stop' }[this.#state] }
  /** @param {'idle' | 'ask' | 'busy'} state */
  #set(state) {
    this.#state = state
    this.#second.hidden = state !== 'ask'
    this.#bar.hidden = true
    this.#label()
  }
  #say(text = '', error = false) { this.#status.textContent = text; this.#status.classList.toggle('error', error) }
  /** @param {HTMLElement} node @param {string} text */
  #show(node, text) { node.textContent = text; node.hidden = !text }

  async #address() {
    const given = this.getAttribute('model')
    if (given) return given
    const at = new URL('/models.json', import.meta.url)
    const [first] = await fetch(at).then(response => response.json()).catch(() => [])
    const known = remembered(first && new URL(first.address, at).href)
    if (!known) throw new Error('No model is named: set the attribute “model”.')
    return known
  }

  /** @param {string} address @param {AbortSignal} signal @param {boolean} agreed @returns {Promise<Model | undefined>} */
  async #load(address, signal, agreed) {
    const { Sterna } = await import('./sterna.js')
    clearTimeout(idle.get(address))
    if (models.has(address)) return models.get(address)
    const plan = await Sterna.plan(address, { signal })
    if (!plan.fits) throw new Error(`This model needs ${bytes(plan.missingBytes)} of storage and ${bytes(plan.memoryBytes)} of memory, more than this browser has.`)
    if (plan.missingBytes > ASK_FROM && !agreed) {
      this.#say(`The model is downloaded once: ${bytes(plan.missingBytes)}, and takes about ${bytes(plan.memoryBytes)} of memory. It then works offline, and the text stays on this device.`)
      return void this.#set('ask')
    }
    const loading = Sterna.load(address, {
      signal,
      onProgress: ({ phase, doneBytes, totalBytes }) => {
        this.#bar.hidden = false
        this.#bar.value = doneBytes / Math.max(1, totalBytes)
        this.#say(phase === 'load' ? 'Loading the model' : `Downloading the model, ${bytes(doneBytes)} of ${bytes(totalBytes)}`)
      },
    })
    models.set(address, loading)
    loading.catch(() => models.delete(address))
    return loading
  }

  /** Sums up the selection, or the page. @param {boolean} agreed to a large download */
  async sumUp(agreed = false) {
    const text = this.#selected || mainText(this.getAttribute('from'), this)
    if (!text) return this.#say('There is no text to sum up.')
    const { signal } = this.#abort = new AbortController()
    this.#set('busy')
    this.#say('Starting')
    for (const node of [this.#summary, this.#note, this.#keys]) this.#show(node, '')
    let address = ''
    try {
      address = await this.#address()
      const model = await this.#load(address, signal, agreed)
      if (!model) return
      this.#bar.hidden = true
      await (model.info.hasTemplate ? this.#answer(model, text, signal) : this.#continue(model, text, signal))
      this.#say('')
    } catch (error) {
      const { name, message } = /** @type {Error} */ (error)
      if (name === 'AbortError' || signal.aborted) this.#say('Stopped.')
      else {
        this.#say(message, true)
        // Another try begins anew.
        models.get(address)?.then(model => model.dispose(), () => {})
        models.delete(address)
      }
    } finally {
      this.#summary.removeAttribute('aria-busy')
      if (this.#state === 'busy') this.#set('idle')
      if (models.has(address)) idle.set(address, setTimeout(() => { models.get(address)?.then(model => model.dispose(), () => {}); models.delete(address) }, IDLE_MS))
    }
  }

  get #maxTokens() { return Math.max(8, Number(this.getAttribute('max-tokens')) || 160) }

  /** By a model that follows instructions: in parts, if the text is longer than its context. @param {Model} model @param {string} text @param {AbortSignal} signal */
  async #answer(model, text, signal) {
    const lang = this.lang || this.closest('[lang]')?.getAttribute('lang') || document.documentElement.lang || navigator.language
    const ask = (/** @type {string} */ of) => model.generate([{ role: 'user', content: `Sum up the following text in two or three short sentences in ${languageName(lang)}. Write the summary only.\n\n${of}` }], { signal, maxTokens: this.#maxTokens, temperature: 0.2, repeatPenalty: 1.1 })
    let parts = await this.#parts(model, text, model.info.contextLength - this.#maxTokens - 80)
    while (parts.length > 1) {
      const summaries = []
      for (const [i, part] of parts.entries()) {
        this.#say(`Reading part ${i + 1} of ${parts.length}`)
        summaries.push(await ask(part).text())
      }
      const next = await this.#parts(model, summaries.join('\n\n'), model.info.contextLength - this.#maxTokens - 80)
      parts = next.length < parts.length ? next : next.slice(0, 1)
    }
    this.#summary.lang = lang
    await this.#stream(ask(parts[0] ?? ''))
    if (model.info.parameters < 1e8) this.#show(this.#note, 'This model is very small: check what it says.')
  }

  /** By a model that only goes on with a text: a tale, and the page's own sentences. @param {Model} model @param {string} text @param {AbortSignal} signal */
  async #continue(model, text, signal) {
    const sentences = keySentences(text)
    const maxTokens = Math.min(this.#maxTokens, model.info.contextLength >> 1)
    const [head = ''] = await this.#parts(model, text, model.info.contextLength - maxTokens - 8)
    this.#show(this.#note, 'This model tells tales and was not taught to sum up. It goes on with the text; below are the text’s own key sentences.')
    this.#keys.replaceChildren(...sentences.map(sentence => make('li', {}, sentence)))
    this.#keys.hidden = !sentences.length
    await this.#stream(model.generate(`${head}\n\n`, { signal, maxTokens, temperature: 0.3, repeatPenalty: 1.1 }))
  }

  /** @param {AsyncIterable<string>} generation */
  async #stream(generation) {
    let text = ''
    this.#summary.setAttribute('aria-busy', 'true')
    this.#say('Writing')
    for await (const piece of generation) this.#show(this.#summary, (text += piece).trimStart())
    if (!text.trim()) this.#show(this.#summary, 'The model had nothing to say.')
  }

  /** Cuts a text between paragraphs or sentences into parts of at most so many tokens. @param {Model} model @param {string} text @param {number} most */
  async #parts(model, text, most) {
    const tokens = (await model.tokenize(text)).length
    if (tokens <= most) return [text]
    const size = Math.max(40, Math.floor(text.length / tokens * Math.max(16, most) * 0.85))
    const parts = []
    for (let rest = text; rest;) {
      const cut = rest.length <= size ? size : Math.max(rest.lastIndexOf('\n', size), rest.lastIndexOf('. ', size) + 1) || size
      parts.push(rest.slice(0, cut).trim())
      rest = rest.slice(cut).trim()
    }
    return parts
  }
}

if (!customElements.get('sterna-tldr')) customElements.define('sterna-tldr', SternaTldr)
