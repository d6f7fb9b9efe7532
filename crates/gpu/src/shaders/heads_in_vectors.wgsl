// Does what heads.wgsl does, in vectors of four elements: for caches of floats, heads of a multiple of eight elements and
// rotations of a multiple of four pairs, all at multiples of four elements.
//
// Agrees with heads.wgsl, pairs leave as halves here too, except for the order in which squares are added.
// Shapes: as there, a vector of a head being four elements; there are N_PREPARED heads in a row.
// LANES invocations per head, each of them takes up to UNITS pairs of vectors; workgroups of WG have heads of the same row.
// Many rows mostly wait for memory: an invocation has all loads under way before it needs the first.

// 1 if queries, or keys, are normalised.
override Q_NORM: u32 = 0u;
override K_NORM: u32 = 0u;
// 1 if pairs are adjacent, 0 if they are half the rotated elements apart.
override PAIRS: u32 = 0u;
// 0: f32. 1: f16.
override CACHE: u32 = 0u;
override N_PREPARED: u32 = 1u;
// At most 8, which `main` has room for.
override UNITS: u32 = 1u;

@group(0) @binding(0) var<storage, read_write> qkv: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> angles: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> sequences: array<u32>;
@group(0) @binding(3) var<storage, read> q_weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read> k_weight: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> keys: array<vec2<u32>>;
@group(0) @binding(6) var<storage, read_write> values: array<vec2<u32>>;

@group(1) @binding(0) var<uniform> params: Params;

// The two vectors of unit u of a head as it was computed: those with its pairs, or adjacent ones.
fn places(u: u32) -> vec2<u32> {
    if PAIRS == 0u && u < params.half / 4u {
        return halves(u);
    }
    return vec2<u32>(2u * u, 2u * u + 1u);
}

// Those of a head as it leaves, of which pairs are half the rotated elements apart.
fn halves(u: u32) -> vec2<u32> {
    let apart = params.half / 4u;
    if u < apart {
        return vec2<u32>(u, u + apart);
    }
    return vec2<u32>(2u * u, 2u * u + 1u);
}

// The vectors of a unit, rotated by this row of angles if it is rotated: the first elements of pairs, and the second.
fn turned(v: array<vec4<f32>, 2>, row: u32, u: u32) -> array<vec4<f32>, 2> {
    if u >= params.half / 4u {
        return v;
    }
    var a = v[0];
    var b = v[1];
    if PAIRS == 1u {
        a = vec4<f32>(v[0].xz, v[1].xz);
        b = vec4<f32>(v[0].yw, v[1].yw);
    }
    // Cosine and sine of two pairs each.
    let at = (row * params.half + 4u * u) / 2u;
    let first = angles[at];
    let second = angles[at + 1u];
    let cosines = vec4<f32>(first.xz, second.xz);
    let sines = vec4<f32>(first.yw, second.yw);
    return array<vec4<f32>, 2>(a * cosines - b * sines, b * cosines + a * sines);
}

fn put_key(row: u32, i: u32, v: vec4<f32>) {
    if CACHE == 1u {
        keys[row * params.row_len * 2u + i] = vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
        return;
    }
    let at = (row * params.row_len + i) * 2u;
    keys[at] = bitcast<vec2<u32>>(v.xy);
    keys[at + 1u] = bitcast<vec2<u32>>(v.zw);
}

fn put_value(row: u32, i: u32, v: vec4<f32>) {
    if CACHE == 1u {
        values[row * params.row_len * 2u + i] = vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
        return;
    }
    let at = (row * params.row_len + i) * 2u;
    values[at] = bitcast<vec2<u32>>(v.xy);
    values[at + 1u] = bitcast<vec2<u32>>(v.zw);
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let s = group.id.y / params.n_rows;
    let own = sequence_of(s);
    let t = group.id.y % params.n_rows;
    if t >= own.n_rows {
        return;
    }
    let thread = thread_of(at);
    let lane = thread % LANES;
    let place = group.id.x * (WG / LANES) + thread / LANES;
    // Those behind the last head repeat it, and write nothing.
    let slot = min(place, N_PREPARED - 1u);
    let kv = (slot - params.n_heads) % params.n_kv_heads;
    let is_query = slot < params.n_heads;
    let is_key = !is_query && slot < params.n_heads + params.n_kv_heads;
    var begin = params.offset + (own.first_row + t) * params.stride;
    if is_query {
        begin += slot * params.q_step;
    } else {
        begin += select(params.values, params.keys, is_key) + kv * params.head_dim;
    }
    begin /= 4u;
    let units = params.head_dim / 8u;
    let now = own.position + t;
    let angle = min(now + own.angles, params.n_angles - 1u);
    var all = array<array<vec4<f32>, 2>, 8>();
    for (var j = 0u; j < UNITS; j++) {
        let i = places(min(lane + j * LANES, units - 1u));
        all[j] = array<vec4<f32>, 2>(qkv[begin + i.x], qkv[begin + i.y]);
    }
    if Q_NORM == 1u || K_NORM == 1u {
        var squares = 0.0;
        for (var j = 0u; j < UNITS; j++) {
            let both = dot(all[j][0], all[j][0]) + dot(all[j][1], all[j][1]);
            squares += select(0.0, both, lane + j * LANES < units);
        }
        let sum = segment_sum_f32(at, vec2<f32>(squares, 0.0)).x;
        let inverse = 1.0 / sqrt(sum / f32(params.head_dim) + params.eps);
        for (var j = 0u; j < UNITS; j++) {
            let i = places(min(lane + j * LANES, units - 1u));
            if Q_NORM == 1u && is_query {
                all[j][0] = all[j][0] * inverse * q_weight[i.x];
                all[j][1] = all[j][1] * inverse * q_weight[i.y];
            }
            if K_NORM == 1u && is_key {
                all[j][0] = all[j][0] * inverse * k_weight[i.x];
                all[j][1] = all[j][1] * inverse * k_weight[i.y];
            }
        }
    }
    if PAIRS == 1u {
        // Queries are updated in place, where other invocations of the segment have read.
        storageBarrier();
    }
    // What is cached has a place.
    let live = place < N_PREPARED && (is_query || now < own.capacity);
    let row = row_of(page_of(s, now), kv, now);
    for (var j = 0u; j < UNITS; j++) {
        let u = lane + j * LANES;
        if !live || u >= units {
            continue;
        }
        var i = places(u);
        var v = all[j];
        if is_query || is_key {
            i = halves(u);
            v = turned(v, angle, u);
        }
        if is_query {
            qkv[begin + i.x] = v[0];
            qkv[begin + i.y] = v[1];
        } else if is_key {
            put_key(row, i.x, v[0]);
            put_key(row, i.y, v[1]);
        } else {
            put_value(row, i.x, v[0]);
            put_value(row, i.y, v[1]);
        }
    }
}
