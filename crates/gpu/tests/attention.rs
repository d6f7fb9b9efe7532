//! Preparing heads, caches, and attention, against the CPU.

use crate::common::{
    Random, device, devices, emulated, floats, nmse, run, scalar, spread, spread_rows,
};
use sterna_gpu::kernels::attention::{
    Angles, AttentionShape, CacheLayer, CacheType, CachedValues, HeadNorms, Heads, PAGE_LEN,
    RopeLayout, Scores, Split, SplitKv, SplitKvStates, attention, decode, prepare_heads,
};
use sterna_gpu::kernels::norm::rms_norm;
use sterna_gpu::kernels::{Rows, SequenceRows, Sequences, sequence_table};
use sterna_gpu::memory::{Buffer, Upload};
use sterna_gpu::{AdapterKind, Device, DeviceOptions, GpuError, Recorder};
use sterna_kernels::attention as cpu;
use sterna_kernels::{norm, rope};

/// A layer, and how it is tested.
#[derive(Debug, Clone, Copy)]
struct Case {
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    rope_dim: usize,
    layout: RopeLayout,
    norms: bool,
    dtype: CacheType,
    cached: CachedValues,
    softcap: Option<f32>,
    window: Option<usize>,
    sinks: bool,
    /// Whether something as long follows each query.
    gated: bool,
    causal: bool,
    scale: f32,
    /// Whether rows begin where vectors do.
    aligned: bool,
}

const PLAIN: Case = Case {
    n_heads: 4,
    n_kv_heads: 2,
    head_dim: 64,
    rope_dim: 64,
    layout: RopeLayout::Halves,
    norms: false,
    dtype: CacheType::F32,
    cached: CachedValues::Own,
    softcap: None,
    window: None,
    sinks: false,
    gated: false,
    causal: true,
    scale: 0.3,
    aligned: false,
};

const EPS: f32 = 1e-5;

/// `n` pages in any order, of as many and a few more, and how many there are.
fn shuffled(n: usize, seed: u64) -> (Vec<u32>, usize) {
    let n_all = n + 3;
    let mut pages: Vec<u32> = (0..n_all as u32).collect();
    let mut random = Random::new(seed);
    for i in (1..n_all).rev() {
        pages.swap(i, random.below(i as u32 + 1) as usize);
    }
    pages.truncate(n);
    (pages, n_all)
}

/// A cache with the keys and values of one sequence.
struct Own {
    layer: CacheLayer,
    pages: Vec<u32>,
}

impl Own {
    fn new(
        device: &Device,
        (n_kv_heads, head_dim): (usize, usize),
        dtype: CacheType,
        capacity: usize,
    ) -> Own {
        let heads = (n_kv_heads, head_dim);
        Own::with_values(device, heads, dtype, CachedValues::Own, capacity)
    }

    fn with_values(
        device: &Device,
        (n_kv_heads, head_dim): (usize, usize),
        dtype: CacheType,
        cached: CachedValues,
        capacity: usize,
    ) -> Own {
        let (pages, n_all) = shuffled(capacity.div_ceil(PAGE_LEN), head_dim as u64);
        let layer = CacheLayer::new(device, n_kv_heads, head_dim, dtype, cached, n_all).unwrap();
        Own { layer, pages }
    }

    /// A table for `n_rows` of the sequence, the first at `position`, after another sequence.
    fn table(&self, device: &Device, position: usize, n_rows: usize) -> Buffer {
        let own = SequenceRows {
            position,
            first_row: 0,
            n_rows,
            // Angles are in the order of positions.
            first_angle: position,
            pages: &self.pages,
            place: 0,
        };
        let other = SequenceRows {
            position: 99,
            n_rows: 7,
            ..own
        };
        let words = sequence_table(&[other, own], self.pages.len());
        device.upload(&words).unwrap()
    }

    /// The second sequence of the table.
    fn sequences<'a>(&self, table: &'a Buffer, n_rows: usize) -> Sequences<'a> {
        Sequences {
            table,
            n_all: 2,
            page_stride: self.pages.len(),
            first: 1,
            n: 1,
            n_rows,
        }
    }
}

/// Room for the rows of one sequence.
fn room(
    device: &Device,
    n_rows: usize,
    n_heads: usize,
    head_dim: usize,
    most_len: usize,
) -> SplitKvStates {
    let len = SplitKvStates::len((1, n_rows), (n_heads, head_dim), most_len);
    SplitKvStates::new(device, len).unwrap()
}

/// Scores of sinks: below, among, and above those of positions.
fn sinks(n_heads: usize) -> Vec<f32> {
    let scores = [-40.0, 0.5, 3.0, 30.0];
    scores.iter().copied().cycle().take(n_heads).collect()
}

/// How far attention may be from the CPU's, where a code in the cache is off by one. Compilers for hardware fuse a
/// rotation's products with its sums, which moves more of them.
fn bound(device: &Device, dtype: CacheType) -> f64 {
    match (dtype, device.info().kind) {
        (CacheType::F32, _) => 1e-11,
        (CacheType::F16, _) => 2e-8,
        (CacheType::Q8_0, AdapterKind::Software) => 1e-6,
        (CacheType::Q8_0, _) => 1e-5,
    }
}

/// How far two kernels may be apart that cache the same keys: in the order of sums, and on hardware, where products and
/// sums may be fused in one and not in the other, by codes that are off by one.
fn near(device: &Device, dtype: CacheType) -> f64 {
    match device.info().kind {
        AdapterKind::Software => 1e-12,
        _ if dtype == CacheType::F32 => 1e-12,
        _ => 3.0 * bound(device, dtype),
    }
}

impl Case {
    /// What is added to the bound where `m` rows are computed by cooperative matrices, which round queries and weights to
    /// f16: 2^-12 of each on average.
    fn coop_bound(&self, device: &Device, m: usize) -> f64 {
        let is_coop = device.has_matrix_units()
            && self.dtype != CacheType::F32
            && self.head_dim <= 128
            && m.next_power_of_two() * self.n_heads / self.n_kv_heads >= 64;
        if is_coop { 2e-7 } else { 0.0 }
    }

    fn width(&self) -> usize {
        (self.n_heads + self.cached.per_head() * self.n_kv_heads) * self.head_dim
    }

    /// Elements of the queries of a row on the device.
    fn q_width(&self) -> usize {
        let queries = self.n_heads * self.head_dim;
        if self.gated { 2 * queries } else { queries }
    }

    /// Rows as the device has them.
    fn on_device(&self, rows: &[f32]) -> Vec<f32> {
        if !self.gated {
            return rows.to_vec();
        }
        let mut all = Vec::new();
        for row in rows.chunks(self.width()) {
            let (q, kv) = row.split_at(self.n_heads * self.head_dim);
            for head in q.chunks(self.head_dim) {
                all.extend(head);
                all.extend(std::iter::repeat_n(1e3, self.head_dim));
            }
            all.extend(kv);
        }
        all
    }

