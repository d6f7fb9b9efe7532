// The dialog where a model is chosen, its needs are shown, and it is downloaded, started and deleted.
import { $, announce, bytes, duration, h, iconButton, sentence } from './dom.js'
import { served, serverModel, useKey } from './server.js'
import { Sterna } from './sterna.js'

/**
 * @typedef {import('../../packages/sterna/dist/index.js').Model} Model
 * @typedef {import('../../packages/sterna/dist/index.js').Plan} Plan
 * @typedef {import('../../packages/sterna/dist/index.js').Progress} Progress
 * @typedef {import('../../packages/sterna/dist/index.js').Notice} Notice
 * @typedef {{ source: string | File[], name: string, file?: string, isServer?: boolean }} Choice
 * @typedef {'planning' | 'planned' | 'loading' | 'paused' | 'failed'} Step
 * @typedef {Choice & { step: Step, backend: 'auto' | 'cpu' | 'gpu', plan?: Plan, progress?: Progress, error?: unknown, abort: AbortController }} Job
 * @typedef {{ name: string, address: string, size?: number }} Offer
 */

const LAST = 'sterna-chat.model'

/** Whether the page has the package, by which models run in the tab. */
export const runsHere = Sterna !== undefined

/** What the app does with what happens here. */
export const hooks = {
  /** Frees the model in use, before another is loaded. @type {() => Promise<void>} */
  release: async () => {},
  /** @type {(model: Model, choice: Choice) => void} */
  loaded: () => {},
  /** The job went on, or there is none. @type {(text: string | undefined) => void} */
  changed: () => {},
  /** @type {(notice: Notice) => void} */
  notice: () => {},
}

/** The full address of a model, as the package keeps it. @param {string} text */
function addressOf(text) {
  if (/^[\w-][\w.-]*\/[\w.-]+$/.test(text) && !/\.gguf$/i.test(text)) return `https://huggingface.co/${text}`
  const { href } = new URL(text, document.baseURI)
  return /\.gguf$|^https:\/\/huggingface\.co\//i.test(href) ? href.replace(/\/$/, '') : href.replace(/(\/manifest\.json|\/)?$/, '/')
}

/** @type {Job | undefined} */
let job
/** @type {Choice | undefined} the model in use */
let inUse

export async function open() {
  if (!$('picker').open) $('picker').showModal()
  draw()
  await refresh()
}

/** The server's own models. @type {Promise<Offer[]>} */
export const offers = fetch('/models.json')
  .then(async response => response.ok ? (await response.json()).map((/** @type {Offer} */ offer) => ({ ...offer, address: new URL(offer.address, response.url).href })) : [])
  .catch(() => [])

/** Uses the model that the server of this page calls `name`, if there is one. @param {string} name @returns {Promise<boolean>} */
export async function ask(name) {
  const model = (await served()).models.find(({ id }) => id === name)
  if (!model) return false
  await drop()
  await hooks.release()
  inUse = { source: name, name, isServer: true }
  remember(inUse)
  hooks.loaded(serverModel(model), inUse)
  hooks.changed(undefined)
  announce(`${name} is ready`)
  if ($('picker').open) $('picker').close()
  return true
}

/** Starts the model that was used last, if all of it is here; else one of this server, unless the tab was chosen. */
export async function startLast() {
  /** @type {Choice | null} */
  let last = null
  try {
    last = JSON.parse(localStorage.getItem(LAST) ?? 'null')
  } catch {
    // Storage is blocked.
  }
  if (!last || last.isServer) {
    const { models } = await served()
    const model = models.find(({ id }) => id === last?.name) ?? models[0]
    if (model) await ask(model.id)
    return
  }
  const list = runsHere ? await Sterna.models.list().catch(() => []) : []
  if (list.some(({ source, complete }) => complete && source === last.source)) await start(last)
}

/**
 * Asks for the key of this server, and has it answer then.
 * @param {string} [said] why
 * @param {() => void} [then] what was to be done
 * @returns {HTMLElement}
 */
export function keyForm(said = '', then) {
  const input = h('input', { type: 'password', required: true, autocomplete: 'off', spellcheck: 'false', 'aria-label': 'Key of this server', placeholder: 'Key' })
  const remembered = h('input', { type: 'checkbox' })
  const button = h('button', { type: 'submit', class: 'primary' }, 'Use the key')
  const error = h('p', { class: 'error', role: 'alert' }, said)
  const form = h('form', { class: 'key' }, h('div', { class: 'row' }, input, button),
    h('label', { class: 'soft check' }, remembered, 'Remember it in this browser, not in this tab alone'), error)
  form.onsubmit = async (/** @type {Event} */ event) => {
    event.preventDefault()
    error.textContent = ''
    button.disabled = true
    try {
      const [first] = await useKey(input.value.trim(), remembered.checked)
      input.value = ''
      announce('The server takes this key')
      if (then) then()
      else if (first) await ask(first.id)
    } catch (thrown) {
      error.textContent = sentence(thrown)
      input.select()
    }
    button.disabled = false
  }
  return form
}

