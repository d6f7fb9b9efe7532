// The chat: conversations, messages, answers. The model is chosen in picker.js.
import { $, announce, bytes, copy, count, h, icon, iconButton, sentence } from './dom.js'
import { render } from './markdown.js'
import * as picker from './picker.js'
import { ServerError, forget, hasKey, lookAgain, served } from './server.js'
import { Sterna } from './sterna.js'
import * as store from './store.js'

/**
 * @typedef {import('../../packages/sterna/dist/index.js').Model} Model
 * @typedef {import('../../packages/sterna/dist/index.js').Chat} Chat
 * @typedef {import('../../packages/sterna/dist/index.js').Generation} Generation
 * @typedef {import('./store.js').Conversation} Conversation
 * @typedef {import('./store.js').Turn} Turn
 */

const OPEN = 'sterna-chat.open'
const SAMPLING = { temperature: 0.7, topP: 0.95 }
const SUGGESTIONS = ['Explain why the sky is blue, in three sentences.', 'Write a short letter that declines an invitation.', 'What is a good way to learn the names of birds?']
const BEGINNINGS = ['Once upon a time', 'The little bird wanted to see the sea.', 'Tom and Lily found a big red box.']

/** @type {Model | undefined} */
let model
/** The server of this page answers, not this tab. */
let isServer = false
/** @type {Chat | undefined} of the conversation that is shown */
let chat
/** @type {Generation | undefined} */
let running
/** @type {Promise<void> | undefined} of the last answer, until it is kept */
let answering
let followed = true
/** @type {Conversation[]} */
let conversations = []
/** @type {Conversation} */
let current = blank()

/** @returns {Conversation} */
function blank() {
  return { id: crypto.randomUUID(), title: '', updated: Date.now(), turns: [] }
}

// Conversations

async function showList() {
  conversations = await store.all()
  if (conversations.some(({ id }) => id === current.id) === false && current.turns.length) conversations.unshift(current)
  $('no-conversations').hidden = conversations.length > 0
  $('conversations').replaceChildren(...conversations.map(conversation => {
    const here = conversation.id === current.id
    const name = h('button', { type: 'button', class: 'conversation', 'aria-current': here && 'page', onclick: () => show(conversation) }, conversation.title)
    const item = h('li', { class: here && 'here' }, name,
      iconButton('pen', `Rename ${conversation.title}`, () => rename(conversation, item)),
      iconButton('bin', `Delete ${conversation.title}`, () => discard(conversation)))
    return item
  }))
}

/** @param {Conversation} conversation @param {HTMLElement} item */
function rename(conversation, item) {
  const input = h('input', { type: 'text', 'aria-label': 'Name of the conversation', maxlength: 100, value: conversation.title })
  let over = false
  const end = async (/** @type {boolean} */ keep) => {
    if (over) return
    over = true
    const title = input.value.trim()
    if (keep && title) {
      const kept = conversation.id === current.id ? current : conversation
      kept.title = title
      await store.save(kept)
      if (kept === current) $('title').textContent = title
    }
    await showList()
    const at = conversations.findIndex(({ id }) => id === conversation.id)
    $('conversations').children[at]?.querySelector('button')?.focus()
  }
  input.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === 'Enter' && !event.isComposing) void end(true)
    if (event.key === 'Escape') event.stopPropagation(), void end(false)
  }
  input.onblur = () => end(true)
  item.replaceChildren(input)
  input.select()
}

/** @param {Conversation} conversation */
async function discard(conversation) {
  if (!await picker.confirmed(`Delete the conversation “${conversation.title}”?`)) return
  if (conversation.id === current.id) await show(blank(), false)
  await store.remove(conversation.id)
  await showList()
  $('new').focus()
}

/** What a reload of this tab shows again. */
function hold() {
  try {
    sessionStorage.setItem(OPEN, current.id)
  } catch {
    // Storage is blocked: a reload begins a new chat.
  }
}