    /// Runs batches of `lens` rows one after the other on the device, with each kernel, and checks each
    /// against the CPU.
    fn check(&self, device: &Device, lens: &[usize]) {
        let Case {
            n_heads,
            n_kv_heads,
            head_dim,
            ..
        } = *self;
        let what = format!("{self:?} {lens:?} {:?}", device.features().names());
        let total: usize = lens.iter().sum();
        // Room for longer contexts than there are, so that splits are long.
        let capacity = total + 4001;
        let qkv = floats(total * self.width(), 1);
        let pairs = self.rope_dim / 2;
        let turn = |f: fn(f32) -> f32| -> Vec<f32> {
            (0..total * pairs)
                .map(|i| f((i / pairs.max(1)) as f32 / (1.0 + (i % pairs.max(1)) as f32)))
                .collect()
        };
        let (cos, sin) = (turn(f32::cos), turn(f32::sin));
        let table: Vec<f32> = cos.iter().zip(&sin).flat_map(|(c, s)| [*c, *s]).collect();
        let table = device.upload(&table).unwrap();
        let (q_norm, k_norm) = (floats(head_dim, 2), floats(head_dim, 3));
        let norm_buffers = [
            device.upload(&q_norm).unwrap(),
            device.upload(&k_norm).unwrap(),
        ];
        let norms = HeadNorms {
            whole: false,
            q: self.norms.then_some(&norm_buffers[0]),
            k: self.norms.then_some(&norm_buffers[1]),
            eps: EPS,
        };
        let of_capacity = |capacity: usize| {
            let heads = (n_kv_heads, head_dim);
            Own::with_values(device, heads, self.dtype, self.cached, capacity)
        };
        let own = of_capacity(capacity);
        let cache = &own.layer;
        // Filled by `decode`, where possible.
        let twin = &of_capacity(capacity).layer;
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            scale: self.scale,
            softcap: self.softcap,
            window: self.window,
        };
        let of_heads = self.sinks.then(|| sinks(n_heads));
        let of_heads = of_heads.map(|sinks| device.upload(&sinks).unwrap());
        let scores = Scores {
            shape: &shape,
            sinks: of_heads.as_ref(),
            is_causal: self.causal,
        };
        let mut pages: Vec<cpu::KvPage> = Vec::new();
        let mut pos = 0;
        for &m in lens {
            let inputs = &qkv[pos * self.width()..][..m * self.width()];
            let given = self.on_device(inputs);
            let row = given.len() / m;
            let (offset, stride) = match self.aligned {
                true => (4, row.next_multiple_of(4) + 4),
                false => (5, row + 3),
            };
            let [buffer, untouched, others] =
                [(); 3].map(|()| spread(device, &given, row, offset, stride));
            let rows = spread_rows(&buffer, m, row, offset, stride);
            let q = rows.columns(0, self.q_width());
            let sequences = own.table(device, pos, m);
            let sequences = own.sequences(&sequences, m);
            let width = n_heads * head_dim;
            let out = device.buffer("out", (m * width * 4) as u64).unwrap();
            let out_rows = Rows::new(&out, m, width);
            let angles = Angles {
                table: &table,
                pairs,
                layout: self.layout,
            };
            let heads = Heads {
                qkv: rows,
                has_keys: true,
                norms,
                angles,
                sequences,
            };
            let got = run(device, &out, m * width, |r| {
                prepare_heads(r, &heads, n_heads, cache)?;
                attention(r, scores, q, sequences, cache, Split::Queries, out_rows)
            });
            let want = self.expected(inputs, [&cos, &sin], [&q_norm, &k_norm], pos, &mut pages);
            let error = nmse(&got, &want);
            // Sums in another order, and exponentials, are off by some 1e-7. With halves and bytes the CPU
            // rounds queries and weights to 13 to 16 bits: 2^-13 of each, 5e-9 in squares. A code of a byte
            // that falls to the other side of a half is off by 1/127 of the largest.
            // What scores are off by grows with them.
            let steepness = f64::from(self.scale / PLAIN.scale).powi(2);
            let bound = steepness * (bound(device, self.dtype) + self.coop_bound(device, m));
            assert!(error < bound, "{what} at {pos}: {error:e}");

            // Queries of a layer that has no keys of its own.
            let queries = Heads {
                qkv: spread_rows(&others, m, row, offset, stride).columns(0, self.q_width()),
                has_keys: false,
                ..heads
            };
            // Those of one position prepare their heads themselves, and leave them as they are.
            if m == 1 && head_dim <= 256 && self.causal {
                let states = room(device, 1, n_heads, head_dim, pos + 1);
                let split_kv = SplitKv {
                    states: &states,
                    most_len: pos + 1,
                };
                let fused = run(device, &out, width, |r| {
                    decode(r, scores, &queries, cache, split_kv, out_rows)
                });
                let error = nmse(&fused, &got);
                let near = near(device, self.dtype) * ((pos + 1) as f64 / 1000.0).max(1.0);
                let bound = if self.norms { bound.max(near) } else { near };
                assert!(error < bound, "{what} at {pos}, queries in one: {error:e}");
            }
            let shared = run(device, &out, m * width, |r| {
                prepare_heads(r, &queries, n_heads, cache)?;
                let split = Split::Queries;
                attention(r, scores, queries.qkv, sequences, cache, split, out_rows)
            });
            assert_eq!(shared, got, "{what} at {pos}, queries alone");

            let heads = Heads {
                qkv: spread_rows(&untouched, m, row, offset, stride),
                ..heads
            };
            if m > 1 {
                run(device, &out, 0, |r| prepare_heads(r, &heads, n_heads, twin));
            }
            // The mean of more positions is smaller in relation to the errors of its terms.
            let near = near(device, self.dtype) * ((pos + m) as f64 / 1000.0).max(1.0);
            // A context may be shorter than the longest that commands are for.
            for most_len in [pos + m, pos + m + 70, pos + m + 4000] {
                if m > 9 {
                    continue;
                }
                let states = room(device, m, n_heads, head_dim, most_len);
                if !self.causal {
                    let split = Split::Kv(SplitKv {
                        states: &states,
                        most_len,
                    });
                    let mut recorder = Recorder::new(device);
                    let refused =
                        attention(&mut recorder, scores, q, sequences, cache, split, out_rows);
                    assert!(matches!(refused, Err(GpuError::Unsupported { .. })));
                    continue;
                }
                let split_kv = SplitKv {
                    states: &states,
                    most_len,
                };
                let by_split_kv = run(device, &out, m * width, |r| {
                    attention(
                        r,
                        scores,
                        q,
                        sequences,
                        cache,
                        Split::Kv(split_kv),
                        out_rows,
                    )
                });
                let error = nmse(&by_split_kv, &got);
                assert!(error < near, "{what} at {pos}, split-KV: {error:e}");
                if m == 1 && head_dim > 256 {
                    let refused = decode(
                        &mut Recorder::new(device),
                        scores,
                        &heads,
                        twin,
                        split_kv,
                        out_rows,
                    );
                    assert!(refused.is_err(), "{what}");
                } else if m == 1 {
                    let fused = run(device, &out, width, |r| {
                        decode(r, scores, &heads, twin, split_kv, out_rows)
                    });
                    let error = nmse(&fused, &got);
                    // A norm's sum in another order may move a code to the other side of a half, besides what
                    // hardware does without one: 3.6e-8 was seen on an H200.
                    let bound = if self.norms { bound.max(near) } else { near };
                    assert!(error < bound, "{what} at {pos}, in one: {error:e}");
                }
            }
            pos += m;
        }
        // Copies give the same: one by one in other memory, and by way of the host.
        let numbered = |to: &Own| -> Vec<[u32; 2]> {
            let both = own.pages.iter().zip(&to.pages);
            both.map(|(from, to)| [*from, *to]).collect()
        };
        let [copied, restored] = [capacity + 64, capacity + 200].map(of_capacity);
        let copies = cache.copies(&copied.layer, &numbered(&copied)).unwrap();
        device.copy_all(&copies).unwrap();
        let saved = cache.read(device, &own.pages, pos).unwrap();
        let mut upload = Upload::new(device, 1 << 16, 2).unwrap();
        let pieces = cache.pieces(pos);
        assert_eq!(pieces.len(), saved.len());
        for (piece, saved) in pieces.iter().zip(&saved) {
            (restored.layer)
                .write(&mut upload, &restored.pages, piece, saved)
                .unwrap();
        }
        let again = restored.layer.read(device, &restored.pages, pos).unwrap();
        assert!(again == saved, "{what}, saved");
        let q = floats(n_heads * head_dim, 7);
        let q = device.upload(&q).unwrap();
        let q = Rows::new(&q, 1, n_heads * head_dim);
        let of = |own: &Own| {
            let out = device
                .buffer("out", (n_heads * head_dim * 4) as u64)
                .unwrap();
            let rows = Rows::new(&out, 1, n_heads * head_dim);
            let table = own.table(device, pos - 1, 1);
            let sequences = own.sequences(&table, 1);
            run(device, &out, n_heads * head_dim, |r| {
                attention(r, scores, q, sequences, &own.layer, Split::Queries, rows)
            })
        };
        assert_eq!(of(&own), of(&copied), "{what}, copied");
        assert_eq!(of(&own), of(&restored), "{what}, restored");
    }

    /// The same on the CPU, whose cache is `pages`.
    fn expected(
        &self,
        qkv: &[f32],
        [cos, sin]: [&[f32]; 2],
        [q_norm, k_norm]: [&[f32]; 2],
        pos: usize,
        pages: &mut Vec<cpu::KvPage>,
    ) -> Vec<f32> {
        let (d, exec) = (self.head_dim, scalar());
        let (q_width, kv_width) = (self.n_heads * d, self.n_kv_heads * d);
        let column = |first: usize, width: usize| -> Vec<f32> {
            let rows = qkv.chunks(self.width());
            rows.flat_map(|row| row[first..first + width].to_vec())
                .collect()
        };
        let mut q = column(0, q_width);
        let mut k = column(q_width, kv_width);
        let v = match self.cached {
            CachedValues::Own => column(q_width + kv_width, kv_width),
            CachedValues::Keys => Vec::new(),
        };
        if self.norms {
            norm::rms_norm(&exec, &mut q, q_norm, EPS).unwrap();
            norm::rms_norm(&exec, &mut k, k_norm, EPS).unwrap();
        }
        let pairs = self.rope_dim / 2;
        let m = qkv.len() / self.width();
        let [cos, sin] = [cos, sin].map(|of| &of[pos * pairs..(pos + m) * pairs]);
        for x in [&mut q, &mut k] {
            rope::rope(&exec, x, d, self.rope_dim, cos, sin, self.layout).unwrap();
        }
        for (t, k) in k.chunks(kv_width).enumerate() {
            let v = v.chunks(kv_width).nth(t).unwrap_or_default();
            let (page, place) = ((pos + t) / cpu::PAGE_LEN, (pos + t) % cpu::PAGE_LEN);
            if page == pages.len() {
                pages.push(cpu::KvPage::new(
                    self.dtype,
                    self.cached,
                    self.n_kv_heads,
                    d,
                ));
            }
            pages[page].store(&exec, place, k, v).unwrap();
        }
        let shape = AttentionShape {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: d,
            scale: self.scale,
            softcap: self.softcap,
            window: self.window,
        };
        let mut out = vec![0.0; m * q_width];
        let sinks = self.sinks.then(|| sinks(self.n_heads));
        let queries = cpu::Queries {
            shape: &shape,
            q: &q,
            pos,
            sinks: sinks.as_deref(),
            is_causal: self.causal,
        };
        cpu::attention(
            &exec,
            &queries,
            pages,
            &mut cpu::Scratch::default(),
            &mut out,
        )
        .unwrap();
        out
    }
}

