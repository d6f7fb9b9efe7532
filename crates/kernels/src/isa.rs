//! Instruction sets: detection, and running code compiled for them.

use std::fmt;

/// A level of SIMD instructions that was detected on this machine.
///
/// Values come only from [`Isa::detect`] and [`Isa::limited_to`], so holding one is the proof that
/// its instructions exist; in this crate's unit tests AMX is emulated where there is AVX-512. Every level computes
/// the same bits: wider registers never change the order in which a sum is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Isa(Level);

/// The levels of the compile target's architecture, each including the previous one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Level {
    /// Portable code, vectorised by the compiler with the target's baseline.
    Baseline,
    /// AVX2, F16C and FMA: available on processors since 2013.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with dot products of bytes.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 F, BW, DQ and VL with dot products of bytes.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Products of byte matrices in tiles (AMX), which the system gave this process.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// The baseline of 64-bit Arm.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// Dot products of bytes.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// Products of byte matrices, and dot products of unsigned with signed bytes.
    #[cfg(target_arch = "aarch64")]
    I8mm,
    /// Outer products of bytes in tiles (SME).
    #[cfg(target_arch = "aarch64")]
    Sme,
    /// WebAssembly can't detect features at run time: a build has this level or hasn't.
    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
    Simd128,
    /// Dot products of bytes, used only where all engines agree on them.
    #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
    Relaxed,
}

impl Level {
    const ALL: &[Level] = &[
        Level::Baseline,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        #[cfg(target_arch = "x86_64")]
        Level::AvxVnni,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512,
        #[cfg(target_arch = "x86_64")]
        Level::Amx,
        #[cfg(target_arch = "aarch64")]
        Level::Neon,
        #[cfg(target_arch = "aarch64")]
        Level::NeonDot,
        #[cfg(target_arch = "aarch64")]
        Level::I8mm,
        #[cfg(target_arch = "aarch64")]
        Level::Sme,
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Level::Simd128,
        #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
        Level::Relaxed,
    ];

    /// The last level, where a build has no other: WebAssembly with the feature `fixed-isa`.
    const FIXED: Option<Level> = match cfg!(all(feature = "fixed-isa", target_arch = "wasm32")) {
        true => Level::ALL.last().copied(),
        false => None,
    };

    const fn name(self) -> &'static str {
        match self {
            Level::Baseline => "scalar",
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Level::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Level::Neon => "neon",
            #[cfg(target_arch = "aarch64")]
            Level::NeonDot => "neondot",
            #[cfg(target_arch = "aarch64")]
            Level::I8mm => "i8mm",
            #[cfg(target_arch = "aarch64")]
            Level::Sme => "sme",
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Level::Simd128 => "simd128",
            #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
            Level::Relaxed => "relaxed",
        }
    }

    /// True if this machine has the level's instructions.
    #[cfg(target_arch = "x86_64")]
    fn is_here(self) -> bool {
        let avx2 = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("fma");
        let avx512 = || {
            avx2 && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
        };
        match self {
            Level::Baseline => true,
            Level::Avx2 => avx2,
            Level::AvxVnni => avx2 && is_x86_feature_detected!("avxvnni"),
            Level::Avx512 => avx512(),
            Level::Amx => avx512() && crate::amx::is_available(),
        }
    }

    /// True if this machine has the level's instructions.
    #[cfg(target_arch = "aarch64")]
    fn is_here(self) -> bool {
        use std::arch::is_aarch64_feature_detected;
        let neon = is_aarch64_feature_detected!("neon");
        let dot = neon && is_aarch64_feature_detected!("dotprod");
        let i8mm = dot && is_aarch64_feature_detected!("i8mm");
        match self {
            Level::Baseline => true,
            Level::Neon => neon,
            Level::NeonDot => dot,
            Level::I8mm => i8mm,
            Level::Sme => i8mm && crate::sme::is_available(),
        }
    }

    /// The requirements of a level are fixed at compile time, and then the level exists only with them.
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    fn is_here(self) -> bool {
        true
    }
}

impl Isa {
    /// The portable level, which is the reference for all others.
    pub const SCALAR: Isa = Isa(Level::Baseline);

    /// The widest level this machine has, of those that were timed: SME, whose unit several cores share, wasn't, and is for
    /// those who ask for it.
    pub fn detect() -> Isa {
        let is_timed = |isa: &Isa| match isa.0 {
            #[cfg(target_arch = "aarch64")]
            Level::Sme => false,
            _ => true,
        };
        Isa::available()
            .filter(is_timed)
            .last()
            .unwrap_or(Isa::SCALAR)
    }

    /// Every level this machine has, from the portable one to the widest.
    pub fn available() -> impl Iterator<Item = Isa> {
        let levels = Level::ALL.iter().copied().filter(|level| level.is_here());
        levels
            .filter(|&level| level == Level::FIXED.unwrap_or(level))
            .map(Isa)
    }

    /// The level called `name`, if this machine has it: `scalar`; `avx2`, `avxvnni`, `avx512`, `amx`; `neon`,
    /// `neondot`, `i8mm`, `sme`; `simd128`, `relaxed`.
    pub fn limited_to(name: &str) -> Option<Isa> {
        Isa::available().find(|isa| isa.name() == name)
    }

    /// The name that [`Isa::limited_to`] takes.
    pub const fn name(self) -> &'static str {
        self.0.name()
    }

    /// Inlined, so that the code of other levels is seen to be unreachable where one is fixed.
    #[inline(always)]
    pub(crate) const fn level(self) -> Level {
        match Level::FIXED {
            Some(level) => level,
            None => self.0,
        }
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
                    $crate::isa::Level::Avx2 | $crate::isa::Level::AvxVnni => {
                        // SAFETY: these levels exist only where `Level::is_here` saw AVX2 and F16C.
                        return unsafe { avx2($($arg),*) };
                    }
                    $crate::isa::Level::Avx512 | $crate::isa::Level::Amx => {
                        // SAFETY: these levels exist only where `Level::is_here` saw these features.
                        return unsafe { avx512($($arg),*) };
                    }
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

    /// So that tests on an emulator don't pass because it lacks what they are for.
    #[test]
    fn a_level_that_is_required_is_here() {
        match std::env::var("STERNA_REQUIRE_ISA") {
            Ok(name) => assert!(Isa::limited_to(&name).is_some(), "{name} isn't here"),
            Err(_) => println!("skipped: STERNA_REQUIRE_ISA isn't set"),
        }
    }
}
