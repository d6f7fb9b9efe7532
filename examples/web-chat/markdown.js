// A little Markdown, made of elements: paragraphs, headings, lists, code, emphasis. A model's text never becomes HTML.
import { copy, h, icon } from './dom.js'

/**
 * @typedef {{ depth: number, ordered: boolean, start: number, text: string }} Item
 * @typedef {{ kind: 'p' | 'h' | 'code' | 'list', source: string, text: string, level?: number, items?: Item[] }} Block
 */

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/
const ITEM = /^(\s*)([-*+]|(\d{1,9})[.)])\s+(.*)$/

/** @param {string} text @returns {Block[]} */
export function blocksOf(text) {
  const lines = text.replace(/\r\n?/g, '\n').split('\n')
  /** @type {Block[]} */
  const blocks = []
  for (let at = 0; at < lines.length;) {
    const first = at
    const line = lines[at++] ?? ''
    const fence = FENCE.exec(line)
    const heading = HEADING.exec(line)
    /** @type {Omit<Block, 'source'>} */
    let block
    if (line.trim() === '') continue
    if (fence) {
      const inside = at
      while (at < lines.length && !lines[at]?.trim().startsWith(fence[1] ?? '')) at++
      block = { kind: 'code', text: lines.slice(inside, at).join('\n') }
      if (at < lines.length) at++
    } else if (heading) {
      block = { kind: 'h', level: heading[1]?.length ?? 1, text: heading[2] ?? '' }
    } else if (ITEM.test(line)) {
      /** @type {Item[]} */
      const items = []
      for (at = first; at < lines.length; at++) {
        const now = lines[at] ?? ''
        const item = ITEM.exec(now)
        const last = items.at(-1)
        if (item) items.push({ depth: (item[1] ?? '').replace(/\t/g, '    ').length, ordered: item[3] !== undefined, start: Number(item[3] ?? 1), text: item[4] ?? '' })
        else if (now.trim() === '' ? ITEM.test(lines[at + 1] ?? '') : false) continue
        else if (last && /^\s+\S/.test(now) && !FENCE.test(now)) last.text += `\n${now.trim()}`
        else break
      }
      block = { kind: 'list', text: '', items }
    } else {
      while (at < lines.length && lines[at]?.trim() && ![FENCE, HEADING, ITEM].some(start => start.test(lines[at] ?? ''))) at++
      block = { kind: 'p', text: lines.slice(first, at).join('\n') }
    }
    blocks.push({ ...block, source: lines.slice(first, at).join('\n') })
  }
  return blocks
}

const INLINE = /(`{1,3})([^`](?:.{0,500}?[^`])?)\1(?!`)|\*\*(?=\S)(.{1,1000}?)\*\*|(?<![\w*])\*(?=[^\s*])([^*\n]{1,500}?)\*(?![\w*])/gs

/** @param {string} text @returns {(Node | string)[]} */
function inline(text) {
  const nodes = []
  let at = 0
  for (const match of text.matchAll(INLINE)) {
    nodes.push(text.slice(at, match.index))
    if (match[2] !== undefined) nodes.push(h('code', {}, match[2]))
    else if (match[3] !== undefined) nodes.push(h('strong', {}, ...inline(match[3])))
    else nodes.push(h('em', {}, match[4] ?? ''))
    at = match.index + match[0].length
  }
  nodes.push(text.slice(at))
  return nodes
}

/** @param {Item[]} items */
function list(items) {
  const [first] = items
  const top = h(first?.ordered ? 'ol' : 'ul', { start: first?.ordered && first.start !== 1 && first.start })
  for (let at = 0; at < items.length;) {
    const item = /** @type {Item} */ (items[at++])
    const from = at
    while (at < items.length && (items[at]?.depth ?? 0) > item.depth + 1) at++
    top.append(h('li', {}, ...inline(item.text), at > from && list(items.slice(from, at))))
  }
  return top
}

/** @param {Block} block */
function node(block) {
  if (block.kind === 'p') return h('p', {}, ...inline(block.text))
  // A message has a heading of level 2.
  if (block.kind === 'h') return h(`h${Math.min(6, (block.level ?? 1) + 2)}`, {}, ...inline(block.text))
  if (block.kind === 'list') return list(block.items ?? [])
  const button = h('button', { type: 'button', class: 'icon-button', title: 'Copy the code', 'aria-label': 'Copy the code', onclick: () => copy(block.text, button) }, icon('copy'))
  return h('div', { class: 'code' }, h('pre', { tabindex: 0 }, h('code', {}, block.text)), button)
}

/** @type {WeakMap<Element, string[]>} */
const shown = new WeakMap()

/** Shows a text that may have grown: blocks that are the same stay as they are. @param {Element} container @param {string} text */
export function render(container, text) {
  const before = shown.get(container) ?? []
  const blocks = blocksOf(text)
  blocks.forEach((block, i) => {
    if (before[i] === block.source) return
    const old = container.children[i]
    if (old) old.replaceWith(node(block))
    else container.append(node(block))
  })
  while (container.children.length > blocks.length) container.lastElementChild?.remove()
  shown.set(container, blocks.map(block => block.source))
}
