import { SternaError } from './error.js'
import type { Schema, WireGrammar } from './types.js'

/** A schema that can be posted. */
export function wireGrammar(schema: Schema): WireGrammar {
  if (typeof schema !== 'boolean' && (typeof schema !== 'object' || schema === null || Array.isArray(schema)))
    throw new SternaError('invalid_request', `schema: expected an object or a boolean, found ${schema === null ? 'null' : Array.isArray(schema) ? 'an array' : typeof schema}.`)
  const [member, ...others] = Object.entries(schema)
  if (member && others.length === 0 && (member[0] === 'regex' || member[0] === 'grammar')) {
    const [kind, text] = member
    if (typeof text !== 'string') throw new SternaError('invalid_request', `schema.${kind}: expected text, found ${typeof text}.`)
    return { kind, text }
  }
  return { kind: 'schema', text: JSON.stringify(schema) }
}
