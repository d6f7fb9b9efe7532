/** What the Worker answers. One Worker has at most one model. */
import { SternaError } from '../error.js'
import type { Handlers } from '../rpc.js'
import type { Calls, Progress, WireEngine } from '../types.js'
import { doctor } from './doctor.js'
import type { Engine } from './engine.js'
import { Host } from './host.js'
import * as library from './library.js'

/** The handlers, over a way to load the engine. */
export function makeCalls(load: (options: WireEngine) => Promise<Engine>): Handlers<Calls> {
  let options: WireEngine = { wasmUrl: {} }
  let loading: Promise<Engine> | undefined
  let host: Host | undefined
  let offering: library.Offering | undefined
  const openings = new Set<Promise<unknown>>()

  function engine(): Promise<Engine> {
    loading ??= load(options)
    loading.catch(() => { loading = undefined })
    return loading
  }
  function loaded(): Host {
    if (!host) throw new SternaError('disposed', 'The model was disposed.')
    return host
  }
  function offered(): library.Offering {
    if (!offering) throw new SternaError('disposed', 'Nothing is offered.')
    return offering
  }
  /** Opens a source for `use`, whose files stay open if it succeeds. */
  function opening<T>(...args: Parameters<typeof open<T>>): Promise<T> {
    const result = open(...args)
    const settled: Promise<unknown> = result.catch(() => {}).finally(() => openings.delete(settled))
    openings.add(settled)
    return result
  }
  async function open<T>(from: Parameters<typeof library.openSource>[1], context: library.OpenContext, use: (opened: library.Opened) => Promise<T>): Promise<T> {
    const opened = await library.openSource(await engine(), from, context)
    try {
      // A failed download is what went wrong, whatever the engine says of the files that it then misses.
      const failed = opened.arrived.then(() => new Promise<never>(() => {}), error => { throw error })
      const value = await Promise.race([use(opened), failed])
      await opened.arrived
      return value
    } catch (error) {
      opened.close()
      throw SternaError.from(error)
    }
  }

  return {
    engine: args => (options = args, null),

    load: (args, context) => opening(args, { ...context, accept: bytes => library.refuseMemory(bytes, args.backend), ...(args.peers ? { peers: args.peers } : {}) }, async opened => {
      const { Model, threads, constraints } = await engine()
      let arrived = false
      void opened.arrived.then(() => { arrived = true }, () => {})
      const tell = (doneBytes: number, totalBytes: number) => {
        const progress: Progress = { phase: 'load', doneBytes, totalBytes }
        if (arrived && !context.signal.aborted) context.emit(progress)
      }
      const model = await Model.load(opened.files, {
        name: args.name, backend: args.backend, threads,
        ...(opened.entry === undefined ? {} : { entry: opened.entry }), ...(args.device ? { device: args.device } : {}),
        ...(args.gpuTimeout === undefined ? {} : { gpuTimeout: args.gpuTimeout }),
        ...(args.contextLength === undefined ? {} : { contextLength: args.contextLength }),
        ...(args.prefill === undefined ? {} : { prefill: args.prefill }),
      }, tell)
      host = new Host(model, args.name, { threads, constraints }, args.contextLength, opened)
      return host.info()
    }).finally(() => args.peers?.close()),

    fetch: (args, context) => opening(args, context, async opened => {
      await opened.arrived
      opened.close()
      return null
    }),
    convert: (args, context) => {
      const converting = engine().then(engine => library.convert(engine, args, context))
      openings.add(converting)
      void converting.catch(() => {}).then(() => openings.delete(converting))
      return converting
    },
    plan: async args => library.plan(await engine(), args),
    info: () => loaded().info(),
    memory: () => loaded().with(model => model.memory()),
    generate: (args, { signal, emit }) => loaded().generate(args, signal, emit),
    open: ({ contextLength }) => loaded().open(contextLength),
    close: async session => (await host?.close(session), null),
    tokenize: prompt => loaded().with(model => loaded().encode(model, prompt)),
    detokenize: ids => loaded().with(model => model.decode(ids)),
    logits: ({ ids, all }) => loaded().with(model => model.logits(ids, all)),

    check: ({ receipt, adapters }) => loaded().check(receipt, adapters),

    // The engine answers others until the files are here.
    addAdapter: ({ name, from }, context) => opening(from, context, async opened => {
      await opened.arrived
      await loaded().with(model => model.addAdapter(name, opened.files))
      loaded().opened.push(opened)
      return null
    }),
    removeAdapter: async name => (await loaded().with(model => model.removeAdapter(name)), null),
    useAdapters: adapters => (loaded().useAdapters(adapters), null),
    swap: ({ groups, from }, context) => opening(from, context, async opened => {
      await opened.arrived
      const swapped = await loaded().swap(model => model.swap(opened.files, groups))
      loaded().opened.push(opened)
      return swapped
    }),

    list: () => library.list(),
    remove: id => library.remove(id),
    verify: async ({ id, mend }, context) => library.verify(await engine(), id, mend, context),
    usage: () => library.usage(),
    purge: () => library.purge(),
    offer: async (id, { signal, emit }) => {
      offering = await library.offer(await engine(), id, { signal, emit })
      return offering.offer.manifest()
    },
    offered: request => offered().offer.answer(request),
    read: ({ file, start, end }) => offered().read(file, start, end),
    readText: ({ id, name }) => library.readText(id, name),
    doctor: () => doctor(engine),
    dispose: async () => {
      const disposing = host
      host = undefined
      offering?.close()
      offering = undefined
      await disposing?.dispose()
      await Promise.allSettled(openings) // A cancelled download notes how far it came.
      return null
    },
  }
}
