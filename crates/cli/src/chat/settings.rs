//! The settings of a chat that can be changed while it goes on.

use anyhow::{Result, anyhow, bail};
use sterna_engine::{Sampler, SamplerConfig};

use super::Chat;
use crate::numbers;
use crate::output;

impl Chat {
    /// Gives the setting `name` the value `text`. The random sequence continues, unless its seed is set.
    pub(super) fn set(&mut self, name: &str, text: &str) -> Result<()> {
        let of_name = |reason: String| anyhow!("{name}: {reason}, found `{text}`");
        let whole = || numbers::whole(text).map_err(of_name);
        let number = || numbers::number(text).map_err(of_name);
        let switch = || match text {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(of_name("expected on or off".to_owned())),
        };
        let n_vocab = self.sequence().session().model().config().n_vocab;
        let options = &mut self.options;
        let mut config = options.sampler.config().clone();
        match &*name.replace('_', "-") {
            "temperature" | "temp" => config.temperature = number()?,
            "top-k" => config.top_k = whole()?,
            "top-p" => config.top_p = number()?,
            "min-p" => config.min_p = number()?,
            "repeat-penalty" => config.repeat_penalty = number()?,
            "repeat-last-n" => config.repeat_last_n = whole()?,
            "frequency-penalty" => config.frequency_penalty = number()?,
            "presence-penalty" => config.presence_penalty = number()?,
            "seed" => {
                config.seed = numbers::seed(text).map_err(of_name)?;
                options.sampler = Sampler::new(config, n_vocab)?;
                return Ok(());
            }
            "max-tokens" => {
                options.max_tokens = whole()?;
                return Ok(());
            }
            "timings" => {
                options.shows_timings = switch()?;
                return Ok(());
            }
            "save-cache" => {
                options.saves_cache = switch()?;
                return Ok(());
            }
            _ => {
                let names: Vec<&str> = self.settings().iter().map(|(name, _)| *name).collect();
                bail!("/set: expected one of {}, found `{name}`", names.join(", "));
            }
        }
        options.sampler = options.sampler.with_config(config, n_vocab)?;
        Ok(())
    }

    /// All settings, with their values.
    fn settings(&self) -> [(&'static str, String); 12] {
        let SamplerConfig {
            temperature,
            top_k,
            top_p,
            min_p,
            repeat_penalty,
            repeat_last_n,
            frequency_penalty,
            presence_penalty,
            seed,
            ..
        } = self.options.sampler.config();
        let limit = |n: usize, all: &str| match n {
            usize::MAX => all.to_owned(),
            n => n.to_string(),
        };
        let switch = |is_on| if is_on { "on" } else { "off" }.to_owned();
        [
            ("temperature", temperature.to_string()),
            ("top-k", top_k.to_string()),
            ("top-p", top_p.to_string()),
            ("min-p", min_p.to_string()),
            ("repeat-penalty", repeat_penalty.to_string()),
            ("repeat-last-n", limit(*repeat_last_n, "all")),
            ("frequency-penalty", frequency_penalty.to_string()),
            ("presence-penalty", presence_penalty.to_string()),
            ("seed", seed.to_string()),
            (
                "max-tokens",
                limit(self.options.max_tokens, "as many as fit"),
            ),
            ("timings", switch(self.options.shows_timings)),
            ("save-cache", switch(self.options.saves_cache)),
        ]
    }

    pub(super) fn show_settings(&self) {
        output::reply(output::table(&self.settings()));
    }
}
