//! Several GPUs at once: which of those of this machine.

use std::str::FromStr;

use anyhow::Result;
#[cfg(not(feature = "gpu"))]
use anyhow::bail;
#[cfg(feature = "gpu")]
use anyhow::{Context, bail};
#[cfg(feature = "gpu")]
use sterna::native::adapter_name;
#[cfg(feature = "gpu")]
use sterna_gpu::AdapterInfo;

/// Which GPUs were asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gpus {
    /// All of the best kind.
    All,
    /// So many of those.
    First(usize),
    /// These; one that is named twice is used twice.
    These(Vec<Gpu>),
}

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gpu {
    /// The one with this number, as `sterna doctor` counts them.
    Number(usize),
    /// The one that is plugged in here.
    Bus(String),
}

impl FromStr for Gpus {
    type Err = String;

    /// `all`, a number of GPUs, or a list: one with a comma in it, or of addresses.
    fn from_str(text: &str) -> Result<Gpus, String> {
        let expected = || {
            format!(
                "expected `all`, a number of GPUs, numbers of GPUs as in 0,2 (one alone as in 2,), or PCI addresses as \
                 in 0000:41:00.0, found {text:?}"
            )
        };
        if text == "all" {
            return Ok(Gpus::All);
        }
        if let Ok(n) = text.parse() {
            return match n {
                0 => Err(expected()),
                n => Ok(Gpus::First(n)),
            };
        }
        let gpu = |part: &str| match (part.trim(), part.trim().parse()) {
            (_, Ok(number)) => Ok(Gpu::Number(number)),
            (bus, Err(_)) if is_bus(bus) => Ok(Gpu::Bus(bus.to_lowercase())),
            _ => Err(expected()),
        };
        let list = text.strip_suffix(',').unwrap_or(text).split(',').map(gpu);
        Ok(Gpus::These(list.collect::<Result<_, _>>()?))
    }
}

/// Whether `text` is where something is plugged in: domain, bus, device and function, in hexadecimal digits.
fn is_bus(text: &str) -> bool {
    let is_hex = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    let parts: Vec<&str> = text.split([':', '.']).collect();
    parts.len() == 4 && parts.into_iter().all(is_hex)
}

impl Gpus {
    /// The places of the GPUs among all adapters, and their names.
    ///
    /// Errors: one that isn't there, or fewer than were asked for.
    #[cfg(feature = "gpu")]
    pub(crate) fn find(&self) -> Result<Vec<(usize, String)>> {
        let all = sterna_gpu::Device::adapters();
        let chosen = self.among(&all).context("--gpus")?;
        let named = chosen.into_iter().map(|index| (index, label(&all[index])));
        Ok(named.collect())
    }

    /// Errors: there are none.
    #[cfg(not(feature = "gpu"))]
    pub(crate) fn find(&self) -> Result<Vec<(usize, String)>> {
        bail!("--gpus: this program was built without GPUs")
    }

    /// The places of those that are asked for, among `all` adapters, best first.
    ///
    /// Errors: as [`Gpus::find`].
    #[cfg(feature = "gpu")]
    fn among(&self, all: &[AdapterInfo]) -> Result<Vec<usize>> {
        let Some(best) = all.first() else {
            bail!("expected a GPU, found none");
        };
        // An adapter may be there once for each API.
        let is_like_best = |info: &AdapterInfo| info.kind == best.kind && info.api == best.api;
        let places = all.iter().enumerate();
        let like_best = places.filter(|(_, info)| is_like_best(info));
        let like_best: Vec<usize> = like_best.map(|(index, _)| index).collect();
        let found = || {
            let named = all.iter().enumerate();
            let named: Vec<String> = named
                .map(|(index, info)| format!("{index}: {}", label(info)))
                .collect();
            named.join("; ")
        };
        match self {
            Gpus::All => Ok(like_best),
            Gpus::First(n) if *n <= like_best.len() => Ok(like_best[..*n].to_vec()),
            Gpus::First(n) => bail!(
                "expected {n} GPUs, found {} of the best kind, of {}",
                like_best.len(),
                found()
            ),
            Gpus::These(these) => {
                let place = |gpu: &Gpu| match gpu {
                    Gpu::Number(number) => (*number < all.len())
                        .then_some(*number)
                        .with_context(|| format!("expected a GPU {number}, found {}", found())),
                    Gpu::Bus(bus) => (all.iter())
                        .position(|info| info.bus.as_ref() == Some(bus))
                        .with_context(|| format!("expected a GPU at {bus}, found {}", found())),
                };
                these.iter().map(place).collect()
            }
        }
    }
}

