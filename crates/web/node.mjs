// Generates in Node.js: node node.mjs MODULE.wasm MODEL_FOLDER PROMPT [TEMPERATURE] [SEED] [PIECE]
// prints the token ids as JSON. The files are given in pieces of PIECE bytes.
import { closeSync, existsSync, openSync, readFileSync, readSync, statSync } from "node:fs";

const [wasm, folder, prompt, temperature = "0", seed = "0", piece = "65536"] = process.argv.slice(2);
const { exports: sterna } = new WebAssembly.Instance(new WebAssembly.Module(readFileSync(wasm)));
const write = (bytes) => {
  const at = sterna.buffer(bytes.length); // May move the memory, so first.
  new Uint8Array(sterna.memory.buffer, at, bytes.length).set(bytes);
};
const output = () => new TextDecoder().decode(new Uint8Array(sterna.memory.buffer, sterna.output(), sterna.output_len()));
const check = (code) => { if (code === -2) throw new Error(output()); return code; };

sterna.open();
for (let want; (want = check(sterna.wanted())) !== 0;) {
  const file = `${folder}/${output()}`;
  if (want === 1) { check(sterna.give_len(existsSync(file) ? statSync(file).size : -1)); continue; }
  const bytes = new Uint8Array(Math.min(sterna.wanted_end() - sterna.wanted_start(), Number(piece)));
  const open = openSync(file);
  readSync(open, bytes, 0, bytes.length, sterna.wanted_start());
  closeSync(open);
  write(bytes);
  check(sterna.give_bytes());
}
write(new TextEncoder().encode(prompt));
check(sterna.ask(Number(temperature), Number(seed)));
const ids = [];
for (let id; (id = check(sterna.step())) >= 0;) ids.push(id);
console.log(JSON.stringify(ids));