/** Shows what a model would take. @param {Choice} choice @param {boolean} [quiet] without the dialog */
export async function look(choice, quiet = false) {
  await drop()
  const mine = job = { ...choice, step: 'planning', backend: 'auto', abort: new AbortController() }
  if (!quiet) await open()
  try {
    const plan = await Sterna.plan(choice.source, { ...(choice.file ? { file: choice.file } : {}), signal: mine.abort.signal })
    if (job === mine) set({ plan, step: 'planned' })
  } catch (error) {
    if (job === mine) set({ error, step: 'failed' })
  }
}

/** Downloads what is missing and loads the model. @param {Choice & { plan?: Plan, backend?: Job['backend'] }} choice */
export async function start(choice) {
  const mine = job = { backend: 'auto', ...choice, step: 'loading', abort: new AbortController() }
  set({})
  await hooks.release()
  inUse = undefined
  try {
    const model = await Sterna.load(mine.source, {
      signal: mine.abort.signal, backend: mine.backend, name: mine.name, ...(mine.file ? { file: mine.file } : {}),
      onProgress: progress => { if (job === mine) advance(progress) }, onNotice: notice => hooks.notice(notice),
    })
    if (job !== mine) return void await model.dispose()
    job = undefined
    inUse = { source: mine.source, name: mine.name, ...(mine.file ? { file: mine.file } : {}) }
    if (typeof mine.source === 'string') remember(inUse)
    hooks.loaded(model, inUse)
    hooks.changed(undefined)
    announce(`${mine.name} is ready`)
    if ($('picker').open) $('picker').close()
  } catch (error) {
    if (job !== mine) return
    if (/** @type {Error} */ (error).name === 'AbortError') set({ step: 'paused' })
    else set({ step: 'failed', error })
    if (!$('picker').open) await open()
  }
}

/** @param {Choice} choice */
function remember(choice) {
  try {
    localStorage.setItem(LAST, JSON.stringify(choice))
  } catch {
    // Storage is blocked: it is asked for again.
  }
}

/** Leaves the job; what was downloaded stays. */
async function drop() {
  job?.abort.abort()
  job = undefined
  hooks.changed(undefined)
  draw()
}

/** @param {Partial<Job>} changes */
function set(changes) {
  if (job) Object.assign(job, changes)
  draw()
  hooks.changed(job && { planning: undefined, planned: undefined, loading: `Loading ${percent()}`, paused: `Paused ${percent()}`, failed: undefined }[job.step])
}

/** @param {Progress} progress */
function advance(progress) {
  if (!job) return
  job.progress = progress
  const bar = $('job').querySelector('progress')
  if (!bar) return draw()
  bar.value = share()
  $('job').querySelector('.figures').textContent = figures()
  hooks.changed(`Loading ${percent()}`)
}

const share = () => job?.progress?.totalBytes ? job.progress.doneBytes / job.progress.totalBytes : 0
const percent = () => job?.progress ? `${Math.floor(share() * 100)} %` : ''
function figures() {
  if (!job?.progress) return 'Starting'
  const { phase, doneBytes, totalBytes, bytesPerSecond } = job.progress
  const said = { waiting: 'Another tab downloads it: ', download: '', convert: 'Converting: ', load: 'Loading into memory: ' }[phase]
  const left = bytesPerSecond && phase !== 'load' ? `, ${bytes(bytesPerSecond)}/s, ${duration((totalBytes - doneBytes) / bytesPerSecond)} left` : ''
  return `${said}${bytes(doneBytes)} of ${bytes(totalBytes)}${job.step === 'loading' ? left : ''}`
}