const DTYPES: [CacheType; 3] = [CacheType::F32, CacheType::F16, CacheType::Q8_0];

/// With subgroups and without: kernels of attention have no other variants.
#[test]
fn every_cache_and_feature_agrees_with_the_cpu() {
    for (i, device) in devices().iter().take(2).enumerate() {
        for dtype in DTYPES {
            Case { dtype, ..PLAIN }.check(device, &[130, 1, 1, 5]);
        }
        // Each takes a pipeline of its own, whatever the cache.
        let dtype = |case: usize| DTYPES[(i + case) % DTYPES.len()];
        Case {
            dtype: dtype(0),
            window: Some(7),
            ..PLAIN
        }
        .check(device, &[20, 1, 129, 1]);
        Case {
            dtype: dtype(1),
            sinks: true,
            ..PLAIN
        }
        .check(device, &[40, 1, 3]);
        Case {
            dtype: dtype(2),
            softcap: Some(1.5),
            norms: true,
            ..PLAIN
        }
        .check(device, &[3, 1]);
    }
}

/// What cooperative matrices take, where there are many rows.
const MANY: Case = Case {
    n_heads: 8,
    dtype: CacheType::F16,
    ..PLAIN
};

/// The largest score grows from tile to tile.
const GROWING: Case = Case {
    scale: 3.0,
    head_dim: 128,
    ..MANY
};

/// Many rows, which cooperative matrices take: heads of every width that they have, and what changes scores.
#[test]
fn many_rows_agree_with_the_cpu() {
    let Some(device) = device() else { return };
    if !device.has_matrix_units() {
        eprintln!("without matrix units: the kernels for few and many rows are tested");
    }
    let case = MANY;
    for head_dim in [32, 33, 40, 80, 100, 128] {
        let rope_dim = 32;
        Case {
            head_dim,
            rope_dim,
            ..case
        }
        .check(device, &[70, 1, 33]);
    }
    for case in [
        Case {
            window: Some(40),
            ..case
        },
        Case {
            sinks: true,
            norms: true,
            ..case
        },
        Case {
            softcap: Some(1.5),
            dtype: CacheType::Q8_0,
            ..case
        },
        Case {
            gated: true,
            n_heads: 6,
            dtype: CacheType::Q8_0,
            ..case
        },
        Case {
            causal: false,
            window: Some(90),
            ..case
        },
        // The largest score grows from tile to tile.
        Case { scale: 3.0, ..case },
        Case {
            scale: 3.0,
            head_dim: 96,
            sinks: true,
            ..case
        },
        GROWING,
    ] {
        case.check(device, &[100, 37, 64]);
    }
}