/** @param {Conversation} conversation */
async function show(conversation, focus = true) {
  running?.stop()
  await answering
  await chat?.close()
  chat = undefined
  current = conversation
  hold()
  followed = true
  drawer(false)
  draw()
  await showList()
  if (focus) $('input').focus()
}

// Messages

function draw() {
  $('title').textContent = current.title || 'New chat'
  document.title = current.title ? `${current.title} · Sterna chat` : 'Sterna chat'
  $('messages').replaceChildren(...current.turns.map(turn => message(turn)))
  $('rate').textContent = ''
  welcome()
  controls()
  scroll(true)
}

/** What was thought, and what is said: servers tell them apart, models in the tab write both. @param {Turn} turn */
function parted({ content, reasoning }) {
  const [, thought, said] = reasoning === undefined ? /^\s*<think>(.*?)(?:<\/think>\s*(.*))?$/s.exec(content) ?? [] : []
  return { thought: (thought ?? reasoning ?? '').trim(), said: thought === undefined ? content : said ?? '' }
}

/** A folded thought, that grows. */
function thoughts() {
  const text = h('p', {})
  const box = h('details', { class: 'thought', hidden: true }, h('summary', {}, 'Reasoning'), text)
  return { box, show: (/** @type {string} */ thought) => { box.hidden = thought === ''; text.textContent = thought } }
}

/** @param {Turn} turn @param {boolean} [unfolded] */
function message(turn, unfolded = false) {
  const user = turn.role === 'user'
  const body = h('div', { class: 'body' })
  const { thought, said } = user ? { thought: '', said: turn.content } : parted(turn)
  if (user) body.append(h('p', {}, said))
  else render(body, said)
  const { box, show } = thoughts()
  show(thought)
  box.open = unfolded
  const copying = iconButton('copy', 'Copy', () => copy(said, copying))
  return h('li', { class: turn.role }, h('h2', { class: 'sr-only' }, user ? 'You' : 'Model'), thought !== '' && box, body, h('div', { class: 'tools' },
    !user && h('span', { class: 'note' }, turn.note ?? ''), copying,
    user && iconButton('pen', 'Edit', () => edit(turn)), h('span', { class: 'again' }, iconButton('again', 'Answer again', again))))
}

/** @param {Turn} turn */
function edit(turn) {
  if (running) return
  const index = current.turns.indexOf(turn)
  const item = $('messages').children[index]
  const text = h('textarea', { 'aria-label': 'Edit the message', rows: 3 })
  text.value = turn.content
  const leave = () => {
    const restored = message(turn)
    item.replaceWith(restored)
    restored.querySelector('[aria-label="Edit"]')?.focus()
  }
  const form = h('form', { class: 'edit' }, text, h('div', { class: 'row end' }, h('button', { type: 'button', onclick: leave }, 'Cancel'), h('button', { type: 'submit', class: 'primary', disabled: !model }, 'Ask this')))
  form.onsubmit = (/** @type {Event} */ event) => {
    event.preventDefault()
    const content = text.value.trim()
    if (!content || !model || running) return
    current.turns.splice(index)
    current.turns.push({ role: 'user', content })
    while ($('messages').children.length > index) $('messages').lastElementChild.remove()
    $('messages').append(message(/** @type {Turn} */ (current.turns[index])))
    answer(chat => chat.edit(index, content))
    $('input').focus()
  }
  text.onkeydown = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === 'Escape') event.stopPropagation(), leave()
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit()
  }
  item.replaceChildren(form)
  text.focus()
}

function again() {
  if (running) return
  if (!model) return void picker.open()
  if (current.turns.at(-1)?.role === 'assistant') current.turns.pop()
  while ($('messages').children.length > current.turns.length) $('messages').lastElementChild.remove()
  answer(chat => chat.regenerate())
  $('input').focus()
}

function session() {
  const { info, chat: open } = /** @type {Model} */ (model)
  // A model that only goes on with a text doesn't know when to end.
  const options = info.hasTemplate ? SAMPLING : { ...SAMPLING, maxTokens: 200 }
  return chat ??= open({ messages: current.turns.map(({ role, content }) => ({ role, content })), options })
}

