//! Operator fusion.
//!
//! A norm before products, of floats if they have few rows, is computed as their input is read, a product that is
//! added to the residual is added as it is stored, a gate is applied as its product is stored, also of experts, whose
//! sum is added to the residual; a gate's factor is read where it was copied from; products with adjacent matrices
//! become one, and attention of one row of each sequence prepares its own heads, with norms of all of them too. No
//! other operation may come in between, and nothing may read what is no longer stored.
//! Whether rows are read for the last time is noted: where they are a product in parts, they needn't be stored then.

use super::Matrix;
use super::op::{ExpertOutput, HeadInputs, Norm, Op, Output, View};
use crate::kernels::attention::decodes;
use crate::kernels::linear::{Epilogue, Form};
use crate::tuning::RowClass;

/// The same step in fewer operations.
///
/// A step that ends by sampling is followed by itself, with that token. After its last repetition something
/// else follows, and lacks what only the next repetition was known not to read. That does no harm: every step
/// writes what it reads, except for caches, which are always written, and the host reads nothing but logits
/// and sampled tokens. After other steps, anything may be read.
pub(super) fn fuse(ops: &[Op]) -> Vec<Op> {
    let ops = &with_norms(ops)[..];
    let next = match ops.last() {
        Some(Op::Sample(_)) => ops,
        _ => &[],
    };
    let mut fused: Vec<Op> = Vec::with_capacity(ops.len());
    for (i, op) in ops.iter().enumerate() {
        let rest = Rest {
            step: &ops[i + 1..],
            next,
        };
        let both = fused.last().and_then(|before| match before {
            Op::Linear { .. } => with_sum(before, op, rest).or_else(|| with_gate(before, op, rest)),
            Op::Experts { .. } => with_gate_of_experts(before, op, rest),
            Op::Combine { .. } => with_residual(before, op, rest),
            Op::Route { .. } => with_choice(before, op),
            Op::Heads { .. } => with_attention(before, op),
            Op::Copy { .. } => without_copy(before, op, rest),
            _ => None,
        });
        match both {
            Some(mut both) => {
                fused.pop();
                while let Some(with) = (fused.last()).and_then(|norm| of_whole(norm, &both, rest)) {
                    fused.pop();
                    both = with;
                }
                fused.push(both);
            }
            None => fused.push(op.clone()),
        }
    }
    // Last: other fusions of products may join matrices in their own way.
    let mut fused: Vec<Op> = fused.into_iter().map(in_one).collect();
    for i in 0..fused.len() {
        let rest = Rest {
            step: &fused[i + 1..],
            next: match fused.last() {
                Some(Op::Sample(_)) => &fused,
                _ => &[],
            },
        };
        let is_last = match &fused[i] {
            Op::Decode { heads, .. } => is_dead(&heads.qkv, rest),
            _ => false,
        };
        if let Op::Decode { reads_last, .. } = &mut fused[i] {
            *reads_last = is_last;
        }
    }
    fused
}

/// Products with adjacent matrices become one, if their results are adjacent too.
fn in_one(mut op: Op) -> Op {
    if let Op::Linear { outputs, .. } = &mut op {
        let mut joined: Vec<Output> = Vec::with_capacity(outputs.len());
        for output in outputs.drain(..) {
            match joined.last().and_then(|last| both_in_one(last, &output)) {
                Some(both) => {
                    joined.pop();
                    joined.push(both);
                }
                None => joined.push(output),
            }
        }
        *outputs = joined;
    }
    op
}

fn both_in_one(first: &Output, second: &Output) -> Option<Output> {
    let (a, b) = (&first.out, &second.out);
    let whole = View {
        width: a.width + b.width,
        ..a.clone()
    };
    let side_by_side = *b == whole.columns(a.width, b.width);
    let stored = [first, second].map(|output| output.epilogue) == [Epilogue::Store; 2];
    let w = first.w.with(&second.w)?;
    (side_by_side && stored).then_some(Output {
        w,
        out: whole,
        epilogue: Epilogue::Store,
    })
}

/// Norms in the products that read them, where nothing else does.
fn with_norms(ops: &[Op]) -> Vec<Op> {
    let mut all: Vec<Option<Op>> = ops.iter().cloned().map(Some).collect();
    for (i, op) in ops.iter().enumerate() {
        if let Op::RmsNorm {
            x,
            norm,
            n_groups: 1,
            out,
        } = op
            && let Some(readers) = readers_of_norm(x, out, &ops[i + 1..], ops)
        {
            all[i] = None;
            for at in readers {
                if let Some(
                    Op::Linear {
                        x: from, norm: own, ..
                    }
                    | Op::Experts {
                        x: from, norm: own, ..
                    },
                ) = &mut all[i + 1 + at]
                {
                    (*from, *own) = (x.clone(), Some(norm.clone()));
                }
            }
        }
    }
    all.into_iter().flatten().collect()
}