#[test]
fn many_rows_by_emulated_matrix_units_agree_with_the_cpu() {
    let Some(device) = emulated() else { return };
    let case = MANY;
    for case in [
        Case {
            head_dim: 33,
            rope_dim: 32,
            window: Some(40),
            ..case
        },
        Case {
            gated: true,
            n_heads: 6,
            softcap: Some(1.5),
            dtype: CacheType::Q8_0,
            ..case
        },
        Case {
            head_dim: 96,
            causal: false,
            sinks: true,
            ..case
        },
        GROWING,
    ] {
        case.check(&device, &[70]);
    }
}

#[test]
fn sequences_of_a_batch_by_emulated_matrix_units_are_as_each_alone() {
    let Some(device) = emulated() else { return };
    let sequences = [(0, 20), (50, 64), (70, 30)];
    check_batch(&device, CacheType::Q8_0, Some(50), &sequences);
}

/// Of texts that are read as a whole, also behind others, and with a window behind each position.
#[test]
fn attention_to_all_positions_agrees_with_the_cpu() {
    for device in devices().iter().take(2) {
        for (head_dim, dtype, window) in [
            (64, CacheType::F32, None),
            (32, CacheType::F16, None),
            (80, CacheType::Q8_0, Some(7)),
        ] {
            let case = Case {
                head_dim,
                rope_dim: 0,
                dtype,
                window,
                causal: false,
                ..PLAIN
            };
            case.check(device, &[50, 1, 7, 33]);
        }
    }
}

#[test]
fn every_shape_of_heads_agrees_with_the_cpu() {
    let Some(device) = device() else { return };
    let shapes = [
        (1, 1, 1, 0),
        (3, 3, 2, 2),
        (5, 1, 6, 4),
        (20, 5, 128, 128),
        (16, 1, 80, 32),
        (12, 4, 100, 100),
        (2, 1, 256, 256),
        (9, 3, 33, 32),
        (8, 1, 4, 4),
        (6, 2, 24, 24),
        (17, 1, 64, 64),
        // Wider than what one workgroup sums.
        (4, 2, 257, 32),
        (40, 1, 576, 64),
        (3, 1, 1024, 512),
    ];
    for (i, (n_heads, n_kv_heads, head_dim, rope_dim)) in shapes.into_iter().enumerate() {
        // Every shape takes pipelines of its own, which take longer to compile than to run.
        for (layout, other) in [(RopeLayout::Halves, 0), (RopeLayout::Pairs, 1)] {
            let case = Case {
                n_heads,
                n_kv_heads,
                head_dim,
                rope_dim,
                layout,
                dtype: DTYPES[(i + other) % DTYPES.len()],
                ..PLAIN
            };
            case.check(device, &[9, 1]);
        }
    }
    for (norms, dtype) in [(true, CacheType::F32), (false, CacheType::Q8_0)] {
        let case = Case {
            gated: true,
            norms,
            dtype,
            ..PLAIN
        };
        case.check(device, &[40, 3, 1]);
    }
    // So many heads of keys that contexts aren't split; with twelve queries to each, workgroups share them.
    for (i, dtype) in DTYPES.into_iter().enumerate() {
        let case = Case {
            n_heads: [16, 32, 192][i],
            n_kv_heads: 16,
            head_dim: [40, 64, 64][i],
            rope_dim: [40, 32, 64][i],
            norms: i == 1,
            dtype,
            cached: [CachedValues::Own, CachedValues::Own, CachedValues::Keys][i],
            softcap: [Some(2.0), None, None][i],
            window: [None, Some(20), None][i],
            ..PLAIN
        };
        case.check(device, &[1, 40, 3, 1]);
    }
}

/// Rows that begin where vectors do are prepared by a kernel of their own.
#[test]
fn heads_in_vectors_agree_with_the_cpu() {
    let shapes = [
        (20, 5, 128, 128, CacheType::F16),
        (16, 1, 80, 32, CacheType::F32),
        (5, 1, 8, 8, CacheType::F16),
        (2, 1, 256, 128, CacheType::F16),
        (17, 1, 64, 0, CacheType::F32),
        (3, 1, 512, 512, CacheType::F16),
    ];
    // With subgroups and without.
    for (i, device) in devices().iter().take(2).enumerate() {
        for (j, (n_heads, n_kv_heads, head_dim, rope_dim, dtype)) in shapes.into_iter().enumerate()
        {
            for layout in [RopeLayout::Halves, RopeLayout::Pairs] {
                let case = Case {
                    n_heads,
                    n_kv_heads,
                    head_dim,
                    rope_dim,
                    layout,
                    norms: (i + j) % 2 == 0,
                    gated: j == 1,
                    dtype,
                    aligned: true,
                    ..PLAIN
                };
                case.check(device, &[9, 1, 5]);
            }
        }
    }
}

/// As of latent attention, in half the memory.
#[test]
fn values_that_are_the_keys() {
    for device in devices().iter().take(2) {
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            let latent = Case {
                n_kv_heads: 1,
                dtype,
                cached: CachedValues::Keys,
                ..PLAIN
            };
            latent.check(device, &[130, 1, 1, 5]);
            let case = Case {
                n_heads: 6,
                n_kv_heads: 2,
                head_dim: [33, 40, 100][i],
                rope_dim: [32, 8, 20][i],
                norms: i == 1,
                sinks: i == 2,
                window: [Some(7), None, None][i],
                ..latent
            };
            case.check(device, &[20, 1, 3]);
            let case = Case {
                n_heads: 16,
                head_dim: 576,
                rope_dim: 64,
                layout: RopeLayout::Pairs,
                ..latent
            };
            case.check(device, &[70, 1, 2]);
        }
        let of = |cached, n_pages| {
            CacheLayer::new(device, 1, 576, CacheType::Q8_0, cached, n_pages).unwrap()
        };
        let [keys, own] = [CachedValues::Keys, CachedValues::Own].map(|cached| of(cached, 8));
        let saved_bytes = |of: &CacheLayer| -> usize {
            let pieces = of.pieces(100);
            pieces.iter().map(|piece| piece.bytes()).sum()
        };
        assert_eq!(2 * saved_bytes(&keys), saved_bytes(&own));
        // What takes the place of values has the same size for any number of pages.
        let twice = of(CachedValues::Keys, 16).bytes();
        assert_eq!(own.bytes(), 2 * (twice - keys.bytes()));
        assert!(keys.bytes() < own.bytes() / 2 + 1024);
        assert!(keys.copies(&own, &[[0, 0]]).is_err());
        assert!(own.copies(&keys, &[[0, 0]]).is_err());
    }
}

#[test]
fn long_contexts() {
    let Some(device) = device() else { return };
    for dtype in DTYPES {
        let case = Case {
            n_heads: 8,
            n_kv_heads: 2,
            head_dim: 128,
            rope_dim: 128,
            dtype,
            ..PLAIN
        };
        case.check(device, &[400, 1, 3]);
        Case {
            window: Some(300),
            ..case
        }
        .check(device, &[400, 1]);
    }
}