/** @param {string} content */
function ask(content) {
  const last = current.turns.at(-1)
  session()
  $('messages').querySelector('.failed')?.remove()
  if (last?.role === 'user') {
    // A question without an answer: templates want turns that alternate.
    last.content += `\n\n${content}`
    const index = current.turns.length - 1
    $('messages').lastElementChild.replaceWith(message(last))
    return answer(chat => chat.edit(index, last.content))
  }
  current.title ||= content.split('\n')[0]?.slice(0, 60) ?? content
  current.turns.push({ role: 'user', content })
  $('messages').append(message(/** @type {Turn} */ (current.turns.at(-1))))
  answer(chat => chat.send(content))
}

/** @param {(chat: Chat) => Generation} begin */
function answer(begin) {
  answering = run(begin)
}

/** Shows an answer as it comes, and keeps it. @param {(chat: Chat) => Generation} begin */
async function run(begin) {
  const conversation = current
  /** @type {Turn} */
  const turn = { role: 'assistant', content: '' }
  const body = h('div', { class: 'body' }, h('span', { class: 'waiting' }))
  const { box, show: think } = thoughts()
  const item = h('li', { class: 'assistant', 'aria-busy': 'true' }, h('h2', { class: 'sr-only' }, 'Model'), box, body)
  // What a reload finds.
  const sofar = () => store.save(turn.content || turn.reasoning ? { ...conversation, turns: [...conversation.turns, { ...turn, note: 'interrupted' }] } : conversation).catch(() => {})
  let savedAt = performance.now()
  conversation.updated = Date.now()
  hold()
  void sofar()
  const from = performance.now()
  let first = 0
  let pieces = 0
  let frame = 0
  const paint = () => {
    frame = 0
    const { thought, said } = parted(turn)
    think(thought)
    if (said) render(body, said)
    if (pieces > 1) $('rate').textContent = `${rate(pieces, first)} tokens/s`
    scroll()
  }
  /** @type {unknown} */
  let error
  followed = true
  welcome()
  try {
    running = begin(session())
    $('messages').append(item)
    controls()
    scroll()
    announce('Answering')
    for await (const piece of running) {
      first ||= performance.now()
      pieces++
      turn.content += piece
      // Models in the tab have none.
      const { reasoning } = /** @type {{ reasoning?: string }} */ (running)
      if (reasoning) turn.reasoning = reasoning
      frame ||= requestAnimationFrame(paint)
      if (performance.now() - savedAt > 500) {
        savedAt = performance.now()
        void sofar()
      }
    }
  } catch (thrown) {
    error = thrown
  }
  cancelAnimationFrame(frame)
  const ended = running
  running = undefined
  item.remove()
  if (ended?.reason === 'context' || ended?.forgotten) tell(ended.forgotten ? 'The conversation is longer than the model’s context: its oldest messages were left out.' : 'The answer ended because the model’s context is full.')
  const isThere = turn.content !== '' || turn.reasoning !== undefined
  if (isThere) {
    const tokens = ended?.usage?.completionTokens ?? pieces
    turn.note = [`${tokens} tokens`, tokens > 1 && `${rate(tokens, first)} tokens/s`, `first after ${((first - from) / 1000).toFixed(1)} s`, ended?.reason === 'stopped' && 'stopped', ended?.reason === 'length' && 'cut off', error && 'failed'].filter(Boolean).join(' · ')
    conversation.turns.push(turn)
  }
  conversation.updated = Date.now()
  if (conversation === current) {
    if (isThere) $('messages').append(message(turn, box.open))
    $('rate').textContent = ''
    if (!isThere) $('messages').append(failure(error, ended?.reason === 'stopped'))
    else if (error) tell(sentence(error))
    announce(error ? '' : ended?.reason === 'stopped' ? 'Stopped' : `Answer: ${turn.content}`)
    scroll()
  }
  controls()
  backend()
  await store.save(conversation).catch(failed => tell(`The conversation could not be kept: ${sentence(failed)}`))
  await showList()
}

