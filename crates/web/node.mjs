// Generates in Node.js: node node.mjs MODEL_FOLDER PROMPT [TEMPERATURE] [SEED] [PIECE]
// prints the token ids as JSON. The files are given in pieces of at most PIECE bytes.
// node node.mjs MODEL_FOLDER --check RECEIPT checks a receipt, and prints what came of it.
import { closeSync, existsSync, openSync, readFileSync, readSync, statSync } from "node:fs";

const built = new URL("../../packages/sterna/dist/wasm/", import.meta.url);
const { default: init, Model } = await import(new URL("sterna_web.js", built));
await init({ module_or_path: readFileSync(new URL("sterna_web_bg.wasm", built)) });

const [folder, prompt, temperature = "0", seed = "0", piece = "65536"] = process.argv.slice(2);
const files = {
  len: (name) => existsSync(`${folder}/${name}`) ? statSync(`${folder}/${name}`).size : undefined,
  read(name, start, end) {
    const bytes = new Uint8Array(Math.min(end - start, Number(piece)));
    const file = openSync(`${folder}/${name}`);
    readSync(file, bytes, 0, bytes.length, start);
    closeSync(file);
    return bytes;
  },
};
const model = await Model.load(files, { name: folder, backend: "cpu", threads: 1 }, () => {});
if (prompt === "--check") {
  console.log(JSON.stringify(await model.check(readFileSync(temperature, "utf8"), files, [])));
  process.exit();
}
const messages = [{ role: "user", content: prompt }];
const ids = model.info().hasTemplate ? model.prompt(messages, {}) : model.encode(prompt);
model.start(model.session(), ids, { temperature: Number(temperature), seed: Number(seed) });
const answer = [];
while (!model.isIdle()) {
  for (const event of await model.step()) if (event.type === "token") answer.push(event.id);
}
console.log(JSON.stringify(answer));
