// What a page does with the package. `answer` gives the ids of the tokens.
import { Sterna } from 'sterna'

globalThis.answer = async (address, prompt, maxTokens) => {
  const model = await Sterna.load(address, { backend: 'cpu' })
  const generation = model.generate(prompt, { maxTokens, temperature: 0, logprobs: 0 })
  await generation.text()
  await model.dispose()
  return generation.logprobs.map(({ id }) => id)
}