function draw() {
  $('job').hidden = !job
  $('choose').hidden = Boolean(job)
  if (!job) return
  const focused = $('job').contains(document.activeElement) || document.activeElement === document.body
  const { step, plan, error, source, name } = job
  const download = (plan?.missingBytes ?? 0) > 0
  const back = h('button', { type: 'button', onclick: async () => { await drop(); await refresh() } }, 'Other models')
  const primary = (/** @type {string} */ label, /** @type {() => void} */ onclick, disabled = false) => h('button', { type: 'button', class: 'primary', onclick, disabled }, label)
  const go = () => { if (job) void start({ ...job, backend: $('compute')?.value ?? job.backend }) }
  const body = []
  if (step === 'planning') body.push(h('p', { class: 'soft', role: 'status' }, 'Looking at what it takes …'))
  if (plan && (step === 'planned' || step === 'paused')) body.push(needs(plan))
  if (step === 'planned' && plan) {
    if (!plan.fits) body.push(h('p', { class: 'error', role: 'alert' }, refusal(plan)))
    else body.push(h('div', { class: 'compute' }, h('label', { for: 'compute' }, 'Compute on'), h('select', { id: 'compute' },
      h('option', { value: 'auto' }, 'GPU, else CPU'), h('option', { value: 'gpu' }, 'GPU'), h('option', { value: 'cpu' }, 'CPU'))))
    body.push(h('div', { class: 'row end' }, back, primary(download ? 'Download and start' : 'Start', go, !plan.fits)))
  }
  if (step === 'loading' || step === 'paused') {
    body.push(h('progress', { 'aria-label': `Progress of ${name}`, max: 1, value: share() }), h('p', { class: 'figures' }, figures()))
    const file = typeof source !== 'string'
    body.push(h('div', { class: 'row end' }, back, step === 'paused' ? primary('Resume', go) : primary(file ? 'Cancel' : 'Pause', () => job?.abort.abort())))
    if (step === 'paused') body.push(h('p', { class: 'soft', role: 'status' }, 'Paused. What has arrived is kept, also when this tab is closed.'))
  }
  if (step === 'failed') {
    body.push(h('p', { class: 'error', role: 'alert' }, sentence(error)))
    body.push(h('div', { class: 'row end' }, back, primary('Try again', () => { if (job) void (plan ? go() : look(job)) })))
  }
  $('job').replaceChildren(h('h3', { class: 'job-name' }, name), h('p', { class: 'soft address' }, typeof source === 'string' ? [source, job.file].filter(Boolean).join(' · ') : 'From this device'), ...body)
  if (focused && $('picker').open) ($('job').querySelector('.primary:not([disabled])') ?? $('job').querySelector('button'))?.focus()
}

/** The figures of a plan. @param {Plan} plan */
export function needs({ totalBytes, missingBytes, memoryBytes, freeBytes }) {
  const figure = (/** @type {string} */ label, /** @type {string} */ value, /** @type {string} */ more = '') => h('div', {}, h('dt', {}, label), h('dd', {}, value, more && h('small', {}, more)))
  const here = totalBytes - missingBytes
  return h('dl', { class: 'needs' },
    figure('Download', missingBytes ? bytes(missingBytes) : 'nothing', missingBytes && here ? `${bytes(here)} of ${bytes(totalBytes)} are here` : missingBytes ? '' : 'all of it is here'),
    figure('Memory', `about ${bytes(memoryBytes)}`, 'and some for each conversation'),
    figure('Storage', bytes(totalBytes), freeBytes === undefined ? '' : `${bytes(freeBytes)} free`))
}

/** @param {Plan} plan */
const refusal = ({ missingBytes, freeBytes, memoryBytes }) => freeBytes !== undefined && missingBytes > freeBytes
  ? `The browser would store ${bytes(freeBytes)} more, and ${bytes(missingBytes)} are needed. Delete models or free space on the disk.`
  : `A tab can't have the ${bytes(memoryBytes)} of memory that this model needs. A smaller model, or one with fewer bits, would do.`