#[test]
fn commands_follow_the_position() {
    // One recording, replayed as the sequence grows past the ends of splits, next to the kernels that it
    // replaces. On a device of its own, whose memory no other test uses.
    if device().is_none() {
        return;
    }
    let device = &Device::open(&DeviceOptions::default()).unwrap();
    let (n_heads, n_kv_heads, d, len) = (6, 2, 40, 70);
    let width = (n_heads + 2 * n_kv_heads) * d;
    let table: Vec<[f32; 2]> = (0..len * d / 2)
        .map(|i| [(i as f32).cos(), (i as f32).sin()])
        .collect();
    let angles = device.upload(&table).unwrap();
    for (dtype, window) in DTYPES.into_iter().flat_map(|t| [(t, None), (t, Some(40))]) {
        let caches = [(); 2].map(|()| Own::new(device, (n_kv_heads, d), dtype, len));
        let inputs = [(); 2].map(|()| device.buffer("qkv", width as u64 * 4).unwrap());
        let table = caches[0].table(device, 0, 1);
        let sequences = caches[0].sequences(&table, 1);
        let out = device.buffer("out", 2 * (n_heads * d * 4) as u64).unwrap();
        let outputs = Rows::new(&out, 2, n_heads * d);
        let states = room(device, 1, n_heads, d, len);
        let shape = AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim: d,
            scale: 0.2,
            softcap: None,
            window,
        };
        let heads = inputs.each_ref().map(|input| Heads {
            qkv: Rows::new(input, 1, width),
            has_keys: true,
            norms: HeadNorms::default(),
            angles: Angles {
                table: &angles,
                pairs: d / 2,
                layout: RopeLayout::Halves,
            },
            sequences,
        });
        let split_kv = SplitKv {
            states: &states,
            most_len: len,
        };
        let mut r = Recorder::new(device);
        decode(
            &mut r,
            &shape,
            &heads[0],
            &caches[0].layer,
            split_kv,
            outputs.rows(0, 1),
        )
        .unwrap();
        prepare_heads(&mut r, &heads[1], n_heads, &caches[1].layer).unwrap();
        attention(
            &mut r,
            &shape,
            heads[1].qkv.columns(0, n_heads * d),
            sequences,
            &caches[1].layer,
            Split::Queries,
            outputs.rows(1, 1),
        )
        .unwrap();
        let commands = r.finish().unwrap();
        let used = device.memory().used;
        for pos in 0..len {
            device
                .write(&table, 32, &(pos as u32).to_le_bytes())
                .unwrap();
            for input in &inputs {
                let values = floats(width, pos as u64);
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                device.write(input, 0, &bytes).unwrap();
            }
            device.submit(&[&commands], &[]).unwrap().wait().unwrap();
            let got: Vec<f32> = device.read(&out, 0..2 * n_heads * d).unwrap();
            let (one, two) = got.split_at(n_heads * d);
            let error = nmse(one, two);
            assert!(
                error < near(device, dtype),
                "{dtype:?} {window:?} at {pos}: {error:e}"
            );
        }
        assert_eq!(device.memory().used, used);
    }
}

#[test]
fn as_many_splits_as_there_may_be() {
    let Some(device) = device() else { return };
    let small = Case {
        n_heads: 2,
        n_kv_heads: 1,
        head_dim: 8,
        rope_dim: 8,
        ..PLAIN
    };
    // 64 splits of 32, and of 64: the state of a new position is the last of 65.
    for len in [2048, 4096] {
        small.check(device, &[len - 1, 1]);
    }
}

/// So many workgroups that invocations have two of the heads that share keys; of three and of nine, the last has none beside it.
#[test]
fn heads_that_share_keys_in_many_workgroups() {
    let Some(device) = device() else { return };
    for (share, head_dim, window) in [(2, 64, None), (3, 72, Some(1000))] {
        let case = Case {
            n_heads: 8 * share,
            n_kv_heads: 8,
            head_dim,
            rope_dim: head_dim,
            window,
            ..PLAIN
        };
        // 32 splits of 32 for each head of keys.
        case.check(device, &[1000, 3, 1]);
    }
}

/// Heads that are not rotated, in a cache of some capacity.
struct Unrotated<'a> {
    device: &'a Device,
    cache: Own,
    shape: AttentionShape,
    nothing: Buffer,
}

impl Unrotated<'_> {
    const N_HEADS: usize = 4;
    const N_KV_HEADS: usize = 2;
    const HEAD_DIM: usize = 32;
    const Q_WIDTH: usize = Self::N_HEADS * Self::HEAD_DIM;
    const WIDTH: usize = (Self::N_HEADS + 2 * Self::N_KV_HEADS) * Self::HEAD_DIM;

    /// With the first `len` positions of a sequence.
    fn new(
        device: &Device,
        dtype: CacheType,
        window: Option<usize>,
        (len, capacity): (usize, usize),
    ) -> Unrotated<'_> {
        let heads = Unrotated {
            device,
            cache: Own::new(device, (Self::N_KV_HEADS, Self::HEAD_DIM), dtype, capacity),
            shape: AttentionShape {
                n_heads: Self::N_HEADS,
                n_kv_heads: Self::N_KV_HEADS,
                head_dim: Self::HEAD_DIM,
                scale: 0.2,
                softcap: None,
                window,
            },
            nothing: device.upload(&[0.0f32; 2]).unwrap(),
        };
        let rows = device.upload(&floats(len * Self::WIDTH, 1)).unwrap();
        let rows = Rows::new(&rows, len, Self::WIDTH);
        heads.run(rows, 0, |r, heads, all, _| {
            prepare_heads(r, all, Self::N_HEADS, &heads.cache.layer)
        });
        heads
    }

    /// The result of `record` on `qkv`, the first of its rows at `pos`.
    fn run(
        &self,
        qkv: Rows<'_>,
        pos: usize,
        record: impl FnOnce(&mut Recorder, &Self, &Heads<'_>, Rows<'_>) -> Result<(), GpuError>,
    ) -> Vec<f32> {
        let table = self.cache.table(self.device, pos, qkv.n_rows);
        let all = Heads {
            qkv,
            has_keys: true,
            norms: HeadNorms::default(),
            angles: Angles {
                table: &self.nothing,
                pairs: 0,
                layout: RopeLayout::Halves,
            },
            sequences: self.cache.sequences(&table, qkv.n_rows),
        };
        let len = qkv.n_rows * Self::Q_WIDTH;
        let out = self.device.buffer("out", len as u64 * 4).unwrap();
        let rows = Rows::new(&out, qkv.n_rows, Self::Q_WIDTH);
        run(self.device, &out, len, |r| record(r, self, &all, rows))
    }

    /// Attention of the queries of `qkv` at `pos`, whole or split-KV.
    fn attend(&self, qkv: Rows<'_>, pos: usize, split_kv: Option<SplitKv<'_>>) -> Vec<f32> {
        self.run(qkv, pos, |r, heads, all, out| {
            let q = qkv.columns(0, Self::Q_WIDTH);
            let split = split_kv.map_or(Split::Queries, Split::Kv);
            let (cache, sequences) = (&heads.cache.layer, all.sequences);
            attention(r, &heads.shape, q, sequences, cache, split, out)
        })
    }

    fn decode(&self, qkv: Rows<'_>, pos: usize, split_kv: SplitKv<'_>) -> Vec<f32> {
        self.run(qkv, pos, |r, heads, all, out| {
            decode(r, &heads.shape, all, &heads.cache.layer, split_kv, out)
        })
    }

    fn states(&self, most_len: usize) -> SplitKvStates {
        room(self.device, 1, Self::N_HEADS, Self::HEAD_DIM, most_len)
    }

    /// A row of the sequence after those in the cache.
    fn next_row(&self) -> Buffer {
        self.device.upload(&floats(Self::WIDTH, 2)).unwrap()
    }
}