/** In the place of an answer that didn't come. @param {unknown} error @param {boolean} stopped */
function failure(error, stopped) {
  if (error instanceof ServerError && error.status === 401) return h('li', { class: 'assistant failed' }, picker.keyForm(sentence(error), again))
  return h('li', { class: 'assistant failed' },
    h('p', { class: error ? 'error' : 'soft', role: error ? 'alert' : false }, error ? sentence(error) : stopped ? 'Stopped.' : 'The model had nothing to say.'),
    iconButton('again', 'Try again', again, false))
}

/** Tokens per second, without the wait for the first. @param {number} tokens @param {number} first */
const rate = (tokens, first) => {
  const value = (tokens - 1) / Math.max(0.001, (performance.now() - first) / 1000)
  return value >= 100 ? Math.round(value) : value.toFixed(1)
}

/** To the end, unless the reader went elsewhere. */
function scroll(force = false) {
  if (force || followed) $('log').scrollTop = $('log').scrollHeight
}

/** @param {string} text @param {string} [action] @param {() => void} [onclick] */
function tell(text, action, onclick) {
  const note = h('div', { class: 'notice' }, h('span', {}, text), action && h('button', { type: 'button', onclick }, action), iconButton('close', 'Dismiss', () => note.remove()))
  $('notices').append(note)
  while ($('notices').children.length > 3) $('notices').firstElementChild.remove()
}

// The model

async function welcome() {
  const box = $('welcome')
  box.hidden = current.turns.length > 0
  if (box.hidden) return
  if (model) {
    const base = !model.info.hasTemplate
    return box.replaceChildren(h('h2', {}, base ? 'Begin a text' : 'Ask something'),
      h('p', { class: 'soft' }, base ? `${model.info.name} goes on with what you write; it isn't made for answering questions.` : isServer ? `${model.info.name} answers on the server of this page, which reads what you write.` : `${model.info.name} answers in this tab. Nothing that you write leaves it.`),
      h('div', { class: 'suggestions' }, ...(base ? BEGINNINGS : SUGGESTIONS).map(text => h('button', { type: 'button', onclick: () => { if (!running) { ask(text); $('input').focus() } } }, text))))
  }
  if (picker.runsHere) {
    box.replaceChildren(h('h2', {}, 'A language model in this tab'),
      h('p', { class: 'soft' }, 'It is downloaded once, then runs on this device, also without a network. Nothing that you write leaves it.'))
  } else box.replaceChildren(h('h2', {}, 'A language model on this server'))
  const place = box.appendChild(h('div', { class: 'suggestions' }))
  const other = h('button', { type: 'button', onclick: () => picker.open() }, 'Choose a model')
  const [[offer], { models: [first], wantsKey, error }] = await Promise.all([picker.offers, served()])
  // Meanwhile there may be a model, or a conversation; or this was done again.
  if (model || !place.isConnected) return
  if (wantsKey) box.replaceChildren(h('h2', {}, 'This server asks for a key'), h('p', { class: 'soft' }, 'With one, its models answer, and it reads what you write.'),
    h('section', { class: 'offer locked' }, picker.keyForm(error ? sentence(error) : '')),
    ...picker.runsHere ? [h('p', { class: 'soft or' }, 'Or a model runs in this tab: it is downloaded once, and nothing that you write leaves it.')] : [], place)
  else if (error) box.insertBefore(h('p', { class: 'error', role: 'alert' }, sentence(error)), place)
  else if (!first && !picker.runsHere) box.insertBefore(h('p', { class: 'soft' }, 'It offers none to this page: it has no API, and was built without the engine for browsers.'), place)
  if (!picker.runsHere && !first) return
  const asking = first && h('button', { type: 'button', class: !offer && 'primary', onclick: () => void picker.ask(first.id) }, `Ask ${first.id} on this server`)
  if (!offer) {
    if (!asking) other.className = 'primary'
    return place.replaceChildren(...asking ? [asking] : [], other)
  }
  const choice = { source: offer.address, name: offer.name }
  const plan = await Sterna.plan(offer.address).catch(() => undefined)
  other.textContent = 'Other models'
  const begin = () => {
    if (!plan?.fits) return void picker.look(choice)
    void picker.start({ ...choice, plan })
    // A small one is here before a dialog could be read.
    setTimeout(() => { if (!model && !$('picker').open) void picker.open() }, 500)
  }
  place.replaceChildren(h('div', { class: 'offer' }, h('h3', {}, offer.name), plan && picker.needs(plan), h('button', { type: 'button', class: 'primary', onclick: begin }, plan?.missingBytes ? 'Download and start' : 'Start')), ...asking ? [asking] : [], other)
}

