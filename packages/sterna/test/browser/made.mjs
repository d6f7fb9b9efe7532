// Models that tests make.
import { copyFileSync, existsSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from 'node:fs'
import path from 'node:path'
import { repository, scratch } from './stage.mjs'

export const TALES = path.join(repository, 'crates/sterna/models/tiny-tales')

/** The tensors of a safetensors file: `{ dtype, shape, data }` by name. */
export function readSafetensors(file) {
  const bytes = readFileSync(file), start = 8 + Number(bytes.readBigUInt64LE(0))
  const { __metadata__, ...header } = JSON.parse(bytes.subarray(8, start))
  return Object.fromEntries(Object.entries(header).map(([name, { dtype, shape, data_offsets: [from, to] }]) => [name, { dtype, shape, data: bytes.subarray(start + from, start + to) }]))
}

export function writeSafetensors(file, tensors) {
  const header = {}, length = Buffer.alloc(8)
  let end = 0
  for (const [name, { dtype, shape, data }] of Object.entries(tensors)) header[name] = { dtype, shape, data_offsets: [end, end += data.length] }
  const text = Buffer.from(JSON.stringify(header))
  length.writeBigUInt64LE(BigInt(text.length))
  writeFileSync(file, Buffer.concat([length, text, ...Object.values(tensors).map(({ data }) => data)]))
}

/** A copy of the built-in model, changed by `change(tensors, config)`; its folder. */
function talesWith(name, change) {
  const folder = path.join(scratch, `${name}-checkpoint`)
  if (existsSync(folder)) return folder
  mkdirSync(folder)
  for (const file of readdirSync(TALES)) if (file.endsWith('.json')) copyFileSync(path.join(TALES, file), path.join(folder, file))
  const config = JSON.parse(readFileSync(path.join(TALES, 'config.json')))
  const tensors = readSafetensors(path.join(TALES, 'model.safetensors'))
  change(tensors, config)
  writeFileSync(path.join(folder, 'config.json'), JSON.stringify(config))
  writeSafetensors(path.join(folder, 'model.safetensors'), tensors)
  return folder
}

/** The built-in model with so many tokens, never chosen, that a GPU is taken unasked. */
export const wideTales = () => talesWith('wide', (tensors, config) => {
  const table = tensors['model.embed_tokens.weight']
  const [n, width] = table.shape
  config.vocab_size = table.shape[0] = 1 << 17
  table.data = Buffer.concat([table.data, Buffer.alloc(table.data.length / n * (table.shape[0] - n))])
})

/** The built-in model, the signs of a norm of layer 3 changed. */
export const changedTales = () => talesWith('changed', tensors => {
  const norm = tensors['model.layers.3.post_attention_layernorm.weight']
  norm.data = Buffer.from(norm.data)
  for (let i = 1; i < norm.data.length; i += 2) norm.data[i] ^= 0x80
})

/** A LoRA adapter of the built-in model as PEFT saves it; its folder. */
export function talesAdapter(name, seed) {
  const folder = path.join(scratch, `${name}-peft`)
  if (existsSync(folder)) return folder
  mkdirSync(folder)
  const rank = 2, width = 256
  let state = seed
  const matrix = (...shape) => {
    const values = Float32Array.from({ length: shape[0] * shape[1] }, () => {
      state = (Math.imul(state, 1103515245) + 12345) >>> 0
      return (state / 2 ** 32 - 0.5) * 0.8
    })
    return { dtype: 'F32', shape, data: Buffer.from(values.buffer) }
  }
  const tensors = {}
  for (const layer of [1, 4, 6]) {
    for (const module of ['q_proj', 'o_proj']) {
      const at = `base_model.model.model.layers.${layer}.self_attn.${module}`
      tensors[`${at}.lora_A.weight`] = matrix(rank, width)
      tensors[`${at}.lora_B.weight`] = matrix(width, rank)
    }
  }
  writeSafetensors(path.join(folder, 'adapter_model.safetensors'), tensors)
  writeFileSync(path.join(folder, 'adapter_config.json'), JSON.stringify({ peft_type: 'LORA', r: rank, lora_alpha: 4, target_modules: ['q_proj', 'o_proj'] }))
  return folder
}