/// Where `rest` reads the norm `out` of `x`, if only products do that can take `x` instead. `step` is what `rest` is the
/// end of.
fn readers_of_norm(x: &View, out: &View, rest: &[Op], step: &[Op]) -> Option<Vec<usize>> {
    let mut readers = Vec::new();
    let mut is_there = true;
    for (at, op) in rest.iter().enumerate() {
        let (read, written) = uses(op);
        if read.iter().any(|read| read.buffer == out.buffer) {
            if !is_there || !takes_norm(op, x, out) {
                return None;
            }
            readers.push(at);
        }
        let is_part = |written: &&View| written.buffer == out.buffer && *written != out;
        if written.iter().any(is_part) {
            return None;
        }
        if written.contains(&out) {
            return (!readers.is_empty()).then_some(readers);
        }
        is_there &= !written.iter().any(|written| written.buffer == x.buffer);
    }
    let rest = Rest {
        step: &[],
        next: match step.last() {
            Some(Op::Sample(_)) => step,
            _ => &[],
        },
    };
    (!readers.is_empty() && is_dead(out, rest)).then_some(readers)
}

/// The tallest matrix of floats whose product has the norm before it: taller ones take long enough for a norm of their own.
const MAX_NORMED: usize = 8192;

/// Whether `op` multiplies `normed`, and can compute it from `x`.
fn takes_norm(op: &Op, x: &View, normed: &View) -> bool {
    // Kernels that multiply many rows by floats have no norm, and those for few read its weights with each pair of rows.
    let are_few = RowClass::of(x.n_rows) != RowClass::Many;
    let pays = |w: &Matrix| match w.kind().form() {
        Form::Int8(_) => true,
        Form::Float => are_few && w.n() <= MAX_NORMED,
    };
    let apart = |out: &View| out.buffer != x.buffer;
    match op {
        Op::Linear {
            x: from,
            norm: None,
            outputs,
        } => {
            let fits = |o: &Output| pays(&o.w) && apart(&o.out);
            from == normed && outputs.iter().all(fits)
        }
        Op::Experts {
            x: from,
            norm: None,
            outputs,
            ..
        } => from == normed && outputs.iter().all(|o| apart(&o.out)),
        _ => false,
    }
}

/// A product and the sum that it is added to.
fn with_sum(before: &Op, op: &Op, rest: Rest<'_>) -> Option<Op> {
    let Op::Linear {
        x: from,
        norm,
        outputs,
    } = before
    else {
        return None;
    };
    let (Op::Add { x, y }, [product]) = (op, &outputs[..]) else {
        return None;
    };
    let stored = product.epilogue == Epilogue::Store;
    let fits = stored && *y == product.out && x.buffer != from.buffer;
    (fits && is_dead(y, rest)).then(|| Op::Linear {
        x: from.clone(),
        norm: norm.clone(),
        outputs: vec![Output {
            w: product.w.clone(),
            out: x.clone(),
            epilogue: Epilogue::Add,
        }],
    })
}

/// A gate and what it is multiplied with, from adjacent matrices, and the gating.
fn with_gate(before: &Op, op: &Op, rest: Rest<'_>) -> Option<Op> {
    let Op::Linear { x, norm, outputs } = before else {
        return None;
    };
    let (
        Op::Gate {
            activation,
            gate,
            up,
        },
        [first, second],
    ) = (op, &outputs[..])
    else {
        return None;
    };
    let stored = [first, second].map(|output| output.epilogue) == [Epilogue::Store; 2];
    let w = first.w.with(&second.w)?;
    let fits = stored && *gate == first.out && *up == second.out && gate.width == up.width;
    (fits && gate.buffer != x.buffer && is_dead(up, rest)).then(|| Op::Linear {
        x: x.clone(),
        norm: norm.clone(),
        outputs: vec![Output {
            w,
            out: gate.clone(),
            epilogue: Epilogue::Gate(*activation),
        }],
    })
}

/// The same of experts.
fn with_gate_of_experts(before: &Op, op: &Op, rest: Rest<'_>) -> Option<Op> {
    let Op::Experts {
        x,
        norm,
        choice,
        routes,
        outputs,
    } = before
    else {
        return None;
    };
    let (
        Op::Gate {
            activation,
            gate,
            up,
        },
        [first, second],
    ) = (op, &outputs[..])
    else {
        return None;
    };
    let stored = [first, second].map(|output| output.epilogue) == [Epilogue::Store; 2];
    let w = first.w.with(&second.w)?;
    let fits = stored && *gate == first.out && *up == second.out && gate.width == up.width;
    (fits && gate.buffer != x.buffer && is_dead(up, rest)).then(|| Op::Experts {
        x: x.clone(),
        norm: norm.clone(),
        choice: choice.clone(),
        routes: routes.clone(),
        outputs: vec![ExpertOutput {
            w,
            out: gate.clone(),
            epilogue: Epilogue::Gate(*activation),
        }],
    })
}