#[test]
fn positions_behind_the_longest_context_are_not_seen() {
    for device in devices() {
        for dtype in DTYPES {
            let long = Unrotated::new(device, dtype, None, (150, 256));
            let short = Unrotated::new(device, dtype, None, (64, 65));
            let row = long.next_row();
            let row = Rows::new(&row, 1, Unrotated::WIDTH);
            let states = long.states(64);
            let split_kv = SplitKv {
                states: &states,
                most_len: 64,
            };
            let want = short.attend(row, 63, None);
            let error = nmse(&long.attend(row, 150, Some(split_kv)), &want);
            assert!(error < near(device, dtype), "{dtype:?}: {error:e}");
            let want = short.run(row, 64, |r, heads, all, out| {
                prepare_heads(r, all, Unrotated::N_HEADS, &heads.cache.layer)?;
                let q = row.columns(0, Unrotated::Q_WIDTH);
                let (shape, cache) = (&heads.shape, &heads.cache.layer);
                attention(r, shape, q, all.sequences, cache, Split::Queries, out)
            });
            let error = nmse(&long.decode(row, 150, split_kv), &want);
            assert!(error < near(device, dtype), "{dtype:?}, decoded: {error:e}");
        }
    }
}

#[test]
fn a_position_that_has_no_room_leaves_the_cache_as_it_is() {
    for device in devices() {
        for (dtype, window) in DTYPES.into_iter().flat_map(|t| [(t, None), (t, Some(60))]) {
            let full = Unrotated::new(device, dtype, window, (64, 64));
            let row = full.next_row();
            let row = Rows::new(&row, 1, Unrotated::WIDTH);
            let states = full.states(64);
            let split_kv = SplitKv {
                states: &states,
                most_len: 64,
            };
            let before = full.attend(row, 63, None);
            for pos in [64, 100] {
                let want = full.attend(row, pos, None);
                let error = nmse(&full.decode(row, pos, split_kv), &want);
                assert!(
                    error < near(device, dtype),
                    "{dtype:?} {window:?} at {pos}: {error:e}"
                );
            }
            assert_eq!(full.attend(row, 63, None), before, "{dtype:?} {window:?}");
        }
    }
}

#[test]
fn wrong_shapes_are_refused() {
    let Some(device) = device() else { return };
    let new = |n_kv_heads, head_dim, dtype, n_pages| {
        CacheLayer::new(
            device,
            n_kv_heads,
            head_dim,
            dtype,
            CachedValues::Own,
            n_pages,
        )
    };
    assert!(new(1, 1025, CacheType::F32, 8).is_err());
    assert!(new(1 << 20, 256, CacheType::F32, 1 << 20).is_err());
    let cache = new(2, 8, CacheType::F16, 8).unwrap();
    let other = new(2, 8, CacheType::F16, 4).unwrap();
    let wider = new(2, 16, CacheType::F16, 8).unwrap();
    assert!(cache.copies(&other, &[[5, 3]]).is_ok());
    assert!(cache.copies(&other, &[[5, 4]]).is_err(), "no such page");
    assert!(cache.copies(&other, &[[8, 0]]).is_err(), "no such page");
    assert!(cache.copies(&wider, &[[0, 0]]).is_err(), "other heads");
    assert!(cache.read(device, &[7], PAGE_LEN).is_ok());
    assert!(cache.read(device, &[7], PAGE_LEN + 1).is_err(), "too long");
    assert!(cache.read(device, &[8], 1).is_err(), "no such page");
    let piece = &cache.pieces(1)[0];
    let one = vec![0; piece.bytes()];
    let mut upload = Upload::new(device, 1 << 16, 2).unwrap();
    let mut write = |pages: &[u32], bytes: &[u8]| cache.write(&mut upload, pages, piece, bytes);
    assert!(write(&[7], &one).is_ok());
    assert!(write(&[8], &one).is_err(), "no such page");
    assert!(write(&[], &one).is_err(), "no pages");
    assert!(write(&[7], &one[4..]).is_err(), "too few bytes");
    let buffer = device.buffer("rows", 4096).unwrap();
    let table = sequence_table(
        &[SequenceRows {
            position: 0,
            first_row: 0,
            n_rows: 1,
            first_angle: 0,
            pages: &[0],
            place: 0,
        }],
        1,
    );
    let table = device.upload(&table).unwrap();
    let sequences = Sequences {
        table: &table,
        n_all: 1,
        page_stride: 1,
        first: 0,
        n: 1,
        n_rows: 1,
    };
    let angles = Angles {
        table: &buffer,
        pairs: 4,
        layout: RopeLayout::Halves,
    };
    let mut r = Recorder::new(device);
    let heads = |width: usize| Heads {
        qkv: Rows::new(&buffer, 1, width),
        has_keys: true,
        norms: HeadNorms::default(),
        angles,
        sequences,
    };
    assert!(prepare_heads(&mut r, &heads(7 * 8), 4, &cache).is_err());
    let mut beyond = heads(8 * 8);
    beyond.sequences.first = 1;
    assert!(prepare_heads(&mut r, &beyond, 4, &cache).is_err());
    let mut long = heads(8 * 8);
    long.sequences.page_stride = 20;
    assert!(prepare_heads(&mut r, &long, 4, &cache).is_err());
    let mut few = heads(8 * 8);
    few.sequences.n_rows = 2;
    assert!(prepare_heads(&mut r, &few, 4, &cache).is_err());
    let mut wide = heads(8 * 8);
    wide.angles.pairs = 5;
    assert!(prepare_heads(&mut r, &wide, 4, &cache).is_err());
    assert!(prepare_heads(&mut r, &heads(8 * 8), 4, &cache).is_ok());
    let out = device.buffer("out", 4096).unwrap();
    let states = room(device, 1, 4, 8, 8);
    let small = room(device, 0, 4, 8, 8);
    let shape = |n_heads: usize| AttentionShape {
        n_heads,
        n_kv_heads: 2,
        head_dim: 8,
        scale: 1.0,
        softcap: None,
        window: None,
    };
    let mut run =
        |shape: AttentionShape, states: &SplitKvStates, n_rows: usize, out_rows: usize| {
            let split_kv = SplitKv {
                states,
                most_len: 8,
            };
            let mut heads = heads((shape.n_heads + 4) * 8);
            heads.qkv.n_rows = n_rows;
            heads.sequences.n_rows = n_rows;
            let out = Rows::new(&out, out_rows, shape.n_heads * 8);
            decode(&mut r, &shape, &heads, &cache, split_kv, out)
        };
    assert!(run(shape(4), &states, 1, 1).is_ok());
    assert!(
        run(shape(3), &states, 1, 1).is_err(),
        "heads that share none"
    );
    let other = |n_kv_heads, head_dim| AttentionShape {
        n_kv_heads,
        head_dim,
        ..shape(4)
    };
    assert!(
        run(other(1, 8), &states, 1, 1).is_err(),
        "heads of another cache"
    );
    assert!(
        run(other(2, 4), &states, 1, 1).is_err(),
        "shorter heads than the cache has"
    );
    assert!(run(shape(4), &small, 1, 1).is_err(), "states without room");
    assert!(run(shape(4), &states, 2, 1).is_err(), "two positions");
    assert!(run(shape(4), &states, 1, 2).is_err(), "two rows of output");
}