/** Lists the server's models and those that are stored. */
async function refresh() {
  const kept = runsHere ? Sterna.models : { list: async () => [], usage: async () => undefined }
  const [{ models: answering, wantsKey, error }, offered, list, usage] = await Promise.all([served(), offers, kept.list().catch(() => []), kept.usage().catch(() => undefined)])
  const row = (/** @type {string} */ name, /** @type {string} */ facts, /** @type {Node[]} */ ...buttons) => h('li', {}, h('div', {}, h('strong', {}, name), h('span', { class: 'soft' }, facts)), ...buttons)
  const button = (/** @type {string} */ label, /** @type {string} */ name, /** @type {() => void} */ onclick) => h('button', { type: 'button', 'aria-label': `${label} ${name}`, onclick }, label)
  $('served').hidden = !answering.length && !wantsKey
  $('key-place').replaceChildren(...wantsKey ? [h('p', { class: 'soft' }, 'This server asks for a key.'), keyForm(error ? sentence(error) : '')] : [])
  $('served').querySelector('ul').replaceChildren(...answering.map(({ id }) =>
    row(id, inUse?.isServer && inUse.name === id ? 'in use' : '', button('Ask', id, () => void ask(id)))))
  $('offers').hidden = !offered.length
  $('offers').querySelector('ul').replaceChildren(...offered.map(({ name, address, size }) =>
    row(name, [size ? bytes(size) : '', inUse?.source === address ? 'in use' : ''].filter(Boolean).join(', '), button('Choose', name, () => look({ source: address, name })))))
  $('stored').hidden = !list.length
  $('stored').querySelector('ul').replaceChildren(...list.sort((a, b) => b.usedAt - a.usedAt).map(model => {
    const have = model.complete ? bytes(model.bytes) : `${bytes(model.bytes)}${model.totalBytes ? ` of ${bytes(model.totalBytes)}` : ''}, not complete`
    const bin = iconButton('bin', `Delete ${model.name}`, async () => {
      if (!await confirmed(`Delete ${model.name} from this browser? It would have to be downloaded again.`)) return
      try {
        if (inUse?.source === model.source) await hooks.release(), inUse = undefined
        await Sterna.models.remove(model.id)
        announce(`${model.name} was deleted`)
      } catch (error) {
        $('address-error').textContent = sentence(error)
      }
      await refresh()
      $('close-picker').focus()
    })
    return row(model.name, `${have}${inUse?.source === model.source ? ', in use' : ''}`, button(model.complete ? 'Choose' : 'Continue', model.name, () => look({ source: model.source, name: model.name })), bin)
  }))
  if (usage) $('usage').textContent = `${bytes(usage.modelBytes)} of models${usage.quotaBytes ? `; this site may store about ${bytes(usage.quotaBytes)}` : ''}. ${usage.store === 'memory' ? 'This browser keeps nothing after the tab is closed.' : usage.persisted ? 'The browser keeps them until you delete them.' : 'The browser may delete them when the disk is full.'}`
}

/** Asks before something is deleted. @param {string} question @returns {Promise<boolean>} */
export function confirmed(question) {
  const dialog = $('confirm')
  $('confirm-text').textContent = question
  dialog.returnValue = ''
  dialog.showModal()
  return new Promise(resolve => dialog.addEventListener('close', () => resolve(dialog.returnValue === 'yes'), { once: true }))
}

/** @param {string} address @param {string} [file] */
export async function lookAtAddress(address, file) {
  if (!runsHere) return void await open()
  try {
    const source = addressOf(address)
    const name = decodeURIComponent(source.replace(/\/$/, '').split('/').at(-1) ?? source).replace(/\.gguf$/i, '')
    await look({ source, name, ...(file ? { file } : {}) })
  } catch (error) {
    $('address-error').textContent = sentence(error)
  }
}

/** @param {File[]} files */
function lookAtFiles(files) {
  if (!runsHere) return void open()
  const models = files.filter(({ name }) => /\.gguf$/i.test(name))
  if (!models.length) return void open().then(() => { $('address-error').textContent = 'A model is a file that ends in .gguf.' })
  void look({ source: models, name: (models[0]?.name ?? '').replace(/(-00001-of-\d+)?\.gguf$/i, '') })
}

export function listen() {
  $('not-here').hidden = runsHere
  for (const section of document.querySelectorAll('#choose > .here')) /** @type {HTMLElement} */ (section).hidden = !runsHere
  $('close-picker').onclick = () => $('picker').close()
  $('picker').onclick = (/** @type {MouseEvent} */ event) => { if (event.target === $('picker')) $('picker').close() }
  $('picker').onclose = () => { if (job && (job.step === 'planned' || job.step === 'failed' || job.step === 'planning')) void drop() }
  const repository = /^(https:\/\/(www\.)?(huggingface|hf)\.co\/)?[\w-][\w.-]*\/[\w.-]+\/?$/
  $('address').oninput = () => { $('file-row').hidden = !repository.test($('address').value.trim()) || /\.gguf$/i.test($('address').value); $('address-error').textContent = '' }
  $('by-address').onsubmit = (/** @type {Event} */ event) => {
    event.preventDefault()
    void lookAtAddress($('address').value.trim(), $('file-row').hidden ? '' : $('file-name').value.trim())
  }
  $('file').onchange = () => { lookAtFiles([...$('file').files]); $('file').value = '' }
  let depth = 0
  const dragging = (/** @type {number} */ by) => document.body.classList.toggle('dragging', (depth = Math.max(0, depth + by)) > 0)
  addEventListener('dragenter', event => { if (event.dataTransfer?.types.includes('Files')) dragging(1) })
  addEventListener('dragleave', event => { if (event.dataTransfer?.types.includes('Files')) dragging(-1) })
  addEventListener('dragover', event => event.preventDefault())
  addEventListener('drop', event => {
    event.preventDefault()
    dragging(-depth)
    if (event.dataTransfer?.files.length) lookAtFiles([...event.dataTransfer.files])
  })
}
