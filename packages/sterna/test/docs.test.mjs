// docs/browser-api.md against dist/*.d.ts: what is exported stands there, and nothing else.
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'

const page = readFileSync(new URL('../../../docs/browser-api.md', import.meta.url), 'utf8')
const { exports } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url)))

const modules = new Map()
/** A file's declarations, what it imports, and what it exports, by name. */
function moduleAt(file) {
  if (!modules.has(file)) modules.set(file, parse(readFileSync(new URL(`../dist/${file}`, import.meta.url), 'utf8')))
  return modules.get(file)
}

function parse(source) {
  // The compiler indents by four, and what is copied by two.
  const text = /^  \w/m.test(source) ? source.replace(/^ +/gm, '$&$&') : source
  const declared = new Map(), named = new Map()
  const exported = new Set()
  for (const [, what, list, from] of text.matchAll(/^(import|export)(?: type)? \{([^}]*)\}(?: from '\.\/([\w-]+)\.js')?;/gm)) {
    for (const item of list.split(',').map(item => item.trim().replace(/^type /, '')).filter(Boolean)) {
      const [name, alias = name] = item.split(' as ')
      if (from) named.set(alias, { file: `${from}.d.ts`, name })
      if (what === 'export') exported.add(alias)
    }
  }
  const declaration = /^(export )?(?:declare )?(?:type (\w+)((?:\/\*\*[^]*?\*\/|[^;])*)|(?:interface|class|const|function) (\w+)(.*)((?:\n(?![}\w/]).*)*))/gm
  for (const [, isExported, type, union, name = type, head = '', body] of text.matchAll(declaration)) {
    declared.set(name, { head, names: type ? literals(union) : members(body) })
    if (isExported) exported.add(name)
  }
  return { declared, named, exported }
}

const literals = union => new Set([...union.replace(/\/\*\*[^]*?\*\//g, '').matchAll(/'(\w+)'/g)].map(([, literal]) => literal))

/** Names of members, those of functions in objects with the object's name before them. */
function members(body) {
  const names = new Set()
  let outer = '', isInternal = false
  for (const line of body.split('\n')) {
    if (/^\s*(\/\*\*|\*)/.test(line)) {
      isInternal ||= line.includes('@internal')
      continue
    }
    const [, indent, modifiers, name, rest] = /^( +)((?:readonly |static |get |private |async |\*)*)(\w+)\??([(:<].*)/.exec(line) ?? []
    if (name && indent.length === 4) outer = name
    const isNested = indent?.length === 8 && (/^: (?:<.*>)?\(/.test(rest))
    if (name && !isInternal && !modifiers.includes('private') && name !== 'constructor' && (indent.length === 4 || isNested)) names.add(isNested ? `${outer}.${name}` : name)
    isInternal = false
  }
  return names
}

function resolve(file, name) {
  const { declared, named } = moduleAt(file)
  const from = named.get(name)
  return from ? resolve(from.file, from.name) : { file, ...declared.get(name) }
}

/** Members, with those of what it extends if that has no name outside of the package. */
function allMembers(file, name, isPublic) {
  const found = resolve(file, name)
  assert.ok(found.names, `${name} in ${file}`)
  const parents = (/ extends ([\w, ]+) \{/.exec(found.head)?.[1] ?? '').split(', ').filter(parent => parent && parent !== 'Error')
  const inherited = parents.filter(parent => !isPublic.has(parent)).flatMap(parent => allMembers(found.file, parent, isPublic))
  return [...new Set([...found.names, ...inherited])]
}

/** The page's sections by their titles: the names in the first column of their tables. */
function sections() {
  const found = new Map()
  for (const part of page.split(/^(?=#+ )/m)) {
    const [, title] = /^#+ `([^`]+)`/.exec(part) ?? []
    if (!title) continue
    const rows = part.split('\n').filter(line => line.startsWith('| `')).map(line => line.split(/(?<!\\)\|/)[1])
    found.set(title, rows.flatMap(cell => [...cell.matchAll(/`([\w.]+)[^`]*`/g)].map(([, name]) => name)))
  }
  return found
}

test('the page of the API has what the package has', () => {
  const described = sections()
  const { exported } = moduleAt('index.d.ts')
  // Those have no members.
  const plain = ['Source', 'ChatFactory', 'broadcastSignalling', 'openai', 'webSocketSignalling']
  const expected = new Map()
  for (const name of exported) if (!plain.includes(name)) expected.set(name, allMembers('index.d.ts', name, exported))
  for (const name of plain) expected.set(name, [])
  for (const [entry, { types }] of Object.entries(exports)) {
    if (entry === '.' || !types) continue
    expected.set(`sterna/${entry.slice(2)}`, [...moduleAt(types.replace('./dist/', '')).exported])
  }
  const sorted = map => Object.fromEntries([...map].map(([name, members]) => [name, [...members].sort()]).sort(([a], [b]) => a < b ? -1 : 1))
  for (const name of plain) if (described.has(name)) described.set(name, [])
  described.delete('sterna')
  assert.deepEqual(sorted(described), sorted(expected))
})