#[test]
fn a_position_behind_the_angles_is_taken_for_the_last() {
    for device in devices().iter().take(2) {
        // Two positions of four pairs.
        let table = device.upload(&floats(2 * 4 * 2, 1)).unwrap();
        let turned = |position: u32| {
            let qkv = device.upload(&floats(3 * 8, 2)).unwrap();
            let own = Own::new(device, (1, 8), CacheType::F32, PAGE_LEN);
            let sequences = own.table(device, 0, 1);
            (device.write(&sequences, 32, &position.to_le_bytes())).unwrap();
            let heads = Heads {
                qkv: Rows::new(&qkv, 1, 3 * 8),
                has_keys: true,
                norms: HeadNorms::default(),
                angles: Angles {
                    table: &table,
                    pairs: 4,
                    layout: RopeLayout::Halves,
                },
                sequences: own.sequences(&sequences, 1),
            };
            run(device, &qkv, 8, |r| prepare_heads(r, &heads, 1, &own.layer))
        };
        let last = turned(1);
        assert_ne!(turned(0), last);
        for position in [2, 50, u32::MAX] {
            assert_eq!(turned(position), last);
        }
    }
}

/// Sequences of a batch: where each is, and how many rows it has.
fn check_batch(device: &Device, dtype: CacheType, window: Option<usize>, all: &[(usize, usize)]) {
    let what = format!("{dtype:?} {window:?} {all:?}");
    let (n_heads, n_kv_heads, d) = (6, 2, 40);
    let (q_width, width) = (n_heads * d, (n_heads + 2 * n_kv_heads) * d);
    let shape = AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim: d,
        scale: 0.2,
        softcap: None,
        window,
    };
    let n_rows: usize = all.iter().map(|(_, n_rows)| n_rows).sum();
    let most_rows = *all.iter().map(|(_, n_rows)| n_rows).max().unwrap();
    let longest = all.iter().map(|(pos, n_rows)| pos + n_rows).max().unwrap();
    // A place for one page more than any of them has.
    let page_stride = longest.div_ceil(PAGE_LEN) + 1;
    let n_pages = |&(pos, n_rows): &(usize, usize)| (pos + n_rows).div_ceil(PAGE_LEN);
    let (pages, n_all) = shuffled(all.iter().map(n_pages).sum(), 5);
    let layer = CacheLayer::new(device, n_kv_heads, d, dtype, CachedValues::Own, n_all).unwrap();
    let angles: Vec<[f32; 2]> = (0..n_rows * d / 2)
        .map(|i| [(i as f32).cos(), (i as f32).sin()])
        .collect();
    let angles = device.upload(&angles).unwrap();
    fn rotated<'a>(
        qkv: Rows<'a>,
        sequences: Sequences<'a>,
        angles: &'a Buffer,
        head_dim: usize,
    ) -> Heads<'a> {
        Heads {
            qkv,
            has_keys: true,
            norms: HeadNorms::default(),
            angles: Angles {
                table: angles,
                pairs: head_dim / 2,
                layout: RopeLayout::Halves,
            },
            sequences,
        }
    }
    // Each alone fills the cache up to its position, then computes its rows in memory of its own.
    let rows = floats(n_rows * width, 3);
    let (mut members, mut want) = (Vec::new(), Vec::new());
    let (mut first_row, mut first_page) = (0, 0);
    for (i, of) in all.iter().enumerate() {
        let &(pos, m) = of;
        let own = Own::new(device, (n_kv_heads, d), dtype, pos + m);
        if pos > 0 {
            let before = device.upload(&floats(pos * width, 10 + i as u64)).unwrap();
            let table = own.table(device, 0, pos);
            let rows = Rows::new(&before, pos, width);
            let mut before = rotated(rows, own.sequences(&table, pos), &angles, d);
            before.angles.pairs = 0;
            run(device, &angles, 0, |r| {
                prepare_heads(r, &before, n_heads, &own.layer)
            });
        }
        let pages = &pages[first_page..][..n_pages(of)];
        let numbered: Vec<[u32; 2]> = (own.pages.iter().zip(pages))
            .map(|(from, to)| [*from, *to])
            .collect();
        device
            .copy_all(&own.layer.copies(&layer, &numbered).unwrap())
            .unwrap();
        let sequence = SequenceRows {
            position: pos,
            first_row,
            n_rows: m,
            first_angle: first_row,
            pages,
            place: 0,
        };
        let alone = SequenceRows {
            first_row: 0,
            pages: &own.pages,
            ..sequence
        };
        let words = sequence_table(&[alone], own.pages.len());
        let table = device.upload(&words).unwrap();
        let sequences = Sequences {
            n_all: 1,
            first: 0,
            ..own.sequences(&table, m)
        };
        let qkv = device
            .upload(&rows[first_row * width..][..m * width])
            .unwrap();
        let qkv = Rows::new(&qkv, m, width);
        let out = device.buffer("out", (m * q_width * 4) as u64).unwrap();
        let out_rows = Rows::new(&out, m, q_width);
        want.extend(run(device, &out, m * q_width, |r| {
            prepare_heads(r, &rotated(qkv, sequences, &angles, d), n_heads, &own.layer)?;
            let q = qkv.columns(0, q_width);
            attention(
                r,
                &shape,
                q,
                sequences,
                &own.layer,
                Split::Queries,
                out_rows,
            )
        }));
        members.push(sequence);
        first_row += m;
        first_page += pages.len();
    }
    // A sequence that isn't among those processed, and those in another order than their rows.
    let other = SequenceRows {
        position: 1000,
        first_row: 0,
        n_rows: 1,
        first_angle: 0,
        pages: &[],
        place: 0,
    };
    let table: Vec<_> = [other]
        .into_iter()
        .chain(members.iter().rev().copied())
        .collect();
    let table = device.upload(&sequence_table(&table, page_stride)).unwrap();
    let sequences = Sequences {
        table: &table,
        n_all: all.len() + 1,
        page_stride,
        first: 1,
        n: all.len(),
        n_rows: most_rows,
    };
    let out = device.buffer("out", (n_rows * q_width * 4) as u64).unwrap();
    let out_rows = Rows::new(&out, n_rows, q_width);
    let len = SplitKvStates::len((all.len(), most_rows), (n_heads, d), longest);
    let states = SplitKvStates::new(device, len).unwrap();
    let split_kv = SplitKv {
        states: &states,
        most_len: longest,
    };
    let computed = |in_one: bool, split: Split<'_>| {
        let qkv = device.upload(&rows).unwrap();
        let qkv = Rows::new(&qkv, n_rows, width);
        let heads = rotated(qkv, sequences, &angles, d);
        run(device, &out, n_rows * q_width, |r| {
            if in_one {
                return decode(r, &shape, &heads, &layer, split_kv, out_rows);
            }
            prepare_heads(r, &heads, n_heads, &layer)?;
            let q = qkv.columns(0, q_width);
            attention(r, &shape, q, sequences, &layer, split, out_rows)
        })
    };
    if most_rows == 1 {
        let error = nmse(&computed(true, Split::Kv(split_kv)), &want);
        assert!(error < near(device, dtype), "{what}, in one: {error:e}");
    }
    assert_eq!(computed(false, Split::Queries), want, "{what}");
    if most_rows <= 8 {
        let error = nmse(&computed(false, Split::Kv(split_kv)), &want);
        assert!(error < near(device, dtype), "{what}, split-KV: {error:e}");
    }
}