/// What people call it, and where it is plugged in.
#[cfg(feature = "gpu")]
fn label(info: &AdapterInfo) -> String {
    match &info.bus {
        Some(bus) => format!("{} at {bus}", adapter_name(info)),
        None => adapter_name(info),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_all_so_many_or_a_list() {
        let bus = |text: &str| Gpu::Bus(text.to_owned());
        for (text, expected) in [
            ("all", Gpus::All),
            ("2", Gpus::First(2)),
            ("2,", Gpus::These(vec![Gpu::Number(2)])),
            ("0,2", Gpus::These(vec![Gpu::Number(0), Gpu::Number(2)])),
            ("0000:C1:00.0", Gpus::These(vec![bus("0000:c1:00.0")])),
            (
                "0, 0000:41:00.0",
                Gpus::These(vec![Gpu::Number(0), bus("0000:41:00.0")]),
            ),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in [
            "", "0", "-1", ",", "all,1", "1,x", "41:00.0", "a:b:c.x", "NVIDIA",
        ] {
            let error = text.parse::<Gpus>().unwrap_err();
            assert!(error.contains(&format!("found {text:?}")), "{error}");
        }
    }

    #[cfg(feature = "gpu")]
    #[test]
    fn gpus_are_those_of_the_best_kind_unless_they_are_named() {
        use sterna_gpu::{AdapterKind, Api};

        let info = |name: &str, kind, api, bus: &str| AdapterInfo {
            name: name.into(),
            driver: "1.0".into(),
            api,
            kind,
            bus: Some(bus.to_owned()).filter(|bus| !bus.is_empty()),
        };
        use AdapterKind::{Discrete, Integrated, Software};
        let twice = [
            info("card", Discrete, Api::Vulkan, "0000:41:00.0"),
            info("card", Discrete, Api::Vulkan, "0000:c1:00.0"),
            info("card", Discrete, Api::Dx12, ""),
            info("chip", Integrated, Api::Vulkan, "0000:00:02.0"),
            info("llvmpipe", Software, Api::Vulkan, ""),
        ];
        let among = |text: &str, all: &[AdapterInfo]| {
            let gpus: Gpus = text.parse().unwrap();
            gpus.among(all).map_err(|error| error.to_string())
        };
        for (text, expected) in [
            ("all", vec![0, 1]),
            ("1", vec![0]),
            ("2", vec![0, 1]),
            ("1,", vec![1]),
            ("0000:c1:00.0,3", vec![1, 3]),
            ("4,4", vec![4, 4]),
        ] {
            assert_eq!(among(text, &twice), Ok(expected), "{text}");
        }
        // Software counts where there is nothing else.
        assert_eq!(among("all", &twice[3..]), Ok(vec![0]));
        assert_eq!(among("all", &twice[4..]), Ok(vec![0]));
        for (text, all, message) in [
            ("all", &[][..], "expected a GPU, found none"),
            (
                "3",
                &twice,
                "expected 3 GPUs, found 2 of the best kind, of 0: card (Vulkan, 1.0) at 0000:41:00.0; 1: card",
            ),
            ("5,", &twice, "expected a GPU 5, found 0: card"),
            (
                "0000:42:00.0",
                &twice,
                "expected a GPU at 0000:42:00.0, found 0: card",
            ),
        ] {
            let error = among(text, all).unwrap_err();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