/** Has the server ask for its key again. */
async function leave() {
  forget()
  void lookAgain()
  await picker.hooks.release()
  $('facts').hidePopover()
  picker.hooks.changed(undefined)
}

/** Which processor computes, and why. */
function backend() {
  $('backend').hidden = !model
  if (!model) return
  const { info } = model
  const cpu = info.backend === 'cpu'
  const label = isServer ? 'Server' : cpu ? 'CPU' : 'GPU'
  $('backend').replaceChildren(icon('chip'), h('span', {}, label), h('span', { class: 'sr-only' }, ', about the model'))
  const row = (/** @type {string} */ name, /** @type {string | undefined} */ value) => value ? [h('dt', {}, name), h('dd', {}, value)] : []
  if (isServer) return $('facts').replaceChildren(h('h2', {}, info.name), h('dl', {},
    ...row('Computes on', 'the server of this page'), ...row('Context', info.contextLength ? `${count(info.contextLength)} tokens` : undefined)),
    ...hasKey() ? [h('p', {}, h('button', { type: 'button', onclick: leave }, 'Forget the key'))] : [])
  $('facts').replaceChildren(h('h2', {}, info.name), h('dl', {},
    ...row('Computes on', cpu ? `CPU, ${info.threads} ${info.threads === 1 ? 'thread' : 'threads'}` : `GPU${info.adapter ? `: ${info.adapter}` : ''}`),
    ...row('Why not the GPU', info.backendReason && `${info.backendReason.message} (${info.backendReason.code})`),
    ...row('Model', `${info.architecture}, ${count(info.parameters)} parameters`),
    ...row('Context', `${count(info.contextLength)} of ${count(info.maxContext)} tokens`),
    ...row('Memory', `${bytes(info.weightBytes)} of weights, ${bytes(info.cacheBytesPerToken * info.contextLength)} for a full conversation`)),
    ...info.warnings.map(warning => h('p', { class: 'error' }, warning)))
}

function controls() {
  const send = $('send')
  const stop = running !== undefined
  send.replaceChildren(icon(stop ? 'stop' : 'send'))
  send.setAttribute('aria-label', stop ? 'Stop' : 'Send')
  send.title = stop ? 'Stop (Escape)' : 'Send (Enter)'
  send.classList.toggle('stop', stop)
  $('keys').textContent = stop ? 'Escape stops' : 'Enter sends, Shift + Enter begins a line'
}

Object.assign(picker.hooks, {
  release: async () => {
    running?.stop()
    await answering
    const old = model
    model = chat = undefined
    await old?.dispose()
    backend()
    void welcome()
  },
  loaded: (/** @type {Model} */ loaded, /** @type {import('./picker.js').Choice} */ choice) => {
    model = loaded
    isServer = choice.isServer === true
    $('model-name').textContent = choice.name
    backend()
    void welcome()
    $('input').focus()
  },
  changed: (/** @type {string | undefined} */ text) => {
    $('model-name').textContent = text ?? model?.info.name ?? 'Choose a model'
  },
  notice: (/** @type {import('../../packages/sterna/dist/index.js').Notice} */ notice) => {
    tell(`${notice.message} (${notice.code})`)
    // The model asks what it is now.
    setTimeout(backend, 300)
  },
})

