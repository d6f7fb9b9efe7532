// Small helpers: elements, and numbers as people read them.

/** The element with this id. @param {string} id @returns {any} */
export const $ = id => document.getElementById(id)

/**
 * Makes an element. Text children are text, never HTML.
 * @param {string} tag
 * @param {Record<string, any>} [props] attributes; `onclick` and the like are listeners; `false` and `undefined` are left out
 * @param {...(Node | string | false | undefined)} children
 * @returns {any}
 */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag)
  for (const [key, value] of Object.entries(props)) {
    if (value === undefined || value === false) continue
    if (key.startsWith('on')) node.addEventListener(key.slice(2), value)
    else node.setAttribute(key, value === true ? '' : String(value))
  }
  node.append(...children.filter(child => child !== undefined && child !== false))
  return node
}

/** An icon of the sprite in index.html. @param {string} name */
export function icon(name) {
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg')
  svg.setAttribute('class', 'icon')
  svg.setAttribute('aria-hidden', 'true')
  const use = document.createElementNS('http://www.w3.org/2000/svg', 'use')
  use.setAttribute('href', `#i-${name}`)
  svg.append(use)
  return svg
}

/** A button with an icon and a name; `quiet` shows the icon alone. @param {string} name @param {string} label @param {() => void} onclick */
export function iconButton(name, label, onclick, quiet = true) {
  return h('button', { type: 'button', class: quiet ? 'icon-button' : 'text-button', title: quiet && label, 'aria-label': quiet && label, onclick }, icon(name), !quiet && label)
}

const UNITS = ['bytes', 'kB', 'MB', 'GB', 'TB']
/** @param {number} n */
export function bytes(n) {
  let unit = 0
  while (n >= 999.5 && unit < UNITS.length - 1) [n, unit] = [n / 1000, unit + 1]
  return `${unit && n < 9.95 ? n.toFixed(1) : Math.round(n)} ${UNITS[unit]}`
}

/** @param {number} n */
export const count = n => n >= 1e9 ? `${(n / 1e9).toFixed(1)} billion` : n >= 1e6 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} million` : n.toLocaleString('en')

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`
  return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`
}

/** What went wrong, for people; the code for reports. @param {unknown} error */
export function sentence(error) {
  const { code, message } = /** @type {{ code?: string, message?: string }} */ (error ?? {})
  return `${message || String(error)}${code ? ` (${code})` : ''}`
}

/** Says something to screen readers. @param {string} text */
export function announce(text) {
  $('live').textContent = text
}

/** @param {string} text @param {HTMLElement} button */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text)
    announce('Copied')
    button.classList.add('done')
    setTimeout(() => button.classList.remove('done'), 1500)
  } catch {
    announce('The browser did not allow copying.')
  }
}
