//! Rotation angles of positions, with all methods of scaling them to longer contexts.

use std::f64::consts::TAU;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use sterna_kernels::rope::RopeLayout;

/// Rotary embedding of a set of layers, as described by the model's files.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    /// Elements of each head that are rotated, from the first. An odd number is rounded up to whole
    /// pairs, but frequencies are spaced by the number itself.
    pub dim: usize,
    /// The longest wavelength is about `2π · base` positions.
    pub base: f64,
    /// Which elements are rotated together.
    pub layout: RopeLayout,
    /// How angles are scaled.
    pub scaling: RopeScaling,
}

impl RopeConfig {
    /// Pairs of elements of a head that are rotated.
    pub fn pairs(&self) -> usize {
        self.dim.div_ceil(2)
    }

    /// Frequencies without scaling: radians per position, `[pairs]`.
    fn plain(&self, base: f64) -> impl Iterator<Item = f64> {
        let dim = self.dim as f64;
        (0..self.pairs()).map(move |i| libm::pow(base, -2.0 * i as f64 / dim))
    }

    /// Frequencies in a session of `ctx_len` positions, `[pairs]`, and the scale of cosines and sines.
    fn scaled(&self, ctx_len: usize) -> (Vec<f64>, f64) {
        let dim = self.dim as f64;
        let plain = || self.plain(self.base);
        let divided_by = |factors: &[f32]| -> Vec<f64> {
            plain()
                .zip(factors)
                .map(|(f, &by)| f / f64::from(by))
                .collect()
        };
        match &self.scaling {
            RopeScaling::None => (plain().collect(), 1.0),
            RopeScaling::Linear { factor } => (plain().map(|f| f / factor).collect(), 1.0),
            RopeScaling::Dynamic {
                factor,
                original_ctx,
            } => {
                let stretch = ctx_len.max(*original_ctx) as f64 / *original_ctx as f64;
                let grown = libm::pow(factor * stretch - (factor - 1.0), dim / (dim - 2.0));
                (self.plain(self.base * grown).collect(), 1.0)
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_ctx,
            } => {
                let adapt = |f: f64| {
                    // Rotations over the original context.
                    let turns = *original_ctx as f64 * f / TAU;
                    let keep = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor))
                        .clamp(0.0, 1.0);
                    (1.0 - keep) * f / factor + keep * f
                };
                (plain().map(adapt).collect(), 1.0)
            }
            RopeScaling::Yarn {
                factor,
                original_ctx,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => {
                // The (fractional) index of the pair that makes this many rotations over the original
                // context.
                let pair = |turns: f64| {
                    dim * libm::log(*original_ctx as f64 / (turns * TAU))
                        / (2.0 * libm::log(self.base))
                };
                let (mut low, mut high) = (pair(*beta_fast), pair(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                (low, high) = (low.max(0.0), high.min(dim - 1.0));
                if low == high {
                    high += 0.001;
                }
                let adapt = |(i, f): (usize, f64)| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    ramp * f / factor + (1.0 - ramp) * f
                };
                (plain().enumerate().map(adapt).collect(), *attention_factor)
            }
            RopeScaling::LongRope {
                short,
                long,
                original_ctx,
                attention_factor,
            } => {
                let factors = if ctx_len > *original_ctx { long } else { short };
                (divided_by(factors), *attention_factor)
            }
            RopeScaling::Factors(factors) => (divided_by(factors), 1.0),
        }
    }

    /// The divisors that turn frequencies without scaling, of the base as GGUF has it, into those of this
    /// embedding, `[pairs]`.
    ///
    /// Quotients are rounded so that a reader gets the same frequencies in f32, wherever a divisor permits:
    /// some are between the quotients of two adjacent floats.
    pub(crate) fn divisors(&self) -> Vec<f32> {
        let (scaled, _) = self.scaled(1);
        let divisor = |(plain, scaled): (f64, f64)| {
            let nearest = (plain / scaled) as f32;
            let gives = |by: &f32| (plain / f64::from(*by)) as f32 == scaled as f32;
            let near = [nearest, nearest.next_down(), nearest.next_up()];
            near.into_iter().find(gives).unwrap_or(nearest)
        };
        let plain = self.plain(f64::from(self.base as f32));
        plain.zip(scaled).map(divisor).collect()
    }
}