/// The choice of a row's experts, by its scores alone, and products with their matrices.
fn with_choice(before: &Op, op: &Op) -> Option<Op> {
    let (
        Op::Route {
            scores,
            bias: None,
            routing,
            routes,
        },
        Op::Experts {
            x,
            norm,
            choice: None,
            routes: same,
            outputs,
        },
    ) = (before, op)
    else {
        return None;
    };
    let apart = outputs.iter().all(|o| o.out.buffer != scores.buffer);
    (routes == same && routes.n_rows == 1 && x.n_rows == 1 && apart).then(|| Op::Experts {
        x: x.clone(),
        norm: norm.clone(),
        choice: Some((scores.clone(), *routing)),
        routes: routes.clone(),
        outputs: outputs.clone(),
    })
}

/// A copy and the gate whose factor it is.
fn without_copy(before: &Op, op: &Op, rest: Rest<'_>) -> Option<Op> {
    let Op::Copy { x: copy, y: from } = before else {
        return None;
    };
    let Op::Gate {
        activation,
        gate,
        up,
    } = op
    else {
        return None;
    };
    let fits = up == copy && from.buffer != gate.buffer;
    (fits && is_dead(copy, rest)).then(|| Op::Gate {
        activation: *activation,
        gate: gate.clone(),
        up: from.clone(),
    })
}

/// What experts give and the residual that it is added to.
fn with_residual(before: &Op, op: &Op, rest: Rest<'_>) -> Option<Op> {
    let Op::Combine {
        routes,
        y: given,
        adds: false,
        out,
    } = before
    else {
        return None;
    };
    let Op::Add { x, y } = op else {
        return None;
    };
    let fits = y == out && x.buffer != given.buffer;
    (fits && is_dead(out, rest)).then(|| Op::Combine {
        routes: routes.clone(),
        y: given.clone(),
        adds: true,
        out: x.clone(),
    })
}

/// Heads of one row of each sequence and the attention that reads them; nothing else may read the rotated queries.
fn with_attention(before: &Op, op: &Op) -> Option<Op> {
    let Op::Heads { heads, cache } = before else {
        return None;
    };
    let Op::Attention {
        shape,
        sinks,
        q,
        sequences,
        cache: same,
        most_len: Some(most_len),
        is_causal: true,
        out,
    } = op
    else {
        return None;
    };
    let fits = decodes(shape.head_dim)
        && *q == heads.qkv.columns(0, q.width)
        && (sequences.n_rows, sequences, same) == (1, &heads.sequences, cache);
    fits.then(|| Op::Decode {
        heads: heads.clone(),
        shape: *shape,
        sinks: sinks.clone(),
        cache: cache.clone(),
        most_len: *most_len,
        reads_last: false,
        out: out.clone(),
    })
}

/// A norm of all queries or keys of a row, and the attention that reads them.
fn of_whole(before: &Op, op: &Op, rest: Rest<'_>) -> Option<Op> {
    let (
        Op::RmsNorm {
            x,
            norm,
            n_groups: 1,
            out,
        },
        Op::Decode {
            heads,
            shape,
            sinks,
            cache,
            most_len,
            reads_last,
            out: given,
        },
    ) = (before, op)
    else {
        return None;
    };
    let HeadInputs {
        qkv,
        q_norm,
        k_norm,
        ..
    } = heads;
    let n_keys = shape.n_kv_heads * shape.head_dim;
    let n_cached = if heads.has_keys { cache.n_vectors() } else { 0 };
    let n_queries = qkv.width.checked_sub(n_cached * shape.head_dim)?;
    let is_plain = n_queries == shape.n_heads * shape.head_dim;
    let is_free = heads.whole_norms || (q_norm, k_norm) == (&None, &None);
    let is_other = |other: &Option<Norm>| other.as_ref().is_none_or(|other| other.1 == norm.1);
    let mut heads = heads.clone();
    heads.whole_norms = true;
    if *x == qkv.columns(0, n_queries) && q_norm.is_none() && is_other(k_norm) {
        heads.q_norm = Some(norm.clone());
    } else if heads.has_keys
        && *x == qkv.columns(n_queries, n_keys)
        && k_norm.is_none()
        && is_other(q_norm)
    {
        heads.k_norm = Some(norm.clone());
    } else {
        return None;
    }
    let fits = x == out && is_plain && is_free;
    (fits && is_dead(x, rest)).then(|| Op::Decode {
        heads,
        shape: *shape,
        sinks: sinks.clone(),
        cache: cache.clone(),
        most_len: *most_len,
        reads_last: *reads_last,
        out: given.clone(),
    })
}