#[test]
fn sequences_of_a_batch_are_as_each_alone() {
    for device in devices().iter().take(2) {
        for (i, dtype) in DTYPES.into_iter().enumerate() {
            let window = [None, Some(50), None][i];
            // New ones, at the beginning and the end of pages, and of many.
            let one = [
                (0, 1),
                (63, 1),
                (64, 1),
                (200, 1),
                (31, 1),
                (700, 1),
                (5, 1),
                (127, 1),
            ];
            check_batch(device, dtype, window, &one);
            // So many and so short that they aren't split, with a row each and with several.
            let mut short = one;
            short[5] = (480, 1);
            check_batch(device, dtype, window, &short);
            check_batch(
                device,
                dtype,
                window,
                &short.map(|(pos, _)| (pos, 1 + pos % 3)),
            );
            check_batch(device, dtype, window, &[(10, 3), (62, 8), (0, 1), (130, 5)]);
            // More than a tile of queries has.
            check_batch(device, dtype, window, &[(0, 33), (50, 64), (70, 40)]);
            // Which kernel it is doesn't depend on who else there is.
            check_batch(device, dtype, window, &[(0, 20), (50, 30)]);
        }
    }
}

/// Norms of all heads of a row as attention prepares them, and by themselves beforehand.
#[test]
fn norms_of_all_heads_together() {
    for device in devices() {
        for (heads, len) in [((4, 4, 32), 12), ((6, 2, 64), 70), ((3, 1, 20), 12)] {
            for dtype in DTYPES {
                check_whole_norms(device, heads, dtype, len);
            }
        }
    }
}

fn check_whole_norms(
    device: &Device,
    (n_heads, n_kv_heads, d): (usize, usize, usize),
    dtype: CacheType,
    len: usize,
) {
    let (queries, keys) = (n_heads * d, n_kv_heads * d);
    let width = queries + 2 * keys;
    let (offset, stride) = (6, width + 2);
    // Two sequences, whose rows are side by side.
    let given = floats(2 * len * width, 1);
    let [own, others] = [(); 2].map(|()| spread(device, &given, width, offset, stride));
    let norms = [
        device.upload(&floats(queries, 2)).unwrap(),
        device.upload(&floats(keys, 3)).unwrap(),
    ];
    let table: Vec<[f32; 2]> = (0..len * d / 2)
        .map(|i| [(i as f32).cos(), (i as f32).sin()])
        .collect();
    let table = device.upload(&table).unwrap();
    let n_pages = len.div_ceil(PAGE_LEN);
    let caches = [(); 2].map(|()| Own::new(device, (n_kv_heads, d), dtype, 2 * n_pages * PAGE_LEN));
    let len_of_states = SplitKvStates::len((2, 1), (n_heads, d), len);
    let states = SplitKvStates::new(device, len_of_states).unwrap();
    let out = device.buffer("out", 4 * (queries * 4) as u64).unwrap();
    let outputs = Rows::new(&out, 4, queries);
    let shape = AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim: d,
        scale: 0.2,
        softcap: None,
        window: None,
    };
    for pos in 0..len {
        let rows = |buffer| spread_rows(buffer, 2 * len, width, offset, stride).rows(2 * pos, 2);
        let members: Vec<SequenceRows<'_>> = (caches[0].pages.chunks(n_pages).enumerate())
            .map(|(first_row, pages)| SequenceRows {
                position: pos,
                first_row,
                n_rows: 1,
                first_angle: pos,
                pages,
                place: 0,
            })
            .collect();
        let words = device.upload(&sequence_table(&members, n_pages)).unwrap();
        let sequences = Sequences {
            table: &words,
            n_all: 2,
            page_stride: n_pages,
            first: 0,
            n: 2,
            n_rows: 1,
        };
        let heads = |qkv, norms| Heads {
            qkv,
            has_keys: true,
            norms,
            angles: Angles {
                table: &table,
                pairs: d / 2,
                layout: RopeLayout::Halves,
            },
            sequences,
        };
        let whole = HeadNorms {
            whole: true,
            q: Some(&norms[0]),
            k: Some(&norms[1]),
            eps: EPS,
        };
        let together = heads(rows(&own), whole);
        let split_kv = SplitKv {
            states: &states,
            most_len: len,
        };
        let refused = prepare_heads(
            &mut Recorder::new(device),
            &together,
            n_heads,
            &caches[0].layer,
        );
        assert!(matches!(refused, Err(GpuError::Unsupported { .. })));
        let both = run(device, &out, 4 * queries, |r| {
            decode(
                r,
                &shape,
                &together,
                &caches[0].layer,
                split_kv,
                outputs.rows(0, 2),
            )?;
            let apart = rows(&others);
            for (columns, norm) in [
                (apart.columns(0, queries), &norms[0]),
                (apart.columns(queries, keys), &norms[1]),
            ] {
                rms_norm(r, columns, norm, EPS, columns)?;
            }
            let apart = heads(apart, HeadNorms::default());
            decode(
                r,
                &shape,
                &apart,
                &caches[1].layer,
                split_kv,
                outputs.rows(2, 2),
            )
        });
        let (got, want) = both.split_at(2 * queries);
        let error = nmse(got, want);
        // The norm's sum in another order may move a half or a code.
        let bound = bound(device, dtype);
        let what = format!("{n_heads} {n_kv_heads} {d} {dtype:?} at {pos}");
        assert!(error < bound, "{what}: {error:e}");
    }
}