/// How rotation angles are adapted to contexts longer than those the model was first trained on.
///
/// Formulas as in Transformers 5; see docs/families.md.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// All angles divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// A larger base for contexts beyond the original ("NTK"). It depends on the context length, so
    /// it is fixed when a session begins.
    Dynamic {
        /// Scaling factor.
        factor: f64,
        /// Context length up to which nothing changes.
        original_ctx: usize,
    },
    /// Llama 3: long wavelengths divided, short ones kept, a ramp in between.
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above `original_ctx / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original_ctx / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the original training.
        original_ctx: usize,
    },
    /// YaRN: as Llama 3 with the ramp over dimensions, and sharper attention.
    Yarn {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Context length of the original training.
        original_ctx: usize,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is divided.
        beta_slow: f64,
        /// Scale of queries and keys.
        attention_factor: f64,
        /// Whether the ends of the ramp are rounded outwards to whole dimensions.
        truncate: bool,
    },
    /// A divisor for each pair, one set for short and one for long contexts; which applies is fixed
    /// when a session begins.
    LongRope {
        /// Divisors up to `original_ctx`, `[pairs]`.
        short: Vec<f32>,
        /// Divisors beyond it, `[pairs]`.
        long: Vec<f32>,
        /// Context length of the original training.
        original_ctx: usize,
        /// Scale of queries and keys.
        attention_factor: f64,
    },
    /// A divisor for each pair, `[pairs]`, as in GGUF's `rope_freqs.weight`.
    Factors(Vec<f32>),
}

impl RopeScaling {
    /// The divisors given pair by pair, if this scaling has any.
    pub(crate) fn factor_lists(&self) -> impl Iterator<Item = &[f32]> {
        let lists: [Option<&[f32]>; 2] = match self {
            RopeScaling::LongRope { short, long, .. } => [Some(short), Some(long)],
            RopeScaling::Factors(factors) => [Some(factors), None],
            _ => [None, None],
        };
        lists.into_iter().flatten()
    }
}

/// The angles of a session: fixed frequencies that determine those of any position.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    layout: RopeLayout,
    /// Radians per position, `[pairs]`.
    frequencies: Vec<f32>,
    /// Scale of cosines and sines.
    magnitude: f32,
    /// Of the positions that were asked for, and all before them. Clones share it.
    known: Arc<Mutex<Known>>,
}

/// Positions of which cosines and sines are kept: of 64 pairs in 16 MiB.
const MOST_KNOWN: usize = 32_768;

/// Cosines and sines of all positions from the first on, `[n_positions, pairs]`.
#[derive(Debug, Default)]
struct Known {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Cosines and sines for the positions of a batch.
#[derive(Debug, Clone)]
pub struct Angles {
    /// `[n_positions, pairs]`.
    pub cos: Vec<f32>,
    /// `[n_positions, pairs]`.
    pub sin: Vec<f32>,
    /// Elements of each head that are rotated.
    pub dim: usize,
    /// Which elements are rotated together.
    pub layout: RopeLayout,
}

impl Angles {
    /// Appends the positions of another sequence, whose angles have the same shape.
    pub(crate) fn append(&mut self, other: &Angles) {
        self.cos.extend_from_slice(&other.cos);
        self.sin.extend_from_slice(&other.sin);
    }
}

impl Rope {
    /// Those of `configs` in a session of `ctx_len` positions.
    pub(crate) fn all(configs: &[RopeConfig], ctx_len: usize) -> Vec<Rope> {
        let ropes = configs.iter().map(|config| Rope::new(config, ctx_len));
        ropes.collect()
    }

    /// The angles of `config` in a session of `ctx_len` positions.
    pub(crate) fn new(config: &RopeConfig, ctx_len: usize) -> Rope {
        let (frequencies, magnitude) = config.scaled(ctx_len);
        Rope {
            layout: config.layout,
            frequencies: frequencies.into_iter().map(|f| f as f32).collect(),
            magnitude: magnitude as f32,
            known: Arc::default(),
        }
    }

    /// The angles of positions `pos..pos + n`.
    ///
    /// The product of position and frequency is rounded to f32, as in the reference implementations:
    /// far from the start, that rounding is part of what a model was trained with.
    pub(crate) fn angles(&self, pos: usize, n: usize) -> Angles {
        let pairs = self.frequencies.len();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        if pos + n <= MOST_KNOWN {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let n_known = known.cos.len() / pairs.max(1);
            let Known {
                cos: all_cos,
                sin: all_sin,
            } = &mut *known;
            self.append(n_known..pos + n, all_cos, all_sin);
            let own = pos * pairs..(pos + n) * pairs;
            cos.extend_from_slice(&all_cos[own.clone()]);
            sin.extend_from_slice(&all_sin[own]);
        } else {
            self.append(pos..pos + n, &mut cos, &mut sin);
        }
        Angles {
            cos,
            sin,
            dim: 2 * pairs,
            layout: self.layout,
        }
    }

    /// Computes the cosines and sines of `positions`.
    fn append(&self, positions: Range<usize>, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for p in positions {
            for frequency in &self.frequencies {
                let (s, c) = libm::sincos(f64::from(p as f32 * frequency));
                cos.push(c as f32 * self.magnitude);
                sin.push(s as f32 * self.magnitude);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: RopeScaling, ctx_len: usize) -> Vec<f32> {
        let config = RopeConfig {
            dim: 8,
            base: 10_000.0,
            layout: RopeLayout::Halves,
            scaling,
        };
        Rope::new(&config, ctx_len).frequencies
    }

    fn assert_close(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= want.abs() * 1e-5, "{got}, not {want}");
        }
    }

    #[test]
    fn angles_that_are_known_are_those_of_their_positions() {
        let config = RopeConfig {
            dim: 8,
            base: 10_000.0,
            layout: RopeLayout::Halves,
            scaling: RopeScaling::None,
        };
        let rope = Rope::new(&config, 1);
        // Further, the same, fewer, past what is known, right behind it, back, and none.
        for (pos, n) in [
            (3, 16),
            (5, 16),
            (5, 16),
            (9, 4),
            (10, 8),
            (30, 2),
            (32, 3),
            (31, 1),
            (0, 5),
            (40, 0),
            (MOST_KNOWN - 1, 1),
            (MOST_KNOWN - 1, 2),
        ] {
            let known = rope.clone().angles(pos, n);
            let (mut cos, mut sin) = (Vec::new(), Vec::new());
            rope.append(pos..pos + n, &mut cos, &mut sin);
            assert_eq!((known.cos, known.sin), (cos, sin), "{pos} {n}");
        }
        assert_eq!(rope.known.lock().unwrap().cos.len(), 4 * MOST_KNOWN);
        assert_eq!(rope.angles(7, 2).cos.len(), 8);
    }

    #[test]
    fn plain_and_linear() {
        assert_close(&frequencies(RopeScaling::None, 1), &[1.0, 0.1, 0.01, 0.001]);
        assert_close(
            &frequencies(RopeScaling::Linear { factor: 4.0 }, 1),
            &[0.25, 0.025, 0.0025, 0.00025],
        );
    }

    #[test]
    fn dynamic_changes_nothing_up_to_the_original_context() {
        let scaling = RopeScaling::Dynamic {
            factor: 2.0,
            original_ctx: 64,
        };
        assert_close(&frequencies(scaling.clone(), 64), &[1.0, 0.1, 0.01, 0.001]);
        // Twice the context: the base grows by (2·2 - 1)^(8/6).
        let base: f64 = 10_000.0 * 3f64.powf(8.0 / 6.0);
        let want: Vec<f32> = (0..4)
            .map(|i| base.powf(-f64::from(i) / 4.0) as f32)
            .collect();
        assert_close(&frequencies(scaling, 128), &want);
    }

    #[test]
    fn llama3_keeps_short_wavelengths_and_divides_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_ctx: 64,
        };
        // 64 positions hold 10.2, 1.02, 0.1 and 0.01 rotations.
        let turns = 64.0 * 0.1 / std::f64::consts::TAU;
        let keep = (turns - 1.0) / 3.0;
        let ramp = ((1.0 - keep) * 0.1 / 8.0 + keep * 0.1) as f32;
        assert_close(
            &frequencies(scaling, 1),
            &[1.0, ramp, 0.01 / 8.0, 0.001 / 8.0],
        );
    }

    #[test]
    fn long_rope_picks_by_context() {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0; 4],
            long: vec![2.0; 4],
            original_ctx: 64,
            attention_factor: 1.5,
        };
        assert_close(&frequencies(scaling.clone(), 64), &[1.0, 0.1, 0.01, 0.001]);
        assert_close(&frequencies(scaling, 65), &[0.5, 0.05, 0.005, 0.0005]);
    }

    #[test]
    fn angles_are_those_of_the_position() {
        let config = RopeConfig {
            dim: 4,
            base: 100.0,
            layout: RopeLayout::Pairs,
            scaling: RopeScaling::None,
        };
        let angles = Rope::new(&config, 8).angles(3, 2);
        let want: Vec<f32> = [3.0f32, 0.3, 4.0, 0.4].iter().map(|a| a.cos()).collect();
        assert_close(&angles.cos, &want);
        assert_eq!(angles.sin.len(), 4);
    }
}
