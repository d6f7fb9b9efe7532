// Conversations, in IndexedDB; in memory where a browser has none, as in some private windows.

/**
 * @typedef {{ role: 'user' | 'assistant', content: string, reasoning?: string, note?: string }} Turn
 * @typedef {{ id: string, title: string, updated: number, turns: Turn[] }} Conversation
 */

/** @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result)
  request.onerror = () => reject(request.error)
})

/** @type {Map<string, Conversation>} */
const memory = new Map()
const database = (async () => {
  const opening = indexedDB.open('sterna-chat', 1)
  opening.onupgradeneeded = () => opening.result.createObjectStore('conversations', { keyPath: 'id' })
  return done(opening)
})().catch(() => undefined)

/** @param {IDBTransactionMode} mode */
const table = async mode => (await database)?.transaction('conversations', mode).objectStore('conversations')

/** The latest first. @returns {Promise<Conversation[]>} */
export async function all() {
  const at = await table('readonly')
  const found = at ? await done(at.getAll()) : [...memory.values()]
  return found.sort((a, b) => b.updated - a.updated)
}

/** @param {Conversation} conversation */
export async function save(conversation) {
  const at = await table('readwrite')
  if (at) await done(at.put(conversation))
  else memory.set(conversation.id, conversation)
}

/** @param {string} id */
export async function remove(id) {
  const at = await table('readwrite')
  if (at) await done(at.delete(id))
  else memory.delete(id)
}