// The page

const phone = matchMedia('(max-width: 760px)')
/** @param {boolean} shown */
function drawer(shown) {
  const away = phone.matches && !shown
  $('side').inert = away
  document.body.classList.toggle('drawer', phone.matches && shown)
  document.querySelector('main')?.toggleAttribute('inert', phone.matches && shown)
  $('menu').setAttribute('aria-expanded', String(shown))
}

const THEMES = [['', 'System'], ['light', 'Light'], ['dark', 'Dark']]
function theme() {
  const root = document.documentElement
  const now = Math.max(0, THEMES.findIndex(([value]) => value === (root.dataset.theme ?? '')))
  $('theme').replaceChildren(icon('theme'), `Theme: ${THEMES[now]?.[1]}`)
  $('theme').onclick = () => {
    const value = THEMES[(now + 1) % THEMES.length]?.[0]
    if (value) root.dataset.theme = value
    else delete root.dataset.theme
    try {
      localStorage.setItem('sterna-chat.theme', value ?? '')
    } catch {
      // Storage is blocked: until the page is closed.
    }
    theme()
  }
}

async function offline() {
  if (!navigator.serviceWorker) return
  let asked = false
  navigator.serviceWorker.addEventListener('controllerchange', () => { if (asked) location.reload() })
  const registration = await navigator.serviceWorker.register('sw.js')
  const offer = (/** @type {ServiceWorker | null} */ worker) => worker && navigator.serviceWorker.controller && tell('A new version of this page is here.', 'Reload', () => { asked = true; worker.postMessage('skipWaiting') })
  offer(registration.waiting)
  registration.addEventListener('updatefound', () => {
    const worker = registration.installing
    worker?.addEventListener('statechange', () => { if (worker.state === 'installed') offer(worker) })
  })
  await navigator.serviceWorker.ready
  if (picker.runsHere) $('offline').textContent = 'Works offline'
}

function grow() {
  $('input').style.height = 'auto'
  $('input').style.height = `${Math.min(200, $('input').scrollHeight + 2)}px`
}

$('composer').onsubmit = (/** @type {Event} */ event) => {
  event.preventDefault()
  if (running) return running.stop()
  const content = $('input').value.trim()
  if (!content) return
  if (!model) return void picker.open()
  $('input').value = ''
  grow()
  ask(content)
}
$('input').oninput = grow
$('input').onkeydown = (/** @type {KeyboardEvent} */ event) => {
  if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return
  event.preventDefault()
  if (!running) $('composer').requestSubmit()
}
$('log').onscroll = () => { followed = $('log').scrollHeight - $('log').scrollTop - $('log').clientHeight < 40 }
$('new').onclick = () => show(blank())
$('model').onclick = () => picker.open()
$('menu').onclick = () => { drawer(true); $('close-side').focus() }
$('close-side').onclick = $('shade').onclick = () => { drawer(false); $('menu').focus() }
phone.onchange = () => drawer(false)
addEventListener('keydown', event => {
  if (event.key !== 'Escape' || document.querySelector('dialog[open]')) return
  if (document.body.classList.contains('drawer')) return $('close-side').click()
  running?.stop()
})
// Another tab may have written some.
addEventListener('focus', () => { if (!running && !$('conversations').querySelector('input')) void showList() })

picker.listen()
theme()
drawer(false)
draw()
await showList()
try {
  const open = conversations.find(({ id }) => id === sessionStorage.getItem(OPEN))
  if (open) await show(open, false)
} catch {
  // Storage is blocked: a new chat.
}
offline().catch(() => {})
// `?model=ADDRESS` offers a model.
const wanted = new URL(location.href).searchParams.get('model')
if (wanted) void picker.lookAtAddress(wanted)
else await picker.startLast()