/// What comes after an operation: the rest of its step, and the step after it.
#[derive(Clone, Copy)]
struct Rest<'a> {
    step: &'a [Op],
    next: &'a [Op],
}

/// Whether `view` is written before its buffer is next read, considering what may come after `rest`.
fn is_dead(view: &View, rest: Rest<'_>) -> bool {
    for op in rest.step.iter().chain(rest.next) {
        let (read, written) = uses(op);
        if read.iter().any(|read| read.buffer == view.buffer) {
            return false;
        }
        if written.contains(&view) {
            return true;
        }
    }
    false
}

/// What `op` reads, and what it writes.
fn uses(op: &Op) -> (Vec<&View>, Vec<&View>) {
    match op {
        Op::Embed { out, .. } => (vec![], vec![out]),
        Op::RmsNorm { x, out, .. } | Op::LayerNorm { x, out, .. } => (vec![x], vec![out]),
        Op::Linear { x, outputs, .. } => {
            let sums = outputs.iter().filter(|o| o.epilogue == Epilogue::Add);
            let read = std::iter::once(x).chain(sums.map(|output| &output.out));
            let written = outputs.iter().map(|output| &output.out);
            (read.collect(), written.collect())
        }
        Op::Copy { x, y } => (vec![y], vec![x]),
        Op::Add { x, y } | Op::Multiply { x, y } => (vec![x, y], vec![x]),
        Op::AddBias { x, .. }
        | Op::Scale { x, .. }
        | Op::Softcap { x, .. }
        | Op::Normalize { x, .. }
        | Op::Apply { x, .. } => (vec![x], vec![x]),
        Op::Blend { x, y, shares } => (vec![x, y, shares], vec![x]),
        Op::Gate { gate, up, .. } => (vec![gate, up], vec![gate]),
        Op::GateBy { x, gate, .. } => (vec![x, gate], vec![x]),
        Op::Rotate { x, out, .. } => (vec![x], vec![out]),
        Op::AddGated { x, y, gate } => (vec![x, y, gate], vec![x]),
        Op::GateHeads { x, q, .. } => (vec![x, q], vec![x]),
        Op::Convolve { x, out, .. } => (vec![x], vec![out]),
        Op::ScanPrepare { x, gates, .. } => {
            let read = [x, &gates.steps].into_iter().chain(&gates.beta);
            (read.collect(), vec![x])
        }
        Op::Scan { x, out, .. } => (vec![x], vec![out]),
        Op::Step {
            x,
            gate,
            steps,
            beta,
            out,
            ..
        } => {
            let read = [x, gate, steps].into_iter().chain(beta);
            (read.collect(), vec![out])
        }
        Op::Mamba { x, dt, b, c, .. } => (vec![x, dt, b, c], vec![x]),
        Op::Previous { x, .. } => (vec![x], vec![]),
        Op::TokenShift { x, added, out, .. } => {
            (std::iter::once(x).chain(added).collect(), vec![out])
        }
        Op::Wkv4 { r, k, v, out, .. } => (vec![r, k, v], vec![out]),
        Op::WkvPrepare { k, inputs, out, .. } => {
            let mut read = inputs.views();
            read.push(k);
            (read, vec![out])
        }
        Op::Wkv { inputs, out, .. } => (inputs.views(), vec![out]),
        Op::WkvFinish {
            inputs, gate, x, ..
        } => {
            let mut read = inputs.views();
            read.extend([gate, x]);
            (read, vec![x])
        }
        Op::Route { scores, .. } => (vec![scores], vec![]),
        Op::Experts {
            x, choice, outputs, ..
        } => {
            let scores = choice.iter().map(|(scores, _)| scores);
            let written = outputs.iter().map(|o| &o.out);
            (
                std::iter::once(x).chain(scores).collect(),
                written.collect(),
            )
        }
        Op::Combine { y, adds, out, .. } => {
            let sum = adds.then_some(out);
            (std::iter::once(y).chain(sum).collect(), vec![out])
        }
        Op::Heads { heads, .. } => (vec![&heads.qkv], vec![&heads.qkv]),
        Op::Decode { heads, out, .. } => (vec![&heads.qkv], vec![out]),
        Op::ExpertBias { x, .. } => (vec![x], vec![x]),
        Op::Attention { q, out, .. } => (vec![q], vec![out]),
        Op::Sample(sample) => (vec![&sample.logits], vec![&sample.logits]),
    }
}
