/** The Worker. */
import { serve, type Port } from '../rpc.js'
import type { Calls } from '../types.js'
import { makeCalls } from './calls.js'
import { loadEngine } from './engine.js'

serve<Calls>(globalThis as unknown as Port, makeCalls(loadEngine))
