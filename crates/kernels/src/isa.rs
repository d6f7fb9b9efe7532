//! Instruction sets: what this machine has, and running code compiled for it.

use std::fmt;

/// A level of SIMD instructions that this machine has been seen to offer.
///
/// Values come only from [`Isa::detect`] and [`Isa::limited_to`], so holding one is the proof that
/// its instructions exist. Every level computes the same bits: wider registers never change the
/// order in which a sum is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Isa(Level);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Level {
    /// What every machine of the compile target has.
    Baseline,
    /// AVX2, F16C and FMA, which came to market together.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Avx2,
    /// AVX2 with dot products of bytes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    AvxVnni,
    /// AVX-512 F, BW, DQ and VL with dot products of bytes.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Avx512,
}

impl Level {
    const ALL: [Level; 4] = [Level::Baseline, Level::Avx2, Level::AvxVnni, Level::Avx512];

    const fn name(self) -> &'static str {
        match self {
            Level::Baseline => "scalar",
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avxvnni",
            Level::Avx512 => "avx512",
        }
    }

    /// True if this machine has the level's instructions.
    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma");
        match self {
            Level::Baseline => true,
            Level::Avx2 => avx2,
            Level::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
            Level::Avx512 => {
                avx2 && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512vnni")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn is_here(self) -> bool {
        self == Level::Baseline
    }
}

impl Isa {
    /// The portable level, which is the reference for all others.
    pub const SCALAR: Isa = Isa(Level::Baseline);

    /// The widest level this machine has.
    pub fn detect() -> Isa {
        Isa::available().last().unwrap_or(Isa::SCALAR)
    }

    /// Every level this machine has, from the portable one to the widest.
    pub fn available() -> impl Iterator<Item = Isa> {
        Level::ALL.into_iter().filter(|l| l.is_here()).map(Isa)
    }

    /// The level called `name` (`scalar`, `avx2`, `avxvnni`, `avx512`), if this machine has it.
    pub fn limited_to(name: &str) -> Option<Isa> {
        Isa::available().find(|isa| isa.name() == name)
    }

    /// The name that [`Isa::limited_to`] takes.
    pub const fn name(self) -> &'static str {
        self.0.name()
    }

    pub(crate) const fn level(self) -> Level {
        self.0
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Compiles a plain function once for each instruction set and picks one at run time.
///
/// The function gains a first parameter of type [`Isa`]. Its body is written for the portable case;
/// the compiler vectorises it as far as each level allows. Multiplications and additions are never
/// fused, so every copy rounds alike.
macro_rules! multiversion {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

                #[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { body($($arg),*) }

                match isa.level() {
                    $crate::isa::Level::Baseline => {}
                    // SAFETY: these levels exist only where `Level::is_here` saw AVX2 and F16C.
                    $crate::isa::Level::Avx2 | $crate::isa::Level::AvxVnni => {
                        return unsafe { avx2($($arg),*) };
                    }
                    // SAFETY: this level exists only where `Level::is_here` saw these features.
                    $crate::isa::Level::Avx512 => return unsafe { avx512($($arg),*) },
                }
            }
            let _ = isa;
            body($($arg),*)
        }
    };
}
pub(crate) use multiversion;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_named_and_found_by_name() {
        for isa in Isa::available() {
            assert_eq!(Isa::limited_to(isa.name()), Some(isa));
        }
        assert_eq!(Isa::limited_to("mmx"), None);
    }
}
